"""The figures of a sweep, chosen by the shape of its grid, so that a new sweep needs no code.

One numeric axis ``m``: against the key encoder's lag. Two axes: a line a value of one, beside the paper's. One axis:
dots. All: the course of the training, and how keys agree with the encoder as they age.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from study import metrics
from study.report.curves import ageing, training
from study.report.drawing import (
    LONG,
    WIDTH,
    Drawn,
    errorbar,
    floors,
    grow,
    here,
    is_number,
    line_and_x,
    numbers_of,
    reduction,
    spoken,
    values_of,
)
from study.report.histories import CURVES, OLDEST
from study.report.load import Arm, SweepRuns, named, show
from study.report.style import COLOURS, INK, MARKERS, MUTED, PAPER, RC, finish, label_end
from study.report.tables import DIVERGED, paper_value
from study.sweep.grid import Label

MOST = 40
"""Arms that a figure can show; a larger grid has its table."""


def draw(sweep: SweepRuns) -> Iterator[Drawn]:
    """The figures of a sweep, the main one first; those without data are left out."""
    makers: tuple[Callable[[SweepRuns], Drawn | None], ...] = (_main, training, ageing)
    with matplotlib.rc_context(RC):
        for make in makers:
            drawn = make(sweep)
            if drawn is not None:
                yield drawn


def _main(sweep: SweepRuns) -> Drawn | None:
    if len(sweep.measured) > MOST or not any(len(sweep.values(arm, sweep.metric)) for arm in sweep.measured):
        return None
    if sweep.axes == ("m",):
        return _against_lag(sweep)
    return _lines(sweep) if len(sweep.axes) == 2 else _dots(sweep)


# ----------------------------------------------------------------------------------------------------- the main one


def _against_lag(sweep: SweepRuns) -> Drawn:
    """Accuracy against m at the lag 1/(1−m), beside the paper's if it has any, with a common scale of points."""
    figure = Figure(figsize=(WIDTH, 3.5))
    panels = figure.subplots(1, 2 if sweep.paper else 1, squeeze=False, width_ratios=(1.5, 1) if sweep.paper else None)
    ours = panels[0, 0]
    arms = [arm for arm in sweep.measured if isinstance(arm.labels["m"], int | float)]
    x = {arm.labels["m"]: _lag(arm.labels["m"]) for arm in arms}
    ends = []
    wanted = dict.fromkeys((sweep.metric, "linear"))
    shown = [name for name in wanted if any(len(sweep.values(arm, name)) for arm in arms)]
    for i, name in enumerate(shown):
        colour, marker = COLOURS[3 - 2 * i], MARKERS[i]
        points = numbers_of(sweep, arms, name)
        errorbar(ours, [x[arm.labels["m"]] for arm in arms], points, colour, marker)
        floors(sweep, ours, name, colour)
        ends += _end([x[arm.labels["m"]] for arm in arms], points, max(x.values()), metrics.of(name).label, colour)
    steps = max(arm.steps for arm in arms)
    if steps:
        ours.axvline(math.log10(steps), color=MUTED, linewidth=0.8, linestyle=":")
        ours.annotate(
            f"length of the run,\n{steps:,} steps",
            (math.log10(steps), 0),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 17 if any(arm.diverged for arm in arms) else 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7.5,
            color=MUTED,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1},  # a floor may run there
        )
    span = grow(ours, 2)
    ours.set_xlim(min(x.values()) - 0.25, max(x.values()) + 0.25)
    for end in ends:
        label_end(ours, *end)
    for arm in arms:
        if arm.diverged:
            _no_number(ours, x[arm.labels["m"]], DIVERGED)
    _m_ticks(ours, arms)
    metric = metrics.of(sweep.metric)
    ours.set(ylabel="top-1 (%)", title=here(sweep))

    if sweep.paper:
        theirs = panels[0, 1]
        paper = [(row["m"], row["value"]) for row in sweep.paper]
        numbers = [(m, value) for m, value in paper if is_number(value)]
        if numbers:
            theirs.plot([_lag(m) for m, _ in numbers], [value for _, value in numbers], color=INK, marker="D")
            middle = (min(value for _, value in numbers) + max(value for _, value in numbers)) / 2
            theirs.set_ylim(middle - span * 0.75, middle + span * 0.25)
        for m, value in paper:
            if not is_number(value):
                _no_number(theirs, _lag(m), f"{value},\nno number")
        theirs.set(ylabel="linear probe, top-1 (%)", title="Paper: ImageNet, ResNet-50")
        theirs.set_xlim(ours.get_xlim())
        _m_ticks(theirs, arms)
    text = f"{' and '.join(metrics.of(name).label for name in shown)}: {reduction(sweep)}"
    text += " Dashed: floors of each metric, in its colour." if sweep.floors else ""
    text += " × on the bottom edge: no number. Both panels span the same number of points." if sweep.paper else ""
    finish(figure, text)
    beside = "; right, the paper's linear probe on ImageNet (Section 4.1)" if sweep.paper else ""
    return Drawn(
        sweep.name,
        figure,
        f"**{sweep.title}.** Accuracy against m, placed at the lag of the key encoder, 1/(1−m) steps{beside}.",
        f"{metric.label} by m: {spoken(sweep)}. {text}",
    )


def _end(
    x: Sequence[float], points: Sequence[tuple[float, float]], last: float, text: str, colour: str
) -> list[tuple[float, float, str, str]]:
    """Where a line's name goes: its last point that has a value, or the right edge if that is the last place of all."""
    seen = [(place, mean) for place, (mean, _) in zip(x, points, strict=True) if math.isfinite(mean)]
    return [(math.inf if seen[-1][0] == last else seen[-1][0], seen[-1][1], text, colour)] if seen else []


def _no_number(axes: Axes, x: float, text: str) -> None:
    """A cross on the bottom edge, at no value, for an arm that has a word in place of a number, such as “fails”."""
    axes.plot(x, 0, marker="x", color=COLOURS[0], transform=axes.get_xaxis_transform(), clip_on=False)
    axes.annotate(
        text,
        (x, 0),
        xycoords=("data", "axes fraction"),
        xytext=(5, 4),
        textcoords="offset points",
        va="bottom",
        color=COLOURS[0],
    )


def _lag(m: Label | None) -> float:
    """Place of m on the axis: log10 of the lag in steps; m = 1, which never moves, stands at the end."""
    assert isinstance(m, int | float)
    return math.log10(1 / (1 - m)) if m < 1 else 5.0


def _m_ticks(axes: Axes, arms: Sequence[Arm]) -> None:
    values = [float(arm.get("m")) for arm in arms]
    names = [f"{show(arm.labels['m'])}\n{_steps(m)}" for arm, m in zip(arms, values, strict=True)]
    axes.set_xticks([_lag(m) for m in values], names)
    axes.set_xlabel("m\nlag of f_k, 1/(1 − m) steps")
    axes.grid(axis="x", visible=False)


def _steps(m: float) -> str:
    return "∞" if m == 1 else f"{1 / (1 - m):,.0f}"


def _lines(sweep: SweepRuns) -> Drawn:
    """Two axes: a line a value of one, over the values of the other, which stand at equal distances; beside the
    paper's."""
    line, x = line_and_x(sweep)
    paper = [row for row in sweep.paper if line in row and x in row]
    figure = Figure(figsize=(WIDTH, 3.5))
    panels = figure.subplots(1, 2 if paper else 1, squeeze=False)[0]
    ours = panels[0]
    over = values_of([*(arm.labels.get(x) for arm in sweep.measured), *(row[x] for row in paper)])
    names = values_of([*(arm.labels.get(line) for arm in sweep.measured)], keep_order=True)
    ends = []
    for i, name in enumerate(names):
        arms = sorted(
            (arm for arm in sweep.measured if arm.labels.get(line) == name), key=lambda a: over.index(a.labels[x])
        )
        points = numbers_of(sweep, arms, sweep.metric)
        at = [over.index(arm.labels[x]) for arm in arms]
        errorbar(ours, at, points, COLOURS[i % 7], MARKERS[i % 7])
        ends += _end(at, points, len(over) - 1, named(line, name), COLOURS[i % 7])
    floors(sweep, ours, sweep.metric)
    metric = metrics.of(sweep.metric)
    ours.set(ylabel=metric.axis, title=here(sweep))
    if paper:
        panels[1].set(ylabel="linear probe, top-1 (%)", title="Paper: ImageNet, ResNet-50")
    for axes in panels:
        axes.set_xticks(range(len(over)), [show(value) for value in over])
        axes.set(xlabel=_AXIS.get(x, x), xlim=(-0.4, len(over) - 0.6))
        axes.grid(axis="x", visible=False)
    span = grow(ours, 2)
    for end in ends:
        label_end(ours, *end)
    if any(isinstance(name, str) for name in names):  # a number's name says its axis, a word's does not
        for axes in panels:
            _below_title(axes, f"lines: {_AXIS.get(line, line)}")
    for arm in sweep.measured:
        if arm.diverged:
            _no_number(ours, over.index(arm.labels[x]), DIVERGED)
    if paper:
        theirs, ends = panels[1], []
        for i, name in enumerate(names):
            mine = sorted(
                (over.index(row[x]), row["value"]) for row in paper if row[line] == name and is_number(row["value"])
            )
            if mine:
                theirs.plot(*zip(*mine, strict=True), color=COLOURS[i % 7], marker=MARKERS[i % 7])
                ends.append((*mine[-1], named(line, name), COLOURS[i % 7]))
        low, high = theirs.get_ylim()
        grown = max(span - (high - low), 0) / 2
        theirs.set_ylim(low - grown, high + grown)
        for row in paper:
            if not is_number(row["value"]):
                _no_number(theirs, over.index(row[x]), f"{row['value']},\nno number")
        for end in ends:
            label_end(theirs, *end)
    text = f"{metric.label}: {reduction(sweep)}" + (" Dashed: floors." if sweep.floors else "")
    finish(figure, text)
    beside = " Right, the paper's linear probe on ImageNet." if paper else ""
    return Drawn(
        sweep.name,
        figure,
        f"**{sweep.title}.** {metric.label} against {_AXIS.get(x, x)}, a line a {_AXIS.get(line, line)}.{beside}",
        f"{metric.label}: {spoken(sweep)}. {text}",
    )


def _below_title(axes: Axes, text: str) -> None:
    """A line between the panel and its title."""
    axes.set_title(axes.get_title(loc="left"), pad=17)
    axes.annotate(text, (0, 1), (0, 5), "axes fraction", "offset points", fontsize=8, color=MUTED)


_AXIS = {"K": "K, number of negatives", "batch": "batch size", "lr rule": "learning-rate rule"}


def _dots(sweep: SweepRuns) -> Drawn:
    """A row an arm, a panel a metric."""
    arms = [arm for arm in sweep.measured if arm.diverged or len(sweep.values(arm, sweep.metric))]
    names = [name for name in (sweep.metric, CURVES[1], OLDEST) if any(len(sweep.values(arm, name)) for arm in arms)]
    figure = Figure(figsize=(WIDTH, 1.45 + 0.3 * len(arms)))
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for i, (axes, name) in enumerate(zip(panels, names, strict=True)):
        metric = metrics.of(name)
        points = numbers_of(sweep, arms, name)
        rows = range(len(arms))
        means, sds = [point[0] for point in points], [point[1] for point in points]
        dots, *_ = axes.errorbar(means, rows, xerr=sds, fmt="o", color=COLOURS[3])
        dots.set_clip_on(False)  # a cosine of 1 stands on the edge
        for row, (mean, _) in enumerate(points):
            if math.isnan(mean):  # a reading that is missing, such as of keys in a short run, is no divergence
                diverged = not len(sweep.values(arms[row], sweep.metric))
                text, colour = (DIVERGED, COLOURS[0]) if diverged else ("no reading", MUTED)
                axes.annotate(text, (0.05, row), xycoords=("axes fraction", "data"), va="center", color=colour)
                continue
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
        _widen(axes, 4 if metric.unit else 0.1, 1 if name == OLDEST else math.inf)
        axes.set(xlabel=LONG.get(name, metric.axis), ylim=(len(arms) - 0.5, -0.7))
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(arms)), [arm.name for arm in arms])
    panels[0].set_title(here(sweep))
    text = f"{metrics.of(sweep.metric).label}: {reduction(sweep)}" + (" Dashed: floors." if sweep.floors else "")
    if OLDEST in names:
        text += f" Cosine: {sweep.histories.counted(OLDEST)}."
    finish(figure, text)
    return Drawn(
        sweep.name,
        figure,
        f"**{sweep.title}.** A row an arm, a panel a measure.{_paper_text(sweep)}",
        f"{metrics.of(sweep.metric).label}: {spoken(sweep)}. {text}",
    )


def _paper_text(sweep: SweepRuns) -> str:
    found = [(arm.name, paper_value(sweep, arm)) for arm in sweep.measured]
    text = "; ".join(f"{name}: {value}" for name, value in found if value)
    return f" The paper's: {text}." if text else ""


def _widen(axes: Axes, least: float, end: float) -> None:
    """Room for the numbers, and no magnified noise: the axis spans ``least`` or more, and ends at ``end``."""
    low, high = axes.get_xlim()
    room = max((high - low) * 0.15, (least - (high - low)) / 2)
    axes.set_xlim(low - room, min(high + room, end))
