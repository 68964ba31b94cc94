"""One table a sweep and scale: arms, the paper's number, seeds, and each metric's mean and SD over seeds.

Means are over the seeds at the last epoch; nothing is a maximum over a run or a choice by test labels. SD has
``ddof = 1`` and is blank for one seed. The csv keeps what was logged (accuracies as fractions, the paper's as printed
there, in per cent); the printed tables show per cent.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from study import metrics
from study.report.histories import CURVES, OLDEST
from study.report.load import Arm, SweepRuns, show
from study.run import numerics

DIVERGED = "diverged"


@dataclass(frozen=True)
class Cell:
    """A metric of an arm in its logged unit; ``mean`` is NaN when every seed diverged."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Row:
    arm: Arm
    paper: str
    n: int
    cells: Mapping[str, Cell]
    lag_share: float | None
    """Lag of the key encoder, 1/(1−m) steps, as a share of the run."""


@dataclass(frozen=True)
class Table:
    sweep: SweepRuns
    axes: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: tuple[Row, ...]


def build(sweep: SweepRuns) -> Table:
    """Reduce a sweep's runs to its table: arms in the grid's order, floors last."""
    logged = {name for arm in sweep.arms for run in arm.runs for name in run.final if not name.startswith("train/")}
    rows = []
    for arm in sweep.arms:
        cells = {name: _cell(sweep, arm, name) for name in (*logged, CURVES[1], CURVES[0], OLDEST)}
        filled = {name: cell for name, cell in cells.items() if cell is not None}
        main = filled.get(sweep.metric)
        rows.append(Row(arm, paper_value(sweep, arm), main.n if main else 0, filled, _lag_share(arm)))
    names = metrics.ordered({name for row in rows for name in row.cells})
    return Table(sweep, sweep.axes, tuple(names), tuple(rows))


def _cell(sweep: SweepRuns, arm: Arm, metric: str) -> Cell | None:
    values = sweep.values(arm, metric)
    if not len(values):
        return Cell(math.nan, None, 0) if arm.diverged and any(metric in run.final for run in arm.runs) else None
    return Cell(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None, len(values))


def paper_value(sweep: SweepRuns, arm: Arm) -> str:
    """What the paper prints for that arm; empty where it has none."""
    for row in sweep.paper:
        where = {axis: row[axis] for axis in sweep.axes if axis in row}
        if arm.floor is None and where and all(arm.get(axis) == value for axis, value in where.items()):
            return str(row["value"])
    return ""


def _lag_share(arm: Arm) -> float | None:
    m, steps = arm.get("m"), arm.steps
    return None if arm.floor or "m" not in arm.labels or m is None or m == 1 or not steps else 1 / (1 - m) / steps


# ------------------------------------------------------------------------------------------------------- as text


def to_csv(table: Table) -> str:
    """The arm's columns, ``paper``, ``n``, then each metric's mean and ``<metric>_sd``; a floor names itself in the
    first column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    lag = any(row.lag_share is not None for row in table.rows)
    pairs = [column for name in table.metrics for column in (name, f"{name}_sd")]
    writer.writerow([*table.axes, "paper", "n", *pairs, *(["lag_share"] if lag else [])])
    for row in table.rows:
        arm = [row.arm.floor, *[""] * (len(table.axes) - 1)] if row.arm.floor else _labels(table, row)
        cells = [text for name in table.metrics for text in _csv_cell(row.cells.get(name))]
        share = [] if not lag else ["" if row.lag_share is None else f"{row.lag_share:.6f}"]
        writer.writerow([*arm, row.paper, row.n, *cells, *share])
    return out.getvalue()


def _labels(table: Table, row: Row) -> list[str]:
    values = (row.arm.labels.get(axis) for axis in table.axes)
    return ["" if value is None else str(value).lower() if isinstance(value, bool) else str(value) for value in values]


def _csv_cell(cell: Cell | None) -> tuple[str, str]:
    if cell is None:
        return "", ""
    mean = f"{cell.mean:.6f}" if math.isfinite(cell.mean) else DIVERGED
    return mean, "" if cell.sd is None else f"{cell.sd:.6f}"


def printed(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows as people read them: per cent, ± SD, and every missing seed."""
    shown = [metrics.of(name) for name in table.metrics if metrics.of(name).printed]
    lag = any(row.lag_share is not None for row in table.rows)
    paper = any(row.paper for row in table.rows)
    header = [*table.axes, *(["paper"] if paper else []), "n", *(metric.axis for metric in shown)]
    body = []
    for row in table.rows:
        blank = [""] * (len(table.axes) - 1)
        arm = [row.arm.floor, *blank] if row.arm.floor else [show(row.arm.labels.get(axis)) for axis in table.axes]
        body.append(
            [
                *arm,
                *([row.paper or "–"] if paper else []),
                _n(row),
                *(_printed_cell(row, metric) for metric in shown),
                *(["–" if row.lag_share is None else f"{row.lag_share:.2g}"] if lag else []),
            ]
        )
    return [*header, *(["lag/run"] if lag else [])], body


def _n(row: Row) -> str:
    return str(row.n) if row.n == row.arm.planned else f"{row.n} of {row.arm.planned}"


def _printed_cell(row: Row, metric: metrics.Metric) -> str:
    cell = row.cells.get(metric.name)
    if cell is None:
        return "–"
    text = metric.show(cell.mean)
    if cell.sd is not None:
        text += f" ± {cell.sd * metric.factor:.{metric.digits}f}"
    return text if cell.n in {row.n, 0} else f"{text} (n = {cell.n})"


def missing(table: Table) -> list[str]:
    """A sentence for every arm with seeds that are absent or diverged."""
    found = []
    for row in table.rows:
        reasons = [row.arm.absent] if row.arm.absent else []
        reasons += [f"{row.arm.diverged} {DIVERGED}"] if row.arm.diverged else []
        if reasons:
            found.append(f"{row.arm.name}: n = {row.n} of {row.arm.planned} ({', '.join(reasons)})")
    return found


def made_apart(table: Table) -> str:
    """That runs of the table were made by different numerics; empty when they were not."""
    return numerics.apart(run.numerics for run in table.sweep.runs if run.state == "finished")


_LEGEND = {
    "paper": "ImageNet top-1 in %, by linear probe unless the sweep says otherwise",
    "n": "seeds",
    "kNN (%)": "weighted kNN on frozen features, top-1",
    "linear (%)": "linear classifier on frozen features, top-1",
    "pretext (%)": "queries whose positive key wins against all negatives, at the end of the run",
    "key cosine": "the oldest stored keys, whatever their age, against the same views encoded now, {readings} in its "
    "middle half (a queue of one batch has keys of age 1 alone, for which 1.000 is trivial)",
    "lag/run": "lag of the key encoder, 1/(1−m) steps, over the length of the run",
}


def legend(table: Table) -> str:
    """What the printed columns mean, on one line."""
    header, _ = printed(table)
    text = "; ".join(f"{name}: {_LEGEND[name]}" for name in header if name in _LEGEND) + "."
    return text.replace("{readings}", table.sweep.histories.counted(OLDEST))


def to_markdown(table: Table) -> str:
    """The table, and below it what its columns mean."""
    header, body = printed(table)
    lines = [header, ["---"] * len(table.axes) + ["---:"] * (len(header) - len(table.axes)), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{legend(table)}\n"


def to_text(table: Table) -> str:
    """Aligned columns for a terminal; those that do not fit into 80 characters stay in the csv."""
    header, body = printed(table)
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    while sum(widths) + 2 * (len(widths) - 1) > 80:
        widths.pop()
    lines = [_aligned(line, widths, len(table.axes)) for line in (header, ["─" * width for width in widths], *body)]
    return "\n".join(lines) + "\n"


def _aligned(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    padded = (
        cell.ljust(width) if i < left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
    )
    return "  ".join(padded).rstrip()


def to_tex(table: Table) -> str:
    """A booktabs tabular."""
    header, body = printed(table)
    columns = "l" * len(table.axes) + "r" * (len(header) - len(table.axes))
    floors = sum(row.arm.floor is not None for row in table.rows)
    lines = [r"\begin{tabular}{" + columns + "}", r"\toprule", _tex_line(header), r"\midrule"]
    for i, row in enumerate(body):
        if floors and i == len(body) - floors:
            lines.append(r"\midrule")
        lines.append(_tex_line(row))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


_TEX = str.maketrans(
    {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "±": r"$\pm$", "−": "--", "–": "--", "θ": r"$\theta$"}
)


def _tex_line(cells: Sequence[str]) -> str:
    return " & ".join(cell.translate(_TEX) for cell in cells) + r" \\"
