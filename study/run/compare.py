"""Two runs side by side: the keys in which they differ, the code that made them, and what they came to."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study import metrics
from study.run import listing
from study.sweep.nearest import text

if TYPE_CHECKING:
    from rich.console import RenderableType

ALWAYS = ("study.commit", "study.dirty")
"""Of where runs come from, what is shown even if it is the same."""
ATTEMPTS = ("study.attempt", "diverged")
"""Tags that tell of a run's life, not of what made it."""
Pair = list[Any]


def compare(run: str, other: str, runs_dir: Path, files: Path) -> dict[str, Any]:
    """What two runs have apart; each value is a pair, of ``run`` and of ``other``, None where one has none.

    Args:
        run: the signature of one, or the beginning of it, or its folder.
        other: that of the other.
        runs_dir: where runs live.
        files: exported runs, looked at for what has no folder.

    Raises:
        UserError: there is no such run, or more than one.
    """
    pair = [listing.one(name, runs_dir, files) for name in (run, other)]
    code = _pairs([{k: v for k, v in one["tags"].items() if k not in ATTEMPTS} for one in pair])
    return {
        "runs": [one["signature"] for one in pair],
        "names": [one["name"] for one in pair],
        "states": [one["state"] for one in pair],
        "params": _apart(_pairs([one["params"] for one in pair])),
        "code": {k: v for k, v in code.items() if k in ALWAYS} | _apart(code),
        "final": _pairs([one["final"] for one in pair]),
    }


def _pairs(pair: list[dict[str, Any]]) -> dict[str, Pair]:
    return {key: [one.get(key) for one in pair] for key in dict.fromkeys([*pair[0], *pair[1]])}


def _apart(pairs: dict[str, Pair]) -> dict[str, Pair]:
    return {key: [one, other] for key, (one, other) in pairs.items() if one != other}


def page(found: dict[str, Any]) -> "RenderableType":
    """The two on one page."""
    from rich import box
    from rich.table import Table

    table = Table(
        "", *(signature[:8] for signature in found["runs"]), "difference", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.columns[0].style = "dim"
    for column in table.columns[1:3]:
        column.overflow = "fold"
    table.add_row("name", *found["names"])
    table.add_row("state", *found["states"], end_section=True)
    for key, pair in (found["params"] or {"config": ["the same", "the same"]}).items():
        table.add_row(key, *map(_shown, pair))
    table.add_section()
    for key, pair in found["code"].items():
        table.add_row(key.removeprefix("study."), *map(_shown, pair))
    table.add_section()
    for name in metrics.ordered(set(found["final"])):
        table.add_row(*_result(name, found["final"][name]))
    return table


def _shown(value: Any) -> str:
    return "–" if value is None else text(value)


def _result(name: str, pair: Pair) -> list[str]:
    metric = metrics.of(name)
    cells = ["–" if value is None else metric.show(value) for value in pair]
    if all(value is not None and math.isfinite(value) for value in pair):
        cells.append(f"{(pair[1] - pair[0]) * metric.factor:+.{metric.digits}f} {metric.points}".rstrip())
    return [metric.axis, *cells]
