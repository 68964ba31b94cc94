"""Figures over time: the course of the training, and how keys agree with the encoder as they age."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator

from study import metrics
from study.report.drawing import LONG, WIDTH, Drawn, here, line_and_x, mean_of, seeds, spoken, values_of
from study.report.histories import AGE, CURVES, OLDEST
from study.report.load import Arm, SweepRuns, named
from study.report.style import COLOURS, MARKERS, MUTED, finish, label_end


def training(sweep: SweepRuns) -> Drawn | None:
    """Loss above its collapsed value, pretext accuracy and kNN over the epochs."""
    histories = sweep.histories
    names = [name for name in CURVES if max(_logged(histories.value[name], arm) for arm in sweep.measured or ()) > 2]
    groups = _groups(sweep)
    if not names or not _readable(groups):
        return None
    place = _places(groups)
    figure = Figure(figsize=(WIDTH, 2.75 if len(groups) == 1 else 1.0 + 1.75 * len(names)))
    rows, columns = (1, len(names)) if len(groups) == 1 else (len(names), len(groups))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=False, sharey="row" if len(groups) > 1 else False)
    for g, (title, arms) in enumerate(groups):
        for i, name in enumerate(names):
            axes = grid[0][i] if len(groups) == 1 else grid[i][g]
            metric = metrics.of(name)
            for text, arm in arms:
                j = place[text]
                with np.errstate(invalid="ignore"):
                    x = mean_of(histories.share[name], arm) * max((run.epochs for run in arm.runs), default=0)
                    y = mean_of(histories.value[name], arm) * metric.factor
                seen = np.isfinite(y)
                axes.plot(x[seen], y[seen], color=COLOURS[j % 7], linewidth=1.4, label=text)
            if name == CURVES[0]:
                axes.axhline(0, color=MUTED, linewidth=0.8, linestyle=":")
            if len(groups) == 1 or i == 0:
                axes.set_title(LONG.get(name, metric.axis) if len(groups) == 1 else title)
            if len(groups) > 1 and g == 0:
                axes.set_ylabel(LONG.get(name, metric.axis))
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.set_xlim(0, max(sweep.epochs) * 1.03)
            if len(groups) == 1 or i == len(names) - 1:
                axes.set_xlabel("epoch")
    _legend(figure, place, grid[0])
    text = f"Mean over the seeds of each arm ({seeds(sweep)}), each point the mean over 1/120 of the run."
    finish(figure, f"{text} Dotted: the loss of a collapsed encoder.")
    stored = _stored(sweep.measured)
    rise = f"; with a {' or '.join(stored)} it rises first, while the random keys leave" if stored else ""
    return Drawn(
        f"{sweep.name}-training",
        figure,
        f"**{sweep.title}: training.** The loss is shown less ln(K+1), its value for a collapsed encoder{rise}. "
        "Pretext accuracy counts strict wins only. Both measure the pretext task against a dictionary that changes "
        "with the run: they fall and rise as keys become consistent and negatives hard, and by themselves say nothing "
        "about features; kNN does.",
        f"Pretext accuracy (%) at the end: {spoken(sweep, CURVES[1])}. {text}",
    )


def ageing(sweep: SweepRuns) -> Drawn | None:
    """Cosine between a stored key and the same view encoded again, against the key's age."""
    ages = sweep.histories.ages
    arms = [arm for arm in sweep.measured if sum(np.isfinite(v[list(arm.rows)]).any() for v in ages.values()) > 1]
    if not arms:
        return None
    groups = _groups(sweep)
    place = _places(groups)  # before some are left out: the colours are those of the other figures
    groups = [(title, [pair for pair in group if pair[1] in arms]) for title, group in groups]
    groups = [(title, group) for title, group in groups if group]
    if not _readable(groups):
        return None
    figure = Figure(figsize=(WIDTH if len(groups) > 1 else 5.6, 3.2))
    panels = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, (title, group) in zip(panels, groups, strict=True):
        lines = []
        for text, arm in group:
            j = place[text]
            points = [(age, mean_of(values[:, None], arm)[0]) for age, values in ages.items()]
            x, y = np.array([point for point in points if math.isfinite(point[1])]).T
            axes.plot(x, y, color=COLOURS[j % 7], marker=MARKERS[j % 7], markersize=4, label=text, clip_on=False)
            lines.append((x[-1], y[-1], text, COLOURS[j % 7]))
        direct = len(groups) == 1 and len({line[0] for line in lines}) == 1
        for line in lines if direct else ():
            label_end(axes, *line)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.ticklabel_format(axis="y", useOffset=False)  # cosines near 1 stay cosines
        axes.set(xlabel="age of the key, steps", title=title or here(sweep))
    if not direct:
        _legend(figure, place, panels)
    panels[0].set_ylim(top=min(panels[0].get_ylim()[1], 1))
    panels[0].set_ylabel("cosine with the same view\nencoded now")
    text = (
        f"Mean over the seeds of each arm ({seeds(sweep)}) and over the readings between a quarter and three quarters "
        f"of the run, {sweep.histories.counted(*(f'{AGE}{age}' for age in ages if age > 1))} for each age above 1."
    )
    if without := [arm.name for arm in sweep.measured if arm not in arms]:
        text += f" Not drawn, with keys of fewer than two of these ages: {'; '.join(without)}."
    finish(figure, text)
    return Drawn(
        f"{sweep.name}-consistency",
        figure,
        f"**{sweep.title}: consistency of the keys.** Cosine between a stored key and the same view encoded by "
        f"{' or '.join(_ENCODERS[kind] for kind in _stored(arms))}, against the key's age.",
        f"Cosine of the oldest keys: {spoken(sweep, OLDEST)}. {text}",
    )


_ENCODERS = {"queue": "the present key encoder", "bank": "the present f_q (for a bank, which has no key encoder)"}
"""Dictionaries that store keys → what a view of theirs is encoded with again."""


def _stored(arms: Sequence[Arm]) -> list[str]:
    """Which of these dictionaries the arms have."""
    kinds = {run.config["dictionary.kind"] for arm in arms for run in arm.runs}
    return [kind for kind in _ENCODERS if kind in kinds]


def _places(groups: Sequence[tuple[str, list[tuple[str, Arm]]]]) -> dict[str, int]:
    """A colour a name, the same in every panel, whichever of them lack it."""
    return {text: j for j, text in enumerate(dict.fromkeys(text for _, arms in groups for text, _ in arms))}


def _legend(figure: Figure, place: dict[str, int], panels: Sequence[Axes]) -> None:
    """One legend above all panels: each name once."""
    handles = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = sorted(handles, key=lambda text: place[text])
    figure.legend(
        [handles[text] for text in labels],
        labels,
        loc="outside upper left",
        ncols=min(len(labels), 6),
        frameon=False,
        fontsize=8.5,
    )


def _groups(sweep: SweepRuns) -> list[tuple[str, list[tuple[str, Arm]]]]:
    """Panels of labelled arms: one panel for one axis, else one a value of the axis that makes the lines."""
    if len(sweep.axes) != 2:
        return [("", [(arm.name, arm) for arm in sweep.measured])]
    line, x = line_and_x(sweep)
    names = values_of([arm.labels.get(line) for arm in sweep.measured], keep_order=True)
    return [
        (
            f"{line}: {name}" if isinstance(name, str) else named(line, name),
            [(named(x, arm.labels.get(x)), arm) for arm in sweep.measured if arm.labels.get(line) == name],
        )
        for name in names
    ]


def _readable(groups: Sequence[tuple[str, list[tuple[str, Arm]]]]) -> bool:
    """A line a colour, and panels that are wide enough."""
    return len(groups) <= 5 and len(_places(groups)) <= len(COLOURS)


def _logged(values: np.ndarray, arm: Arm) -> int:
    """Points that an arm's curve has."""
    return int(np.isfinite(values[list(arm.rows)]).any(axis=0).sum()) if arm.rows else 0
