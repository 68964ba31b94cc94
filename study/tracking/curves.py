"""A run's training at a glance: one small figure of its curves, the same bytes for the same journal."""

import importlib.util
import io
import logging
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from study.run.journal import Reading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "loss − ln(K+1)": "train/excess_loss",
    "pretext accuracy": "train/accuracy",
    "kNN accuracy": "knn",
    "probe: top-1": "probe/top1",
    "probe: loss": "probe/loss",
    "cosine of old keys with new ones": r"consistency/cosine_age_(\d+)",
}
"""Title → metrics that a panel shows; one without a value is left out."""
DPI = 110


def draw(readings: Iterable[Reading], title: str) -> bytes | None:
    """The curves as a PNG; None without matplotlib, or without anything to show.

    Args:
        readings: the run's journal, sorted by step, one value for each (step, name).
        title: what stands above the figure.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    curves: dict[str, list[tuple[int, float]]] = {}
    for reading in readings:
        if math.isfinite(reading.value):
            curves.setdefault(reading.name, []).append((reading.step, reading.value))
    found = {name: [one for one in curves if re.fullmatch(wanted, one)] for name, wanted in PANELS.items()}
    panels = {name: {one: curves[one] for one in those} for name, those in found.items() if those}
    if not panels:
        return None
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from study.report.style import METADATA, RC

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # what it says of its cache would disturb the terminal
    last = max(steps[-1][0] for those in panels.values() for steps in those.values())
    rows, columns = math.ceil(len(panels) / 2), min(2, len(panels))
    with rc_context(RC):
        figure = Figure(figsize=(3.4 * columns, 2.1 * rows + 0.3))
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, parse_math=False)  # a label may hold a $
        for place, (name, those) in enumerate(panels.items(), 1):
            axes = figure.add_subplot(rows, columns, place, title=name, xlabel="step", xlim=(0, 1.02 * last + 1))
            _panel(axes, those)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=DPI, metadata=METADATA["png"])
        return out.getvalue()


def _panel(axes: "Axes", curves: dict[str, list[tuple[int, float]]]) -> None:
    """One line for each metric; a legend of their ages, in steps, if they are several."""
    from study.report.style import COLOURS

    ages = {name: int(name.rpartition("_")[2]) for name in curves} if len(curves) > 1 else dict.fromkeys(curves, 0)
    for place, name in enumerate(sorted(curves, key=lambda name: ages[name])):
        steps, values = zip(*curves[name], strict=True)
        marker, colour = "o" if len(steps) < 30 else "", COLOURS[place % len(COLOURS)]
        axes.plot(steps, values, lw=1.2, marker=marker, ms=3, color=colour, label=ages[name])
    if len(curves) > 1:
        axes.legend(title="age, steps", fontsize=7, title_fontsize=7, frameon=False)
