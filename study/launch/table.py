"""A plan as a table of 80 columns: the points that need a look first in a long sweep, errors in full below."""

from collections import Counter

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from study.launch.plan import Plan, Row
from study.run import numerics
from study.run.status import Status

LONGEST = 40
"""Lines that are shown of a long sweep."""
FIRST = ("failed", "blocked", "diverged", "running", "unknown", "pending", "missing", "done")
"""What is left out last."""
STYLE = {
    "done": "green",
    "diverged": "bright_red",
    "running": "cyan",
    "pending": "blue",
    "unknown": "magenta",
    "missing": "dim",
    "failed": "red",
    "blocked": "yellow",
}


def of_plan(plan: Plan, workers: int, *, everything: bool = False) -> RenderableType:
    """What is done and what the rest would cost.

    Args:
        plan: the sweep as it stands.
        workers: points side by side, for the wall time.
        everything: show each point of a long sweep.
    """
    table = _table("cost")
    groups = _groups(plan, everything)
    for rows in groups[:LONGEST] if not everything else groups:
        costs = [row.cost for row in rows if row.state != "done"]
        cost = "?" if None in costs else duration(sum(filter(None, costs))) if any(costs) else ""
        table.add_row(*_columns(plan, rows), cost)
    return Group(_title(plan), table, *_below(plan, groups, everything), Text(expected(plan, workers)))


def of_status(plan: Plan, *, everything: bool = False) -> RenderableType:
    """What each point is doing; arguments as in `of_plan`."""
    table = _table("images/s", "left")
    groups = _groups(plan, everything)
    for rows in groups[:LONGEST] if not everything else groups:
        running = [row for row in rows if row.state == "running"]
        speed = sum(row.status.images_per_s or 0.0 for row in running if row.status)
        left = max((seconds for row in running if (seconds := left_seconds(row)) is not None), default=None)
        table.add_row(
            *_columns(plan, rows),
            f"{speed:,.0f}" if running else "",
            "" if left is None else duration(left),
        )
    return Group(_title(plan), table, *_below(plan, groups, everything))


def counts(plan: Plan) -> str:
    """``5 done, 2 missing`` on one line."""
    return ", ".join(f"{number:,} {state}" for state, number in plan.counts.items())


def expected(plan: Plan, workers: int) -> str:
    """What the points to run would cost, and by what measure."""
    if not plan.to_run:
        return "nothing to run"
    runs = f"{len(plan.to_run):,} {'point' if len(plan.to_run) == 1 else 'points'} to run"
    wall = plan.wall(workers)
    if plan.seconds is None or wall is None:
        return f"{runs}; the cost of some is not known"
    side = f"{workers} at a time"
    cost = f"{plan.seconds / 3600:,.2f} {plan.unit}-hours, about {duration(wall)} with {side}"
    return f"{runs}: {cost}" + "".join(f"\n  {source}" for source in plan.sources)


def detail(row: Row, metric: str) -> str:
    """How far a point is, or what came out."""
    known = row.status
    if row.diverged is not None:
        return f"at step {row.diverged:,}"
    if row.state == "done":
        value = known.final.get(metric) if known else None
        return "" if value is None else f"{metric} {value:.3f}"
    if row.state == "blocked":
        return "its pre-training failed"
    if row.state in ("pending", "unknown"):
        return row.note
    if known is None or row.state == "failed":
        return progress(known) if known and known.steps else ""
    stopped = f"{known.state} at " if row.state == "missing" else ""
    return f"{stopped}{progress(known)}" if known.steps else stopped.replace(" at ", " before its first step")


def progress(known: Status) -> str:
    """``train 120/480``."""
    return f"{known.phase or 'step'} {known.step:,}/{known.steps or 0:,}"


def left_seconds(row: Row) -> float | None:
    """Seconds that a running point's steps still take at its speed of late; None when it has not shown one."""
    known = row.status
    if known is None or not known.images_per_s or not known.steps:
        return None
    trained = row.point.config.probe or row.point.config.optimiser
    return (known.steps - known.step) * trained.batch / known.images_per_s


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.4 h`` or ``5.2 days``."""
    for limit, unit, digits in ((100, 1, 0), (6000, 60, 0), (172800, 3600, 1)):
        if seconds < limit:
            return f"{seconds / unit:.{digits}f} {({1: 's', 60: 'min', 3600: 'h'})[unit]}"
    return f"{seconds / 86400:.1f} days"


def _title(plan: Plan) -> Text:
    return Text(f"{plan.sweep.id}: {plan.sweep.title}", "bold")


def _table(*right: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("point", overflow="fold")
    table.add_column("state", overflow="fold")
    table.add_column("", overflow="ellipsis", no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _groups(plan: Plan, everything: bool) -> list[list[Row]]:
    """What stands on one line: each point in the grid's order; of a long sweep an arm with its seeds, what needs a
    look first."""
    if everything or len(plan.rows) <= LONGEST:
        return [[row] for row in plan.rows]
    arms: dict[tuple[object, ...], list[Row]] = {}
    for row in plan.rows:
        point = row.point
        arms.setdefault((tuple(point.labels.items()), point.floor, point.after is None), []).append(row)
    return sorted(arms.values(), key=lambda rows: min(FIRST.index(row.shown) for row in rows))


def _columns(plan: Plan, rows: list[Row]) -> tuple[str, Text, str]:
    """Name, state and detail of a line."""
    first = rows[0]
    if len(rows) == 1:
        return first.point.name, Text(first.shown, STYLE[first.shown]), detail(first, plan.sweep.metric)
    states = Counter(row.shown for row in rows)
    text = ", ".join(f"{states[state]} {state}" for state in FIRST if states[state])
    return first.point.name.replace(f" seed={first.point.seed}", ""), Text(text), f"{len(rows)} seeds"


def _below(plan: Plan, groups: list[list[Row]], everything: bool) -> list[Text]:
    """What does not fit into the table: what is left out, errors in full, points that the grid no longer has."""
    lines = []
    if not everything and len(groups) > LONGEST:
        lines.append(Text(f"… and {len(groups) - LONGEST:,} lines more; --all shows every point", "dim"))
    for row in [row for row in plan.rows if row.state == "failed"][:LONGEST]:
        lines.append(Text(f"{row.point.name} ({row.point.signature}) failed: {row.error or 'its log says why'}", "red"))
    for gone in plan.removed[:LONGEST]:
        lines.append(Text(f"{gone.name} ({gone.signature}) is no longer in the grid: {gone.state}", "yellow"))
    lines.append(Text(f"{len(plan.rows):,} points: {counts(plan)}"))
    if said := numerics.apart(row.numerics for row in plan.rows):
        lines.append(Text(said + " (what is left, by this code)" * bool(plan.to_run), "yellow"))
    return lines
