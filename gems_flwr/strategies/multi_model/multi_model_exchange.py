"""The messages of a `MultiModel` round: introductions, and questions about models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message

from gems_flwr.errors import RoundFailedError
from gems_flwr.server.addressing import is_lost
from gems_flwr.server.log import log_warning, readable
from gems_flwr.server.loop import RoundLoop
from gems_flwr.strategies.multi_model.multi_model_state import MultiModelState
from gems_flwr.typing import Arrays
from gems_flwr.wire.asking import ask_for_models
from gems_flwr.wire.fault_reasons import is_refusal
from gems_flwr.wire.keys import TRAIN
from gems_flwr.wire.multi_model_replies import ModelPart, unpack_holdings, unpack_models_reply
from gems_flwr.wire.multi_model_requests import vector_record
from gems_flwr.wire.records import to_record
from gems_flwr.wire.requests import Action, ModelsRequest, ReportKind

# By node and model.
Parts = dict[str, dict[str, ModelPart]]


class MultiModelExchange:
    """What goes to the nodes and comes back in one round of `MultiModel`.

    Parameters
    ----------
    strategy : RoundLoop
        Whose round it is.
    server_round : int
        The round, from 1.
    config : ConfigRecord
        The train config, sent along.
    models : mapping from str to mapping
        The global models.
    state : MultiModelState
        What is known of the nodes; kept up to date.
    keeps : bool
        Whether nodes keep the models that they are given.
    control_variates : bool
        Whether control variates travel along, in both directions (SCAFFOLD).
    """

    def __init__(
        self,
        strategy: RoundLoop,
        server_round: int,
        config: ConfigRecord,
        models: Mapping[str, Arrays],
        state: MultiModelState,
        *,
        keeps: bool,
        control_variates: bool,
    ) -> None:
        self._strategy, self._round, self._config = strategy, server_round, config
        self._models, self._state = models, state
        self._keeps, self._control_variates = keeps, control_variates
        self._records = {name: to_record(arrays) for name, arrays in models.items()}
        # Why a model is missing from a reply, by node and model.
        self.faults: dict[tuple[str, str], str] = {}

    def introduce(self, ids: Mapping[str, int], newcomers: Sequence[str]) -> dict[str, int]:
        """Ask newly joined nodes what they have; return all nodes' ids by the names known now."""
        strategy, state = self._strategy, self._state
        messages = strategy.messages(
            self._round,
            [ids[name] for name in newcomers],
            TRAIN,
            None,
            self._config,
            step="introduce",
        )
        for message in messages:
            ask_for_models(message.content, ModelsRequest(state.run, "introduce"))
        known = len(ids) - len(newcomers)
        replies = strategy.collect(messages)
        try:
            answers = strategy.accept(
                replies,
                lambda content: unpack_holdings(content, self._models),
                at_least=max(0, strategy.min_nodes - known),
            )
        except RoundFailedError as error:
            if error.replies or len(error.failures) < len(ids) or any(map(is_lost, replies)):
                raise
            said = {failure.node: failure.reason for failure in error.failures}
            if any(map(is_refusal, said.values())):
                raise
            # Nobody could answer the first question of all.
            raise strategy.without_mod(said) from error
        state.holdings |= {answer.node: answer.value for answer in answers}
        # A node may have told its name only now.
        ordered = sorted(ids.values(), key=strategy._nodes.position)
        return {strategy._nodes.name(node): node for node in ordered}

    def ask(
        self,
        ids: Mapping[str, int],
        wanted: Mapping[str, Sequence[str]],
        action: Action,
        step: str,
        report: ReportKind = "model",
    ) -> Parts:
        """Ask nodes about models, and those that lack something once more.

        Parameters
        ----------
        ids : mapping from str to int
            The nodes' ids by name.
        wanted : mapping from str to sequence of str
            The models that each node is asked about.
        action, report
            See `wire.ModelsRequest`.
        step : str
            Tells this exchange from the others of the round.

        Returns
        -------
        dict
            What usable replies say, by node and model.
        """
        if not wanted:
            return {}
        parts, needs = self._send(ids, wanted, action, step, report)
        if needs:
            # They have lost what they were given, or what they trained; now it comes with the
            # message, and the same seed gives the same training.
            for node, models in needs.items():
                for model in models:
                    self._state.kept.get(node, {}).pop(model, None)
            again: Action = "train" if action == "send" else action
            more, _ = self._send(ids, needs, again, f"{step}-again", report)
            for node, by_model in more.items():
                parts[node] = {**parts.get(node, {}), **by_model}
        return parts

    def _send(
        self,
        ids: Mapping[str, int],
        wanted: Mapping[str, Sequence[str]],
        action: Action,
        step: str,
        report: ReportKind,
    ) -> tuple[Parts, dict[str, list[str]]]:
        strategy, state = self._strategy, self._state
        messages = strategy.messages(
            self._round, [ids[n] for n in wanted], TRAIN, None, self._config, step=step
        )
        requests: dict[int, ModelsRequest] = {}
        for (node, models), message in zip(wanted.items(), messages, strict=True):
            versions = {model: state.versions[model] for model in models}
            kept = state.kept.get(node, {})
            lacks = [m for m in models if action != "send" and kept.get(m) != versions[m]]
            settled = state.settled.get(node, {})
            request = ModelsRequest(
                run=state.run,
                action=action,
                versions=versions,
                report=report,
                settled={m: settled[m] for m in models if m in settled},
                keep=self._keeps,
            )
            requests[message.metadata.dst_node_id] = request
            ask_for_models(
                message.content,
                request,
                {model: self._records[model] for model in lacks},
                {m: self._control(m) for m in models} if self._control_variates else None,
            )
        names = {ids[node]: node for node in wanted}
        return self._accept(strategy.collect(messages), requests, names)

    def _accept(
        self,
        replies: Sequence[Message],
        requests: Mapping[int, ModelsRequest],
        names: Mapping[int, str],
    ) -> tuple[Parts, dict[str, list[str]]]:
        strategy, state = self._strategy, self._state
        parts: Parts = {}
        needs: dict[str, list[str]] = {}
        # What a reply must hold depends on whose it is.
        asked = {
            id(r.content): requests[r.metadata.src_node_id] for r in replies if r.has_content()
        }
        answers = strategy.accept(
            replies,
            lambda content: unpack_models_reply(
                content, asked[id(content)], self._models, control=self._control_variates
            ),
        )
        # In this round a node goes by the name that it began with, whatever it tells now.
        senders = {strategy._nodes.name(sender): sender for sender in requests}
        usable = {senders[answer.node]: answer.value for answer in answers}
        for sender in {reply.metadata.src_node_id for reply in replies} - usable.keys():
            state.kept.pop(names[sender], None)
        for sender, value in usable.items():
            node, request = names[sender], requests[sender]
            parts[node] = dict(value.parts)
            for model in value.parts:
                if request.keep:
                    state.kept.setdefault(node, {})[model] = request.versions[model]
            for model, said in value.failed.items():
                self.faults[node, model] = reason = readable(said)
                log_warning("left_out", round=self._round, node=node, model=model, reason=reason)
            if value.needs:
                needs[node] = list(value.needs)
        return parts, needs

    def _control(self, model: str) -> ArrayRecord:
        return vector_record(self._state.control(model, self._models[model]))
