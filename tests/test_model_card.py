"""The text of a model card: true, short, and safe whatever nodes are called."""

import re
from html.parser import HTMLParser

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from gems_flwr import CardModel, ModelCard
from gems_flwr.model_card import NodeData, shown

LAYER = CardModel({"weight": (3, 4), "bias": (3,)}, input_shape=(4,), classes=3, scale=0.5)


def card(**fields):
    usual = {"title": "wards", "strategy": "Gems", "models": {"model": LAYER}, "rounds": 1}
    return ModelCard(**{**usual, **fields})


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
    """What a renderer makes of it that lets HTML through and links whatever looks like a link."""
    html = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(front_matter(text)[1])
    parser = Tags()
    parser.feed(html)
    return html, parser


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "`</code><b>bold</b>`",
    "north | 99 | 1.0000 |",
    "north\n\n# Licence: mine\n\n[free](https://evil.example)",
    "[click](javascript:alert(1))",
    "![x](https://evil.example/x.png)",
    "\\` | \\",
    "a\u202egpj.exe\u0000\u2028| x",
    "https://evil.example www.evil.example",
    "--- \nlicense: mit\n---",
    "``` \n~~~ $$x$$ &lt;b&gt; &#60;i&#62; {{ x }}",
    "x" * 10_000,
    "",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_node_writes_is_more_than_text(text):
    made = card(
        nodes={text: NodeData(3)},
        node_scores={text: 0.5},
        left_out={text: text},
        withdrawn=[(text, text)],
        test={text: 1.0},
        nodes_mean={text: 1.0},
        exchanges={text: 1},
        stopped_because=text,
        settings={text: text},
        versions={text: text},
        title=text,
        command=text,
    ).to_markdown()
    plain = card(
        nodes={"n": NodeData(3)}, node_scores={"n": 0.5}, left_out={"n": "n"},
        withdrawn=[("n", "n")], test={"n": 1.0}, nodes_mean={"n": 1.0}, exchanges={"n": 1},
        stopped_because="n", settings={"n": "n"}, versions={"n": "n"}, title="n", command="n",
    ).to_markdown()  # fmt: skip
    html, parser = rendered(made)
    expected, harmless = rendered(plain)
    assert parser.tags <= harmless.tags
    assert parser.links == harmless.links
    # The same tables, with as many rows and cells; the same headings.
    for tag in ("<table>", "<tr>", "<td>", "<h1>", "<h2>"):
        assert html.count(tag) == expected.count(tag), tag
    assert front_matter(made)[0] == front_matter(plain)[0]
    assert len(made) < 8000
    assert not re.search("[\u202e\u0000\u2028]", made)


@given(st.text())
def test_a_code_span_has_one_beginning_and_one_end(text):
    made = shown(text)
    assert made == "(empty)" or (made.count("`") == 2 and made[0] == made[-1] == "`")
    assert not set("|\n\r\\") & set(made)


def test_the_front_matter_is_yaml_that_says_what_is_known():
    known, _ = front_matter(card(test={"accuracy": 0.9, "loss": 0.1}).to_markdown())
    assert known == {
        "tags": ["federated-learning", "flower", "gems-flwr"],
        "metrics": ["accuracy"],
    }
    # A licence is the owner's to choose.
    assert "license" not in known
    assert "metrics" not in front_matter(card(test={"rmse": 1.0}).to_markdown())[0]


def test_what_nobody_measured_is_called_so():
    text = card().to_markdown()
    assert "On the server's test data: not measured" in text
    assert "On single nodes' own data: not measured" in text
    assert "| nodes were asked for | not known |" in text
    assert "Nobody was left out, and nobody left." in text
    assert "15" in re.search(r"\| weights \| (\d+) \|", text).group(1)  # 3 · 4 + 3


def test_where_sums_alone_were_seen_no_node_has_a_number():
    nodes = {"north": NodeData(120), "south": NodeData(80)}
    scores = {"north": 0.25, "south": 0.75}
    open_card = card(nodes=nodes, node_scores=scores).to_markdown()
    assert "| `north` | 120 |" in open_card
    assert "| `north` | 0.2500 |" in open_card
    closed = card(nodes=nodes, node_scores=scores, hidden=True).to_markdown()
    assert "2 nodes, 200 examples" in closed
    assert not re.search(r"north|0\.25|\b120\b", closed)


def test_a_node_that_did_not_say_is_not_counted_as_nothing():
    text = card(nodes={"north": NodeData(120), "south": NodeData()}).to_markdown()
    assert "| `south` | not told |" in text
    assert "2 nodes, not told by all examples" not in text
    assert "2 nodes; 120 examples of the 1 that told" in text


def test_members_of_one_kind_are_described_once():
    members = {f"node {number}": LAYER for number in range(3)}
    other = CardModel({"weight": (2, 2)})
    text = card(models={**members, "small": other}).to_markdown()
    assert "### `node 0`, `node 1`, `node 2`, each" in text
    assert text.count("| weights | 15 |") == 1
    assert "### `small`\n" in text


def test_thousands_of_nodes_do_not_make_a_long_card():
    nodes = {str(number): NodeData(1) for number in range(5000)}
    text = card(nodes=nodes).to_markdown()
    assert "… and 4950 more" in text
    assert "5,000 nodes, 5,000 examples" in text
    assert len(text.splitlines()) < 200
