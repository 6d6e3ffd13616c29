"""Web pages: one file that holds everything, to be mailed, archived or read on a phone.

Images are data URIs and the style sheet is part of the page; nothing is loaded from anywhere.
"""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

# Lists longer than this are folded away behind their heading.
LONG_LIST = 12

_STYLE = """
:root { color-scheme: light dark; --text: #1d2329; --soft: #5b6670; --line: #dde2e7;
  --page: #f5f6f8; --card: #ffffff; --warn: #8a5200; --warn-back: #fff4e0; }
@media (prefers-color-scheme: dark) { :root { --text: #e7eaed; --soft: #a3adb6; --line: #39424a;
  --page: #14181c; --card: #1d2329; --warn: #ffcf8a; --warn-back: #3a2c14; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 0 0 .8rem; line-height: 1.3; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; }
.soft { color: var(--soft); font-size: .9rem; }
section, .note { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: 1.1rem; margin: 1.2rem 0; }
.note { color: var(--warn); background: var(--warn-back); border-color: transparent; }
.note ul { margin: .3rem 0 0; padding-left: 1.2rem; }
.note li, td.reason { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: .85rem; vertical-align: bottom; }
th.text, td.text { text-align: left; }
td.reason { white-space: normal; min-width: 14rem; }
tr.reference td { color: var(--soft); font-style: italic; }
.plots { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem),
  1fr)); margin-top: 1.2rem; align-items: start; }
figure { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: .4rem;
  padding: .4rem; }
figure img { display: block; width: 100%; max-width: 34rem; height: auto; margin: 0 auto; }
.plots figure:last-child:nth-child(odd) { grid-column: 1 / -1; }
@media (max-width: 40rem) { th, td { padding: .38rem .4rem; font-size: .9rem; }
  section { padding: .8rem; } }
details { margin-top: 1rem; }
summary { cursor: pointer; font-weight: 600; }
dl { margin: .4rem 0 0; }
dt { font-weight: 600; margin-top: .5rem; }
dd { margin: 0; color: var(--soft); }
"""


def document(title: str, body: str) -> str:
    """Return a complete HTML page in the style of all reports; `body` is HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def figure(picture: Path, description: str, width_rem: float | None = None) -> str:
    """Return a PNG file as part of the page, with words for who cannot see it."""
    data = base64.b64encode(picture.read_bytes()).decode("ascii")
    width = f'style="max-width:{width_rem:g}rem" ' if width_rem else ""
    return (
        f'<figure><img {width}alt="{escape(description)}" '
        f'src="data:image/png;base64,{data}"></figure>'
    )


def caption(text: str) -> str:
    """Return a line that stands back: what a table or a picture does not say itself."""
    return f'<p class="soft">{escape(text)}</p>'


def folded(heading: str, content: str, is_open: bool) -> str:
    """Return what is shown when its heading is clicked; `content` is HTML already."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(heading)}</summary>{content}</details>"


def note(heading: str, items: Sequence[str]) -> str:
    """Return a list that must not be overlooked; nothing if it is empty."""
    if not items:
        return ""
    listed = f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
    if len(items) > LONG_LIST:
        return f'<div class="note">{folded(f"{heading} ({len(items)})", listed, False)}</div>\n'
    return f'<div class="note"><strong>{escape(heading)}</strong>{listed}</div>\n'
