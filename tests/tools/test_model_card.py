"""A model card: true, short, and safe whatever nodes are called."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gems_flwr import Cone, FedAvg, Gems, LayerwiseGems, SecureSum
from gems_flwr.core.records import to_record
from gems_flwr.core.run import RoundRecord, RunResult, Traffic
from gems_flwr.errors import Failure
from gems_flwr.tools import write_model_card
from gems_flwr.tools.model_card import shown

LAYER = {"weight": np.zeros((3, 4)), "bias": np.zeros(3)}


def result(arrays=LAYER, details=None, **last):
    history = [RoundRecord(0), RoundRecord(1, traffic=Traffic(1234, 5, 2, 2), **last)]
    return RunResult(
        to_record(arrays), history=tuple(history), details=details or {}, stopped_because="done"
    )


def card(tmp_path, ended=None, **known):
    return write_model_card(ended or result(), tmp_path / "card.md", **known)


def front_matter(text):
    _, matter, body = text.split("---\n", 2)
    return yaml.safe_load(matter), body


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.links += [value for key, value in attributes if key in ("href", "src")]


def rendered(text):
    """What a renderer makes of it that lets HTML through."""
    html = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(front_matter(text)[1])
    parser = Tags()
    parser.feed(html)
    return html, parser


HOSTILE = [
    "<script>alert(1)</script>",
    "`</code><b>bold</b>`",
    "north | 99 | 1.0000 |",
    "north\n\n# Licence: mine\n\n[free](https://evil.example)",
    "[click](javascript:alert(1)) ![x](https://evil.example/x.png)",
    "\\` | \\",
    "a\u202egpj.exe\u0000\u2028| x",
    "--- \nlicense: mit\n---",
    "``` \n~~~ $$x$$ &lt;b&gt; &#60;i&#62; {{ x }} {title}",
    "x" * 10_000,
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_node_writes_is_more_than_text(text, tmp_path):
    def made(word):
        ended = result(
            nodes_asked=(word,),
            nodes_answered=(word,),
            failures=(Failure(word, word),),
            exchanges=(word,),
            server_metrics={word: 1.0},
            evaluate_metrics={word: 1.0},
            details={"node_scores": {word: 0.5}, "status": "feasible", "space": word},
        )
        ended.stopped_because = word
        return card(tmp_path, ended, title=word, data=word, command=word or "x")

    hostile, plain = made(text), made("n")
    html, parser = rendered(hostile)
    expected, harmless = rendered(plain)
    assert parser.tags <= harmless.tags
    assert parser.links == harmless.links
    for tag in ("<code", "<pre>", "<li>", "<h1>", "<h2>"):
        assert html.count(tag) == expected.count(tag), tag
    assert front_matter(hostile)[0] == front_matter(plain)[0]
    assert len(hostile) < 12_000 + 2 * len(text)
    assert not re.search("[\u202e\u0000\u2028]", hostile)


@given(st.text())
def test_a_code_span_has_one_beginning_and_one_end(text):
    made = shown(text)
    assert made.count("`") == 2
    assert made[0] == made[-1] == "`"
    assert not set("\n\r") & set(made)


def test_it_says_what_is_known_and_calls_the_rest_so(tmp_path):
    text = card(tmp_path)
    assert "On the server's test data: not measured" in text
    assert "ended because done" in text
    assert "1 models with 15 weights" in text  # 3 · 4 + 3
    assert "unknown training examples" in text
    assert "Which options protected the nodes is not known here." in text
    # A licence is the owner's to choose.
    assert front_matter(text)[0] == {"tags": ["federated-learning", "flower", "gems-flwr"]}
    text = card(tmp_path, result(nodes_asked=("a", "b")), strategy=Gems(), examples=7)
    assert "by federated learning of 2 nodes on `data of their own`, 7 training" in text
    assert "`Gems`, 1 rounds, 1,234 bytes up" in text
    assert (tmp_path / "card.md").read_text() == text


def test_where_sums_alone_were_seen_no_node_has_a_number(tmp_path):
    ended = result(details={"node_scores": {"north": 0.25, "south": 0.75}})
    open_card = card(tmp_path, ended, strategy=FedAvg())
    assert "Node scores: mean 0.5000 of 2; north: 0.2500, south: 0.7500" in open_card
    assert "Secure sums: off" in open_card
    closed = card(tmp_path, ended, strategy=FedAvg(secure=SecureSum()))
    assert "Secure sums: on" in closed
    assert not re.search(r"north|0\.25", closed)


def test_privacy_is_what_was_asked_for_and_a_known_seed_is_not_sold_as_privacy(tmp_path):
    strategy = Gems(space=Cone(dp_epsilon=2.0, dp_clip=1.0, dp_seeded=True))
    for made in (strategy, LayerwiseGems(head=strategy)):
        text = card(tmp_path, strategy=made)
        assert "noise of epsilon 2;" in text
        assert "The noise came from the run's seed" in text
    promise = {"epsilon": 1.0, "delta": 1e-5, "nodes": 5, "colluders": 1}
    assert "of the sum: epsilon 1, delta 1e-05" in card(
        tmp_path, result(details={"privacy": promise})
    )
    assert "none was asked for" in card(tmp_path, strategy=FedAvg())
