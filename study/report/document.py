"""A page as blocks, written as Markdown and as one HTML file that asks nothing of the network and needs no script."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from study.report.style import INK, MUTED, PAPER


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; ``**bold**`` and backquotes are understood."""

    text: str


@dataclass(frozen=True)
class Grid:
    """A table; the first ``left`` columns are text, the others numbers, and the last ``floors`` rows stand apart."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    floors: int = 0


@dataclass(frozen=True)
class Picture:
    """``figures/<name>.svg`` with its caption, and its words for those who cannot see it."""

    name: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Code:
    text: str


Block = Heading | Text | Grid | Picture | Code


def to_markdown(blocks: Sequence[Block]) -> str:
    """The page for GitHub and for a terminal; pictures are links beside it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Grid(header, rows, left, _):
            ruler = ["---"] * left + ["---:"] * (len(header) - left)
            lines = [[cell.replace("|", r"\|") for cell in line] for line in (header, *rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], ruler, *lines[1:]))
        case Picture(name, caption, alt):
            return f"![{alt}](figures/{name}.svg)\n\n{caption}"
        case Code(text):
            return f"```sh\n{text}\n```"


def to_html(title: str, blocks: Sequence[Block], figures: Mapping[str, str]) -> str:
    """The same page as one file.

    Args:
        title: of the window.
        blocks: the page.
        figures: a picture's name → its SVG text, which is put into the page in the theme's colours.
    """
    body = "\n".join(_html(block, figures) for block in blocks)
    contents = "\n".join(
        f'<li><a href="#{_anchor(block.text)}">{_inline(block.text)}</a></li>'
        for block in blocks
        if isinstance(block, Heading) and block.level == 2
    )
    return _PAGE.format(title=html.escape(title), style=_STYLE, contents=contents, body=body)


def _html(block: Block, figures: Mapping[str, str]) -> str:
    match block:
        case Heading(level, text):
            return f'<h{level} id="{_anchor(text)}">{_inline(text)}</h{level}>'
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Grid(header, rows, left, floors):
            head = "".join(f'<th scope="col"{_side(i, left)}>{_inline(cell)}</th>' for i, cell in enumerate(header))
            first = len(rows) - floors
            lines = "\n".join(_row(row, left, i >= first) for i, row in enumerate(rows))
            return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>'
        case Picture(name, caption, alt):
            return f"<figure>{_inline_svg(figures[name], alt)}<figcaption>{_inline(caption)}</figcaption></figure>"
        case Code(text):
            return f"<pre><code>{html.escape(text)}</code></pre>"


def _row(cells: Sequence[str], left: int, floor: bool) -> str:
    inside = "".join(f"<td{_side(i, left)}>{_answer(cell)}</td>" for i, cell in enumerate(cells))
    return f"<tr{' class=floor' if floor else ''}>{inside}</tr>"


def _answer(cell: str) -> str:
    word = cell.strip("*")
    return f'<b class="{word}">{word}</b>' if word in {"holds", "fails", "undecided"} and "*" in cell else _inline(cell)


def _side(column: int, left: int) -> str:
    return "" if column < left else ' class="number"'


def _anchor(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)


def _inline_svg(svg: str, alt: str) -> str:
    """The drawing alone, named for screen readers, in the page's own ink on its own ground."""
    drawing = svg[svg.index("<svg") :].strip()
    drawing = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", drawing, count=1)
    drawing = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", drawing, count=1)
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    for colour, variable in ((INK, "--ink"), (PAPER, "--paper"), (MUTED, "--muted")):
        drawing = drawing.replace(colour, f"var({variable})")
    return drawing.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1)


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --muted: #59636e; --line: #d1d9e0; --soft: #f6f8fa;
  --good: #1a7f37; --bad: #c4320a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --muted: #9198a1; --line: #3d444d;
  --soft: #151b23; --good: #3fb950; --bad: #ff8a5c; } }
body { margin: 0 auto; max-width: 58rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); }
h1, h2, h3 { text-wrap: balance; } a { color: inherit; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { border-bottom: 2px solid var(--ink); } .number { text-align: right; white-space: nowrap; }
tr.floor td { color: var(--muted); font-style: italic; }
figure { margin: 1.5rem 0 2rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--muted); font-size: .875rem; margin-top: .5rem; }
pre { background: var(--soft); padding: .75rem 1rem; overflow-x: auto; } code { font-size: .875em; }
b.holds { color: var(--good); } b.fails { color: var(--bad); } b.undecided { color: var(--muted); }
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<nav aria-label="Contents"><ul>
{contents}
</ul></nav>
<main>
{body}
</main>
</body>
</html>
"""
