"""How figures look, and how they are saved so that the same runs give the same bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, PAPER = "#1b1f24", "#6e7781", "#ffffff"
"""Text and axes, what stands back, the ground: the page swaps the first and the last for its theme's colours."""

COLOURS = ("#d1570c", "#a8519b", "#6f68c9", "#2b7cc0", "#148f77", "#8a7a0a", "#7d6657")
"""Distinct for all common kinds of colour blindness in this order, and readable on white and on near-black."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

RC: dict[str, Any] = {
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


def save(figure: Figure, stem: Path) -> None:
    """Write ``stem.svg``, ``.png`` and ``.pdf`` without dates, versions or random ids."""
    from study.run.files import write_atomic

    for kind, metadata in METADATA.items():
        import io

        out = io.BytesIO()
        figure.savefig(out, format=kind, metadata=metadata)
        write_atomic(stem.with_suffix(f".{kind}"), out.getvalue())


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]], gap: float = 11.0) -> None:
    """Write each line's name at its right end, moved apart so that no two overlap.

    Args:
        axes: with its final limits.
        ends: (x, y, text, colour) of each line's last point, in data coordinates.
        gap: least distance of two names, in points.
    """
    scale = 72 / axes.figure.dpi
    places = sorted(((axes.transData.transform((x, y))[1] * scale, x, y, text, colour) for x, y, text, colour in ends))
    heights = spread([place[0] for place in places], gap)
    for height, (natural, x, y, text, colour) in zip(heights, places, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(7, height - natural),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )


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


def note(figure: Figure, text: str) -> None:
    """What the numbers are, below the figure: it travels with it."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color=MUTED)
