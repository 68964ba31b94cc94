"""A sweep's table, drawn again until nothing of the sweep is queued or running."""

import time
from collections.abc import Callable

from rich.live import Live

from study.console import stdout
from study.launch import table
from study.launch.plan import Plan

LOOK_S = 5.0
"""Seconds between two looks; with points on a cluster each look is a query to its controller."""

LIVE = {"running", "pending", "unknown"}


def watch(look: Callable[[], Plan], *, everything: bool = False) -> Plan:
    """Show a sweep until no point of it is queued, running or unknown: a live table on a terminal; in a file a line
    whenever the numbers change, and the table at the end.

    Args:
        look: the sweep as it stands now.
        everything: show each point of a long sweep.

    Returns:
        The last look.
    """
    console = stdout()
    said = ""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            plan = look()
            live.update(table.of_status(plan, everything=everything), refresh=True)
            if not console.is_terminal and (counts := table.counts(plan)) != said:
                console.print(said := counts)
            if not plan.counts.keys() & LIVE:
                break
            time.sleep(LOOK_S)
    if not console.is_terminal:
        console.print()  # the table's last line is left open there
    return plan
