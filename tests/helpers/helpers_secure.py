"""Secure sums in tests: which message is which, apps that lose some, sessions without Flower."""

from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from helpers_grids import kind_of

from gems_flwr import good_enough_mod
from gems_flwr.carriers import MASKS
from gems_flwr.secure import NodeSecrets, Roster, SumSession

STAGES = ("secure-keys", "mask", "secure-opening")


def stage_of(content):
    """Return which message of a secure sum it is; the question's word for any other."""
    return "mask" if MASKS in content else kind_of(content)


def losing(stage, nodes):
    """Return a mod that loses the messages of a stage on some nodes."""

    def mod(message, context, call_next):
        if stage_of(message.content) == stage and context.node_config["partition-id"] in nodes:
            raise ConnectionError("gone")
        return call_next(message, context)

    return mod


def averaging_app(*outer, mod=None, step=0.25, inner=(), limits=None):
    """Return an app whose node i moves weights by ``step (i + 1)`` on 10 (i + 1) examples."""
    client = ClientApp(mods=[*outer, mod or good_enough_mod(limits=limits), *inner])

    @client.train()
    def train(message, context):
        node = context.node_config["partition-id"]
        arrays = message.content["arrays"].to_numpy_ndarrays()
        new = [a + step * (node + 1) if a.dtype.kind == "f" else a + node for a in arrays]
        metrics = MetricRecord({"num-examples": 10 * (node + 1), "train_loss": float(node)})
        content = RecordDict({"arrays": ArrayRecord(new), "metrics": metrics})
        return Message(content, reply_to=message)

    @client.evaluate()
    def evaluate(message, context):
        node = context.node_config["partition-id"]
        metrics = MetricRecord({"num-examples": 10 * (node + 1), "accuracy": node / 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return client


def initial_model():
    return ArrayRecord([np.zeros((2, 3), np.float32), np.ones(4), np.array([5, 7])])


def write_keys(folder, count):
    """Write private keys of both kinds, and the public ones into a folder ``trusted``."""
    (folder / "trusted").mkdir()
    open_ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    for number in range(count):
        key = ec.generate_private_key(ec.SECP384R1())
        key = ed25519.Ed25519PrivateKey.generate() if number % 2 else key
        private = key.private_bytes(serialization.Encoding.PEM, *plain)
        (folder / str(number)).write_bytes(private)
        public = key.public_key().public_bytes(*open_ssh)
        (folder / "trusted" / f"{number}.pub").write_bytes(public)


@dataclass
class Play:
    """All nodes and the server of one session.

    Every node's secrets go to text and back between two stages, as on a deployment.
    """

    nodes: int
    threshold: float = 2 / 3
    degree: int | None = None
    sums: int = 1
    session: str = "s"
    signers: dict = field(default_factory=dict)
    trusted: object = None
    secrets: dict = field(default_factory=dict, init=False)
    server: SumSession = field(default=None, init=False)
    letters: dict = field(default_factory=dict, init=False)

    def keep(self, node, secrets):
        self.secrets[node] = secrets.to_json()

    def of(self, node):
        return NodeSecrets.from_json(self.secrets[node])

    def advertise(self, lost=()):
        keys = {}
        for node in range(self.nodes):
            secrets = NodeSecrets.begin(self.session, self.sums, self.signers.get(node))
            self.keep(node, secrets)
            if node not in lost:
                keys[node] = secrets.own
        self.server = SumSession(self.roster(keys), tuple(sorted(keys)))
        return self

    def roster(self, keys):
        return Roster(self.session, self.threshold, self.degree, keys)

    def join(self, node, roster=None):
        secrets, self.letters[node] = self.of(node).join(roster or self.server.roster)
        self.keep(node, secrets)

    def mask(self, number, layout, words, lost=(), members=None):
        """Mask the numbers of nodes, who join the session at the first sum."""
        masked = {}
        for node in set(self.server.members) - set(lost):
            if number == 0:
                self.join(node)
            there = self.server.members if members is None else members
            secrets = self.of(node).entered(number, there)
            secrets, masked[node] = secrets.masked(layout, words[node])
            self.keep(node, secrets)
        return masked

    def sign(self, node):
        signer = self.signers.get(node)
        return signer.sign(self.of(node).list_text) if signer else b""

    def shorten(self, number, members):
        """Let nodes agree to a list; return what they give of masks in common with others."""
        gone = {}
        for node in members:
            secrets, gone[node] = self.of(node).narrowed(number, members)
            self.keep(node, secrets)
        return gone

    def reveal(self, number, members, lost=(), signatures=None):
        shares = {}
        for node in set(members) - set(lost):
            letters = {p: each[node] for p, each in self.letters.items() if node in each}
            secrets, shares[node], _ = self.of(node).opened(
                number, members, signatures or {}, letters, is_checked=signatures is not None
            )
            self.keep(node, secrets)
        return shares

    def open(self, number, layout, masked, late=(), lost=()):
        """Return the sum: of those who masked, but for the `late`, without shares of the `lost`."""
        gone = {node: {} for node in masked}
        for left in (set(masked), set(masked) - set(late)):
            if left != set(self.server.members):
                self.server = self.server.with_members(left)
                for node, keys in self.shorten(number, self.server.members).items():
                    gone[node] |= keys
        shares = self.reveal(number, self.server.members, lost)
        seeds, _ = replace(self.server, number=number).seeds(shares)
        return self.server.total(layout, masked, seeds, gone)
