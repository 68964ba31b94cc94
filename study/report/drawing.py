"""What the figures share: numbers of arms, floors, and the words that say how the numbers were made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study import metrics
from study.report.histories import CURVES, OLDEST
from study.report.load import Arm, SweepRuns
from study.report.style import MUTED, label_end
from study.sweep.grid import Label

WIDTH = 7.6
"""Inches; at a README's width the text stays readable."""


@dataclass(frozen=True)
class Drawn:
    """A figure with the words that go with it."""

    name: str
    figure: Figure
    caption: str
    alt: str


LONG = {CURVES[1]: "pretext accuracy (%)", CURVES[0]: "loss − ln(K+1), nats", OLDEST: "cosine of the oldest keys"}


def line_and_x(sweep: SweepRuns) -> tuple[str, str]:
    """The axis whose values are numbers is x; of two such, or none, the second."""
    first, second = sweep.axes
    numeric = [all(is_number(arm.labels.get(axis, 0)) for arm in sweep.measured) for axis in sweep.axes]
    return (second, first) if numeric == [True, False] else (first, second)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_of(sweep: SweepRuns, arms: Sequence[Arm], name: str) -> list[tuple[float, float]]:
    """(mean, SD) of each arm in the printed unit; NaN without values, SD 0 with one."""
    factor = metrics.of(name).factor
    samples = [sweep.values(arm, name) * factor for arm in arms]
    return [(float(s.mean()) if len(s) else math.nan, float(s.std(ddof=1)) if len(s) > 1 else 0.0) for s in samples]


def errorbar(axes: Axes, x: Sequence[float], points: Sequence[tuple[float, float]], colour: str, marker: str) -> None:
    y, sd = np.array(points).reshape(-1, 2).T
    axes.errorbar(x, y, yerr=sd if sd.any() else None, color=colour, marker=marker)


def floors(sweep: SweepRuns, axes: Axes, name: str, colour: str = MUTED) -> None:
    """What no training, or no encoder, gives in that metric: dashed lines with their names at the right edge."""
    metric = metrics.of(name)
    for floor in sweep.floors:
        values = sweep.values(floor, name)
        if len(values):
            height = float(values.mean()) * metric.factor
            axes.axhline(height, color=colour, linestyle="--", linewidth=0.9)
            label_end(axes, math.inf, height, f"{floor.name}, {metric.label} {height:.1f}", colour, 7.5)


def grow(axes: Axes, room: float) -> float:
    """Some room at the top and bottom; returns the height of the axis."""
    low, high = axes.get_ylim()
    axes.set_ylim(low - room / 2, high + room / 2)
    return float(high - low + room)


def values_of(values: Sequence[Label | None], keep_order: bool = False) -> list[Label | None]:
    found: list[Label | None] = list(dict.fromkeys(value for value in values if value is not None))
    if keep_order or not all(is_number(value) for value in found):
        return found
    return sorted(found, key=float)  # type: ignore[arg-type]


def mean_of(values: np.ndarray, arm: Arm) -> np.ndarray:
    """Mean over an arm's seeds at each column, NaN where none has a value."""
    mine = values[list(arm.rows)]
    count = np.isfinite(mine).sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = np.where(np.isfinite(mine), mine, 0).sum(axis=0) / count
    return mean


def here(sweep: SweepRuns) -> str:
    """A title: the images and the encoder, where all runs share them."""
    configs = [run.config for arm in sweep.measured for run in arm.runs]
    found = [{str(config.get(key)) for config in configs} for key in ("data.name", "encoder.arch")]
    shared = ", ".join(_NAMES.get(name, name) for names in found if len(names) == 1 for name in names)
    return f"Here: {shared}" if shared else "Here"


_NAMES = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar10-jpeg": "CIFAR-10 as JPEG",
    "cifar100": "CIFAR-100",
    "stl10": "STL-10",
    "imagenet": "ImageNet",
    "tiny": "small ResNet",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
}


def seeds(sweep: SweepRuns) -> str:
    counts = {len(sweep.values(arm, sweep.metric)) for arm in sweep.measured} - {0} or {0}
    least, most = min(counts), max(counts)
    return f"n = {least}" if least == most else f"n = {least} to {most}, see the table"


def reduction(sweep: SweepRuns) -> str:
    """Which epoch, which selection, how many seeds, what the bars are."""
    epochs = " or ".join(f"{epoch:g}" for epoch in sweep.epochs)
    several = any(len(sweep.values(arm, sweep.metric)) > 1 for arm in sweep.measured)
    bars = "mean over seeds, bars ± SD (ddof = 1)" if several else "one seed, no bars"
    return f"last epoch ({epochs}), nothing selected; {bars}; {seeds(sweep)}."


def spoken(sweep: SweepRuns, name: str | None = None) -> str:
    """The numbers for those who cannot see the figure."""
    metric = metrics.of(name or sweep.metric)
    said = []
    for arm in sweep.arms:
        values = sweep.values(arm, metric.name)
        if len(values) or arm.diverged:
            said.append(f"{arm.name} {metric.show(float(values.mean()) if len(values) else math.nan)}")
    return "; ".join(said)
