"""What a person sees of a pool: one live table on a terminal, lines in a file."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from study.launch.plan import Row, makespan
from study.launch.pool import End, Pool
from study.launch.table import STYLE, duration, left_seconds, progress
from study.run import status
from study.sweep.grid import Point

REDRAW_S = 0.5
LINE_S = 15.0
"""Seconds between two lines on what is running, where the output is no terminal."""
SHOWN = 16
"""Running points that the live table has room for."""


class Progress:
    """Points done, and of each running one its step, images/s and time left; what starts and ends stays as a line."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        self.began = time.monotonic()
        self._drawn = self.began

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def started(self, point: Point) -> None:
        if not self.live:
            self.say(f"started  {point.name}  ({point.signature})")

    def ended(self, end: End, seconds: float) -> None:
        took = f" in {duration(seconds)}" if seconds else ""
        detail = f": {end.detail}" if end.detail else ""
        colour = STYLE.get(end.shown, "")
        self.console.print(
            Text.assemble((f"{end.shown:<8}", colour), f" {end.point.name}{took}{detail}"), soft_wrap=True
        )

    def say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)

    def tick(self, pool: Pool) -> None:
        now = time.monotonic()
        if now - self._drawn < (REDRAW_S if self.live else LINE_S):
            return
        self._drawn = now
        rows = [
            Row(child.point, "running", status.read(pool.runs_dir / child.point.signature), None, "")
            for child in pool.children
        ]
        left = self._left(pool, rows)
        head = f"{len(pool.ends)} of {pool.total} points, {duration(now - self.began)} gone"
        head += f", about {duration(left)} left" if left is not None else ""
        if self.live:
            table = Table.grid(padding=(0, 2))
            for row in rows[:SHOWN]:
                table.add_row(row.point.name, *_columns(row))
            bar = Table.grid()  # a bar by itself ends no line
            bar.add_row(ProgressBar(total=max(pool.total, 1), completed=len(pool.ends), width=40))
            self.live.update(Group(bar, Text(head), table), refresh=True)
        else:
            running = "; ".join(" ".join([row.point.name, *filter(None, _columns(row))]) for row in rows)
            self.say(f"{head}; running: {running or 'nothing here'}")

    def _left(self, pool: Pool, rows: list[Row]) -> float | None:
        """Seconds until the last point ends, from the running points' speeds and else from the plan's costs."""
        running = [left_seconds(row) for row in rows]
        costs = [
            pool.costs[row.point.signature] if left is None else left for row, left in zip(rows, running, strict=True)
        ]
        costs += [pool.costs[point.signature] for point in pool.waiting]
        return makespan(costs, pool.options.workers) if costs else None


def _columns(row: Row) -> tuple[str, str, str]:
    known = row.status
    if known is None or known.state != "running" or not known.steps:
        phase = known.phase if known and known.state == "running" else None
        return phase or "starting", "", ""
    left = left_seconds(row)
    speed = f"{known.images_per_s:,.0f} images/s" if known.images_per_s else ""
    return progress(known), speed, f"{duration(left)} left" if left is not None else ""
