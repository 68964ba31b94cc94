"""How fast the study is, each figure a ratio of two things that are measured in turn in one run.

A group of figures is a function that adds rows to a `Bench`; it is imported when it is asked for.
"""

import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from study.errors import UserError

GROUPS = {
    "trainer": "study.bench.trainer:trainer",
    "overhead": "study.bench.trainer:overhead",
    "evaluation": "study.bench.trainer:evaluation",
    "pool": "study.bench.pool:pool",
    "memory": "study.bench.pool:memory",
    "peer": "study.bench.peer:peer",
    "commands": "study.bench.commands:commands",
    "report": "study.bench.commands:report",
    "tracker": "study.bench.commands:tracker",
    "slurm": "study.bench.commands:slurm",
    "cost": "study.bench.cost:cost",
}
"""Name → where its function is, in the order of the table."""


def run(groups: Sequence[str], repeats: int, out: Path, as_json: bool) -> int:
    """Measure groups of figures; print and write them.

    Args:
        groups: names; none means all.
        repeats: turns of each side of a ratio, at least 1.
        out: where bench.json and cost.{svg,png} go; rows there of other groups stay as they are.
        as_json: print a JSON object a row instead of the table.

    Returns:
        0, also when a goal is not met.

    Raises:
        UserError: no such group, or no such number of repeats.
    """
    for name in groups:
        if name not in GROUPS:
            raise UserError(f"command line: GROUP = {name}: allowed is {', '.join(GROUPS)}")
    if repeats < 1:
        raise UserError(f"command line: --repeats = {repeats}: allowed is 1 or more")
    from study.bench import results
    from study.bench.measure import Bench, workplace

    with tempfile.TemporaryDirectory(prefix="study-bench-") as folder, workplace(Path(folder)) as device:
        for name in [name for name in GROUPS if name in groups or not groups]:
            print(f"{name} …", file=sys.stderr)
            module, _, function = GROUPS[name].partition(":")
            bench = Bench(name, Path(folder), device, repeats)
            getattr(import_module(module), function)(bench)
            results.write(out, name, bench.rows)
            if as_json:
                results.print_json(bench.rows)
    if not as_json:
        results.print_table(out, groups or list(GROUPS))
    return 0
