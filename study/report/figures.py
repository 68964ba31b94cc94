"""The figures of a sweep, chosen by the shape of its grid, so that a new sweep needs no code.

One numeric axis ``m``: against the key encoder's lag. Two axes: a line a value of one, beside the paper's. One axis:
dots. All: the course of the training, and how keys agree with the encoder as they age.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator

from study.report import metrics
from study.report.load import CURVES, OLDEST, Arm, Label, SweepRuns, named, show
from study.report.style import COLOURS, INK, MARKERS, MUTED, RC, finish, label_end
from study.report.tables import paper_value

WIDTH = 7.6
"""Inches; at a README's width the text stays readable."""


@dataclass(frozen=True)
class Drawn:
    """A figure with the words that go with it."""

    name: str
    figure: Figure
    caption: str
    alt: str


def draw(sweep: SweepRuns) -> Iterator[Drawn]:
    """The figures of a sweep, the main one first; those without data are left out."""
    makers: tuple[Callable[[SweepRuns], Drawn | None], ...] = (_main, _training, _ageing)
    with matplotlib.rc_context(RC):
        for make in makers:
            drawn = make(sweep)
            if drawn is not None:
                yield drawn


def _main(sweep: SweepRuns) -> Drawn | None:
    if not any(len(sweep.values(arm, sweep.metric)) for arm in sweep.measured):
        return None
    if sweep.axes == ("m",):
        return _against_lag(sweep)
    return _lines(sweep) if len(sweep.axes) == 2 else _dots(sweep)


# ----------------------------------------------------------------------------------------------------- the main one


def _against_lag(sweep: SweepRuns) -> Drawn:
    """Accuracy against m at the lag 1/(1−m), beside the paper's, with a common scale of points."""
    figure = Figure(figsize=(WIDTH, 3.5))
    ours, theirs = figure.subplots(1, 2, width_ratios=(1.5, 1))
    arms = [arm for arm in sweep.measured if isinstance(arm.labels["m"], int | float)]
    x = {arm.labels["m"]: _lag(arm.labels["m"]) for arm in arms}
    ends = []
    shown = [name for name in (sweep.metric, "linear") if any(len(sweep.values(arm, name)) for arm in arms)]
    for i, name in enumerate(dict.fromkeys(shown)):
        colour, marker = COLOURS[3 - 2 * i], MARKERS[i]
        points = _points(sweep, arms, name)
        _errorbar(ours, [x[arm.labels["m"]] for arm in arms], points, colour, marker)
        ends.append((x[arms[-1].labels["m"]], points[-1][0], metrics.of(name).label, colour))
    steps = max((run.steps for arm in arms for run in arm.runs), default=0)
    if steps:
        ours.axvline(math.log10(steps), color=MUTED, linewidth=0.8, linestyle=":")
        ours.annotate(
            f"length of the run,\n{steps:,} steps",
            (math.log10(steps), 1),
            xycoords=("data", "axes fraction"),
            xytext=(-4, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=7.5,
            color=MUTED,
        )
    _floors(sweep, ours)
    span = _limits(ours, 2)
    for end in ends:
        label_end(ours, *end)
    _m_ticks(ours, arms)
    metric = metrics.of(sweep.metric)
    ours.set(ylabel="top-1 (%)", title=f"Here: {_setting(sweep)}")

    paper = [(row["m"], row["value"]) for row in sweep.paper]
    numbers = [(m, value) for m, value in paper if _number(value)]
    if numbers:
        theirs.plot([_lag(m) for m, _ in numbers], [value for _, value in numbers], color=INK, marker="D")
        middle = (min(value for _, value in numbers) + max(value for _, value in numbers)) / 2
        theirs.set_ylim(middle - span * 0.75, middle + span * 0.25)
    for m, value in paper:
        if not _number(value):
            _no_number(theirs, _lag(m), str(value))
    theirs.set(ylabel="linear probe, top-1 (%)", title="Paper: ImageNet, ResNet-50")
    theirs.set_xlim(ours.get_xlim())
    _m_ticks(theirs, arms)
    text = f"{metric.label} and linear probe: {_reduction(sweep)} Dashed: floors."
    text += " Both panels span the same number of points."
    finish(figure, text)
    return Drawn(
        f"{sweep.name}",
        figure,
        f"**{sweep.title}.** Accuracy against m, placed at the lag of the key encoder, 1/(1−m) steps; right, the "
        f"paper's linear probe on ImageNet (Section 4.1). {text}",
        f"{metric.label} by m: {_spoken(sweep)}.",
    )


def _no_number(axes: Axes, x: float, text: str) -> None:
    """A cross at the bottom for an arm of which the paper gives a word, such as “fails”."""
    axes.plot(x, 0.06, marker="x", color=COLOURS[0], transform=axes.get_xaxis_transform())
    axes.annotate(
        text,
        (x, 0.06),
        xycoords=("data", "axes fraction"),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=COLOURS[0],
    )


def _lag(m: Label) -> float:
    """Place of m on the axis: log10 of the lag in steps; m = 1, which never moves, stands at the end."""
    assert isinstance(m, int | float)
    return math.log10(1 / (1 - m)) if m < 1 else 5.0


def _m_ticks(axes: Axes, arms: Sequence[Arm]) -> None:
    values = [float(arm.get("m")) for arm in arms]
    names = [f"{show(arm.labels['m'])}\n{_steps(m)}" for arm, m in zip(arms, values, strict=True)]
    axes.set_xticks([_lag(m) for m in values], names)
    axes.set_xlabel("m\n1/(1 − m), lag of the key encoder in steps")
    axes.grid(axis="x", visible=False)


def _steps(m: float) -> str:
    return "∞" if m == 1 else f"{1 / (1 - m):,.0f}"


def _lines(sweep: SweepRuns) -> Drawn:
    """Two axes: a line a value of one, over the values of the other, which stand at equal distances; beside the
    paper's."""
    line, x = _line_and_x(sweep)
    paper = [row for row in sweep.paper if line in row and x in row]
    figure = Figure(figsize=(WIDTH, 3.5))
    panels = figure.subplots(1, 2 if paper else 1, squeeze=False)[0]
    ours = panels[0]
    over = _values([*(arm.labels.get(x) for arm in sweep.measured), *(row[x] for row in paper)])
    names = _values([*(arm.labels.get(line) for arm in sweep.measured)], keep_order=True)
    ends = []
    for i, name in enumerate(names):
        arms = sorted(
            (arm for arm in sweep.measured if arm.labels.get(line) == name), key=lambda a: over.index(a.labels[x])
        )
        points = _points(sweep, arms, sweep.metric)
        at = [over.index(arm.labels[x]) for arm in arms]
        _errorbar(ours, at, points, COLOURS[i % 7], MARKERS[i % 7])
        last = max((j for j, point in enumerate(points) if math.isfinite(point[0])), default=None)
        if last is not None:
            ends.append((at[last], points[last][0], named(line, name), COLOURS[i % 7]))
    _floors(sweep, ours)
    metric = metrics.of(sweep.metric)
    ours.set(ylabel=metric.axis, title=f"Here: {_setting(sweep)}")
    for axes in panels:
        axes.set_xticks(range(len(over)), [show(value) for value in over])
        axes.set(xlabel=_AXIS.get(x, x), xlim=(-0.4, len(over) - 0.6))
        axes.grid(axis="x", visible=False)
    span = _limits(ours, 2)
    for end in ends:
        label_end(ours, *end)
    if paper:
        theirs, ends = panels[1], []
        for i, name in enumerate(names):
            mine = sorted(
                (over.index(row[x]), row["value"]) for row in paper if row[line] == name and _number(row["value"])
            )
            if mine:
                theirs.plot(*zip(*mine, strict=True), color=COLOURS[i % 7], marker=MARKERS[i % 7])
                ends.append((*mine[-1], named(line, name), COLOURS[i % 7]))
        theirs.set(ylabel="linear probe, top-1 (%)", title="Paper: ImageNet, ResNet-50")
        low, high = theirs.get_ylim()
        grown = max(span - (high - low), 0) / 2
        theirs.set_ylim(low - grown, high + grown)
        for row in paper:
            if not _number(row["value"]):
                _no_number(theirs, over.index(row[x]), str(row["value"]))
        for end in ends:
            label_end(theirs, *end)
    text = f"{metric.label}: {_reduction(sweep)}" + (" Dashed: floors." if sweep.floors else "")
    finish(figure, text)
    beside = " Right, the paper's linear probe on ImageNet." if paper else ""
    return Drawn(
        sweep.name,
        figure,
        f"**{sweep.title}.** {metric.label} against {_AXIS.get(x, x)}, a line a value of {_AXIS.get(line, line)}."
        f"{beside} {text}",
        f"{metric.label}: {_spoken(sweep)}.",
    )


_AXIS = {"K": "K, number of negatives", "batch": "batch size", "lr_rule": "linear learning-rate rule"}


def _line_and_x(sweep: SweepRuns) -> tuple[str, str]:
    """The axis whose values are numbers is x; of two such, or none, the second."""
    first, second = sweep.axes
    numeric = [all(_number(arm.labels.get(axis, 0)) for arm in sweep.measured) for axis in sweep.axes]
    return (second, first) if numeric == [True, False] else (first, second)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _dots(sweep: SweepRuns) -> Drawn:
    """A row an arm, a panel a metric."""
    arms = [arm for arm in sweep.measured if len(sweep.values(arm, sweep.metric))]
    names = [name for name in (sweep.metric, CURVES[1], OLDEST) if any(len(sweep.values(arm, name)) for arm in arms)]
    figure = Figure(figsize=(WIDTH, 1.45 + 0.3 * len(arms)))
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for i, (axes, name) in enumerate(zip(panels, names, strict=True)):
        metric = metrics.of(name)
        points = _points(sweep, arms, name)
        rows = range(len(arms))
        means, sds = [point[0] for point in points], [point[1] for point in points]
        axes.errorbar(means, rows, xerr=sds, fmt="o", color=COLOURS[3])
        for row, (mean, _) in enumerate(points):
            axes.annotate(
                f"{mean:.{metric.digits}f}", (mean, row), (0, 5), textcoords="offset points", ha="center", fontsize=8
            )
        if i == 0:
            for floor in sweep.floors:
                for value in sweep.values(floor, name)[:1]:
                    axes.axvline(value * metric.factor, color=MUTED, linestyle="--", linewidth=0.9)
                    axes.annotate(
                        floor.name,
                        (value * metric.factor, 0.0),
                        xycoords=("data", "axes fraction"),
                        xytext=(3, 3),
                        textcoords="offset points",
                        fontsize=7.5,
                        color=MUTED,
                    )
        _widen(axes, 4 if metric.unit else 0.1)
        axes.set(xlabel=_LONG.get(name, metric.axis), ylim=(len(arms) - 0.5, -0.7))
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(arms)), [arm.name for arm in arms])
    panels[0].set_title(f"Here: {_setting(sweep)}")
    text = f"{metrics.of(sweep.metric).label}: {_reduction(sweep)}" + (" Dashed: floors." if sweep.floors else "")
    finish(figure, text)
    return Drawn(
        sweep.name,
        figure,
        f"**{sweep.title}.** {text}{_paper_text(sweep)}",
        f"{metrics.of(sweep.metric).label}: {_spoken(sweep)}.",
    )


_LONG = {CURVES[1]: "pretext accuracy (%)", CURVES[0]: "loss − ln(K+1), nats", OLDEST: "cosine of the oldest keys"}


def _paper_text(sweep: SweepRuns) -> str:
    found = [(arm.name, paper_value(sweep, arm)) for arm in sweep.measured]
    text = "; ".join(f"{name}: {value}" for name, value in found if value)
    return f" The paper's: {text}." if text else ""


# --------------------------------------------------------------------------------------------- training and ageing


def _training(sweep: SweepRuns) -> Drawn | None:
    """Loss above its collapsed value, pretext accuracy and kNN over the epochs."""
    histories = sweep.histories
    names = [name for name in CURVES if max(_logged(histories.value[name], arm) for arm in sweep.measured or ()) > 2]
    if not names:
        return None
    groups = _groups(sweep)
    figure = Figure(figsize=(WIDTH, 2.75 if len(groups) == 1 else 1.0 + 1.75 * len(names)))
    rows, columns = (1, len(names)) if len(groups) == 1 else (len(names), len(groups))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=False, sharey="row" if len(groups) > 1 else False)
    for g, (title, arms) in enumerate(groups):
        for i, name in enumerate(names):
            axes = grid[0][i] if len(groups) == 1 else grid[i][g]
            metric = metrics.of(name)
            for j, (text, arm) in enumerate(arms):
                with np.errstate(invalid="ignore"):
                    x = _mean(histories.share[name], arm) * max((run.epochs for run in arm.runs), default=0)
                    y = _mean(histories.value[name], arm) * metric.factor
                seen = np.isfinite(y)
                axes.plot(x[seen], y[seen], color=COLOURS[j % 7], linewidth=1.4, label=text)
            if name == CURVES[0]:
                axes.axhline(0, color=MUTED, linewidth=0.8, linestyle=":")
            if len(groups) == 1 or i == 0:
                axes.set_title(_LONG.get(name, metric.axis) if len(groups) == 1 else title)
            if len(groups) > 1 and g == 0:
                axes.set_ylabel(_LONG.get(name, metric.axis))
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.set_xlim(0, max(sweep.epochs) * 1.03)
            if len(groups) == 1 or i == len(names) - 1:
                axes.set_xlabel("epoch")
    _legend(figure, grid[0])
    text = f"Mean over the seeds of each arm ({_seeds(sweep)}), each point the mean over 1/120 of the run."
    finish(figure, f"{text} Dotted: the loss of a collapsed encoder.")
    return Drawn(
        f"{sweep.name}-training",
        figure,
        f"**{sweep.title}: training.** {text} The loss is shown less ln(K+1), its value for a collapsed encoder; it "
        "rises first, while the random keys leave the dictionary. Pretext accuracy counts strict wins only.",
        f"Training curves of {len(sweep.measured)} arms.",
    )


def _ageing(sweep: SweepRuns) -> Drawn | None:
    """Cosine between a stored key and the same view encoded again, against the key's age."""
    ages = sweep.histories.ages
    arms = [arm for arm in sweep.measured if sum(np.isfinite(v[list(arm.rows)]).any() for v in ages.values()) > 1]
    if not arms:
        return None
    groups = [(title, [pair for pair in group if pair[1] in arms]) for title, group in _groups(sweep)]
    groups = [(title, group) for title, group in groups if group]
    figure = Figure(figsize=(WIDTH if len(groups) > 1 else 5.6, 3.2))
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, (title, group) in zip(panels, groups, strict=True):
        lines = []
        for j, (text, arm) in enumerate(group):
            points = [(age, _mean(values[:, None], arm)[0]) for age, values in ages.items()]
            x, y = np.array([point for point in points if math.isfinite(point[1])]).T
            axes.plot(x, y, color=COLOURS[j % 7], marker=MARKERS[j % 7], markersize=4, label=text)
            lines.append((x[-1], y[-1], text, COLOURS[j % 7]))
        direct = len(groups) == 1 and len({line[0] for line in lines}) == 1
        for line in lines if direct else ():
            label_end(axes, *line)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.set(xlabel="age of the key, steps", title=title if len(groups) > 1 else f"Here: {_setting(sweep)}")
    if not direct:
        _legend(figure, panels)
    panels[0].set_ylabel("cosine with the same view\nencoded now")
    text = (
        f"Mean over the seeds of each arm ({_seeds(sweep)}) and over the readings between a quarter and three quarters "
        "of the run."
    )
    finish(figure, text)
    return Drawn(
        f"{sweep.name}-consistency",
        figure,
        f"**{sweep.title}: consistency of the keys.** Cosine between a stored key and the same view encoded by the "
        f"present key encoder, against the key's age. {text}",
        f"Cosine of the oldest keys: {_spoken(sweep, OLDEST)}.",
    )


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend above all panels: each name once, in the order of the panel that has most."""
    handles, labels = max((axes.get_legend_handles_labels() for axes in panels), key=lambda found: len(found[1]))
    figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 6), frameon=False, fontsize=8.5)


def _groups(sweep: SweepRuns) -> list[tuple[str, list[tuple[str, Arm]]]]:
    """Panels of labelled arms: one panel for one axis, else one a value of the axis that makes the lines."""
    if len(sweep.axes) != 2:
        return [("", [(arm.name, arm) for arm in sweep.measured])]
    line, x = _line_and_x(sweep)
    names = _values([arm.labels.get(line) for arm in sweep.measured], keep_order=True)
    return [
        (
            named(line, name),
            [(named(x, arm.labels.get(x)), arm) for arm in sweep.measured if arm.labels.get(line) == name],
        )
        for name in names
    ]


# ------------------------------------------------------------------------------------------------------ small parts


def _points(sweep: SweepRuns, arms: Sequence[Arm], name: str) -> list[tuple[float, float]]:
    """(mean, SD) of each arm in the printed unit; NaN without values, SD 0 with one."""
    factor = metrics.of(name).factor
    samples = [sweep.values(arm, name) * factor for arm in arms]
    return [(float(s.mean()) if len(s) else math.nan, float(s.std(ddof=1)) if len(s) > 1 else 0.0) for s in samples]


def _errorbar(axes: Axes, x: Sequence[float], points: Sequence[tuple[float, float]], colour: str, marker: str) -> None:
    y, sd = np.array(points).reshape(-1, 2).T
    axes.errorbar(x, y, yerr=sd if sd.any() else None, color=colour, marker=marker)


def _floors(sweep: SweepRuns, axes: Axes) -> None:
    """What no training, or no encoder, gives: dashed lines with their names at the right edge."""
    factor = metrics.of(sweep.metric).factor
    for floor in sweep.floors:
        values = sweep.values(floor, sweep.metric)
        if len(values):
            height = float(values.mean()) * factor
            axes.axhline(height, color=MUTED, linestyle="--", linewidth=0.9)
            label_end(axes, math.inf, height, f"{floor.name}\n{height:.1f}", MUTED)


def _limits(axes: Axes, room: float) -> float:
    """Some room at the top and bottom; returns the height of the axis."""
    low, high = axes.get_ylim()
    axes.set_ylim(low - room / 2, high + room / 2)
    return float(high - low + room)


def _widen(axes: Axes, least: float) -> None:
    """Room for the numbers, and no magnified noise: the axis spans ``least`` or more; a cosine ends at 1."""
    low, high = axes.get_xlim()
    room = max((high - low) * 0.15, (least - (high - low)) / 2)
    axes.set_xlim(low - room, high + room if least > 1 else min(high + room, 1.02))


def _values(values: Sequence[Label], keep_order: bool = False) -> list[Label]:
    found: list[Label] = list(dict.fromkeys(value for value in values if value is not None))
    if keep_order or not all(_number(value) for value in found):
        return found
    return sorted(found, key=float)  # type: ignore[arg-type]


def _logged(values: np.ndarray, arm: Arm) -> int:
    """Points that an arm's curve has."""
    return int(np.isfinite(values[list(arm.rows)]).any(axis=0).sum()) if arm.rows else 0


def _mean(values: np.ndarray, arm: Arm) -> np.ndarray:
    """Mean over an arm's seeds at each column, NaN where none has a value."""
    mine = values[list(arm.rows)]
    count = np.isfinite(mine).sum(axis=0)
    with np.errstate(invalid="ignore"):
        mean: np.ndarray = np.where(np.isfinite(mine), mine, 0).sum(axis=0) / count
    return mean


def _setting(sweep: SweepRuns) -> str:
    """Images and encoder of the sweep's runs."""
    config = next((arm.runs[0].config for arm in sweep.measured if arm.runs), {})
    data, arch = str(config.get("data.name", "?")), str(config.get("encoder.arch", "?"))
    return f"{_NAMES.get(data, data)}, {_NAMES.get(arch, arch)}"


_NAMES = {
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar10-jpeg": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "stl10": "STL-10",
    "imagenet": "ImageNet",
    "tiny": "small ResNet",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
}


def _seeds(sweep: SweepRuns) -> str:
    counts = {len(sweep.values(arm, sweep.metric)) for arm in sweep.measured} - {0} or {0}
    least, most = min(counts), max(counts)
    return f"n = {least}" if least == most else f"n = {least} to {most}, see the table"


def _reduction(sweep: SweepRuns) -> str:
    """Which epoch, which selection, how many seeds, what the bars are."""
    epochs = " or ".join(f"{epoch:g}" for epoch in sweep.epochs)
    several = any(len(sweep.values(arm, sweep.metric)) > 1 for arm in sweep.measured)
    bars = "mean over seeds, bars ± SD (ddof = 1)" if several else "one seed, no bars"
    return f"last epoch ({epochs}), nothing selected; {bars}; {_seeds(sweep)}."


def _spoken(sweep: SweepRuns, name: str | None = None) -> str:
    """The numbers for those who cannot see the figure."""
    metric = metrics.of(name or sweep.metric)
    said = []
    for arm in sweep.arms:
        values = sweep.values(arm, metric.name)
        if len(values):
            said.append(f"{arm.name} {metric.show(float(values.mean()))}")
    return "; ".join(said)
