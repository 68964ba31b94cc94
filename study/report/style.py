"""How figures look, and how they are saved so that the same runs give the same bytes."""

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

INK, MUTED, PAPER = "#1b1f24", "#6e7781", "#ffffff"
"""Text and axes, what stands back, the ground: the page swaps the first and the last for its theme's colours."""

COLOURS = ("#d1570c", "#a8519b", "#6f68c9", "#2b7cc0", "#148f77", "#8a7a0a", "#7d6657")
"""Distinct for all common kinds of colour blindness in this order, and readable on white and on near-black."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#8c959f",
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # a label is text: a $ in it begins no formula
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "errorbar.capsize": 2.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.dpi": 200,
    "text.hinting": "none",  # else a text is as wide as the resolution makes it, and the layout fits only one
    "svg.hashsalt": "moco-study",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
}

METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
}


def render(figure: Figure) -> dict[str, bytes]:
    """The figure as svg, png and pdf, without dates, versions or random ids."""
    found = {}
    with rc_context(RC):  # the hash salt and the fonts count when a file is written, too
        for kind, metadata in METADATA.items():
            out = io.BytesIO()
            figure.savefig(out, format=kind, metadata=metadata)
            found[kind] = out.getvalue()
    return found


_END = "line's end"
_GAP = 10.5
"""Points between two names."""


def label_end(axes: Axes, x: float, y: float, text: str, colour: str, size: float = 8.5) -> None:
    """Write a name to the right of (x, y), in data coordinates; an x of infinity is the right edge. `finish` moves the
    names at one x apart."""
    edge = math.isinf(x)
    axes.annotate(
        text,
        (1 if edge else x, y),
        xycoords=("axes fraction" if edge else "data", "data"),
        xytext=(4 if edge else 7, 0),
        textcoords="offset points",
        color=colour,
        va="center",
        fontsize=size,
        annotation_clip=False,
        label=_END,
    )


def finish(figure: Figure, note: str) -> None:
    """Write the note below, fix the layout, move names that stand above each other apart, and off the lines.

    The layout is made once, not once a file format.
    """
    width = round(figure.get_figwidth() * 16)
    figure.supxlabel(textwrap.fill(note, width, break_on_hyphens=False), x=0.01, ha="left", fontsize=7.5, color=MUTED)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:
        ends = [text for text in axes.texts if isinstance(text, Annotation) and text.get_label() == _END]
        inside = [end for end in ends if end.xycoords == ("data", "data")]
        _move_apart(axes, [end for end in ends if end not in inside], 72 / figure.dpi)
        for place in sorted({end.xy[0] for end in inside}):
            _move_apart(axes, [end for end in inside if end.xy[0] == place], 72 / figure.dpi)
        for end in sorted(inside, key=lambda end: end.xy):
            _move_off(axes, end, [other for other in ends if other is not end])


def _move_apart(axes: Axes, names: list[Annotation], points: float) -> None:
    names.sort(key=lambda name: (name.xy[1], name.get_text()))
    natural = [float(axes.transData.transform((0, name.xy[1]))[1]) * points for name in names]
    lowest = float(axes.bbox.y0) * points + 5  # on the axis itself its line would strike a name through
    for i, (name, here, there) in enumerate(zip(names, natural, spread(natural, _GAP), strict=True)):
        name.set_position((name.get_position()[0], max(there, lowest + i * _GAP) - here))


def _move_off(axes: Axes, name: Annotation, others: Sequence[Annotation]) -> None:
    """Move a name inside the axes up or down to the nearest place where no line and no other name runs through it."""
    paths = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
    for bars in axes.collections:
        paths += [bars.get_transform().transform_path(path) for path in bars.get_paths()]
    taken = [other.get_window_extent() for other in others]
    x, y = name.get_position()
    for move in (0.0, *(sign * i * 2.0 for i in range(1, 30) for sign in (1, -1))):
        name.set_position((x, y + move))
        box = name.get_window_extent()
        inside = axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
        if inside and not box.count_overlaps(taken) and not any(p.intersects_bbox(box, filled=False) for p in paths):
            return
    name.set_position((x, y))


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Rising positions near ``heights`` (rising) with at least ``gap`` between two: neighbours too close form a block
    that is centred on their mean."""
    blocks: list[list[float]] = []
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _low(blocks[-1], gap) - _high(blocks[-2], gap) < gap:
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [_low(block, gap) + i * gap for block in blocks for i in range(len(block))]


def _centre(block: Sequence[float]) -> float:
    return sum(block) / len(block)


def _low(block: Sequence[float], gap: float) -> float:
    return _centre(block) - (len(block) - 1) * gap / 2


def _high(block: Sequence[float], gap: float) -> float:
    return _centre(block) + (len(block) - 1) * gap / 2
