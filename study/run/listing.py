"""Runs as a person or a program reads them: from their folders, or from exported files where there are none."""

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.console import UNBOUNDED
from study.errors import UserError
from study.run import facts, journal, numerics, provenance, status
from study.run.facts import Entry, Facts
from study.sweep.nearest import difference

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDE, WIDEST = 110, 150
"""Columns from which on the table has more of them, and all."""
STYLES = {
    "finished": "green",
    "diverged": "bright_red",
    "running": "cyan",
    "failed": "red",
    "killed": "yellow",
    "scheduled": "blue",
}
"""``diverged``: finished, without numbers."""


def runs(runs_dir: Path, files: Path) -> list[dict[str, Any]]:
    """One summary a run and sweep, sorted by sweep and name.

    Raises:
        UserError: neither run folders nor exported runs, or a damaged one.
    """
    found = [_summary(entry, known, str(folder)) for folder, entry, known in _here(runs_dir)]
    if not found:
        found = [_summary(entry, known, str(file)) for file, entry, known in _exported(runs_dir, files)]
    return sorted(found, key=lambda run: (run["sweep"], run["scale"], run["name"], run["signature"]))


def one(run: str, runs_dir: Path, files: Path) -> dict[str, Any]:
    """All about the run whose signature begins with ``run``, or with the last part of that path.

    Raises:
        UserError: there is no such run, or more than one.
    """
    from study.run import export

    start = Path(run).name
    if not start:
        raise UserError(f"command line: RUN = {run}: allowed is a signature or the beginning of one")
    found = [row for row in _here(runs_dir) if row[0].name.startswith(start)]
    found = found or [row for row in _exported(runs_dir, files) if row[1].signature.startswith(start)]
    if not found:
        raise UserError(f"command line: RUN = {start}: no such run; `study runs list` shows what there is")
    signatures = {entry.signature for _, entry, _ in found}
    if len(signatures) > 1:
        raise UserError(f"command line: RUN = {start}: allowed is one of {', '.join(sorted(signatures))}")
    path, known = found[0][0], found[0][2]
    if path.is_dir():
        readings, extra = journal.read(path / "metrics.jsonl"), _detail(path)
    else:
        readings, extra = export.histories(path).get(known.signature, []), {"exported": str(path)}
    entries = [entry for _, entry, _ in found]
    history: dict[str, dict[str, Any]] = {}
    for reading in sorted(readings, key=lambda reading: reading.step):
        row = history.setdefault(reading.name, {"points": 0, "first": reading.value})
        row.update(points=row["points"] + 1, last=reading.value, last_step=reading.step)
    return {
        **_summary(entries[0], known, extra.get("exported", "")),
        **extra,
        "places": [{"experiment": entry.place.name, "name": entry.name} for entry in entries],
        "tags": dict(known.tags),
        "params": dict(known.params),
        "history": history,
    }


def shown(run: dict[str, Any]) -> str:
    """The state of a summary as it is shown: a run that is finished without numbers has ``diverged``."""
    return "diverged" if run["diverged"] is not None else str(run["state"])


def table(found: list[dict[str, Any]], width: int) -> "RenderableType":
    """A line a run, a table a sweep; below it what its arms have apart."""
    from rich.console import Group
    from rich.text import Text

    tables: dict[str, Table] = {}
    made: dict[str, list[str]] = {}
    piped = width >= UNBOUNDED
    for run in found:
        place = f"{run['sweep']}-{run['scale']}".rstrip("-")
        if place not in tables:
            tables[place] = _empty(place, width, piped)
        state, result = shown(run), ""
        if state == "diverged":
            result = f"at step {run['diverged']}"
        elif run["result"] is not None:
            result = f"{run['metric']} {run['result']:.4g}"
        cells: list[Text | str] = [
            run["signature"] if piped else run["signature"][:8],
            run["name"],
            Text(state, STYLES.get(state, "")),
            f"{run['step']}/{run['steps']}" if run["step"] != run["steps"] else str(run["steps"]),
            result,
        ]
        if width >= WIDEST:
            cells.insert(2, f"{run['from_scale']}: {run['difference']}" if run["from_scale"] else "")
        if width >= WIDE:
            started = run["started_ms"]
            cells += [
                str(run["attempt"]),
                f"{run['train_seconds'] / 60:.1f}",
                time.strftime("%F %R", time.localtime(started / 1000)) if started else "",
            ]
        tables[place].add_row(*cells)
        if run["sweep"] != facts.LONE and run["state"] == "finished":
            made.setdefault(place, []).append(run["numerics"])
    for place, those in made.items():
        if said := numerics.apart(those):
            tables[place].caption = Text(f"{place}: {said}", "yellow")
            tables[place].caption_justify = "left"
    return Group(*tables.values())


def _empty(place: str, width: int, piped: bool) -> "Table":
    from rich import box
    from rich.table import Table

    shown = Table(title=place, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, expand=not piped)
    shown.add_column("run", width=8, style="dim")
    shown.add_column("name", overflow="ellipsis", no_wrap=True, ratio=1)
    if width >= WIDEST:
        shown.add_column("differs from its scale", overflow="ellipsis", no_wrap=True, ratio=2)
    shown.add_column("state", width=9)
    shown.add_column("step", width=8, justify="right")
    shown.add_column("result", width=13)
    if width >= WIDE:
        shown.add_column("try", width=3, justify="right")
        shown.add_column("minutes", width=7, justify="right")
        shown.add_column("started", width=16)
    if piped:
        for column in shown.columns:
            column.width = None
    return shown


def page(run: dict[str, Any], width: int) -> "RenderableType":
    """One run on one page."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim")
    head.add_column(overflow="fold")
    state = f"{run['state']}, attempt {run['attempt']}, step {run['step']} of {run['steps']}"
    if run["diverged"] is not None:
        state += f", diverged at step {run['diverged']}"
    rows: list[tuple[str, Any]] = [
        ("run", run["signature"]),
        ("name", run["name"]),
        ("in", ", ".join(place["experiment"] for place in run["places"])),
        ("scale", f"{run['from_scale']}, but {run['difference']}" if run["difference"] else run["from_scale"]),
        ("state", state),
        ("error", run.get("error")),
        ("results", "  ".join(f"{name} {value:.4g}" for name, value in run["final"].items() if math.isfinite(value))),
        ("trained", f"{run['train_seconds']:.0f} s, {run['threads'] or '?'} thread(s)"),
        ("folder", run["source"]),
        ("tracked as", ", ".join(run.get("tracked", []))),
        *((name.removeprefix("study."), value) for name, value in run["tags"].items() if name != facts.DIVERGED),
    ]
    for name, value in rows:
        if value:
            head.add_row(name, str(value))
    history = Table("metric", "points", "first", "last", "at step", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, row in run["history"].items():
        history.add_row(name, str(row["points"]), f"{row['first']:.5g}", f"{row['last']:.5g}", str(row["last_step"]))
    config = Text("  ".join(f"{name}={facts.param(value)}" for name, value in run["params"].items()), style="dim")
    return Group(head, history, config)


def _here(runs_dir: Path) -> list[tuple[Path, Entry, Facts]]:
    places = facts.places(runs_dir)
    found = []
    for folder in facts.folders(runs_dir):
        params = facts.params(folder)
        known = facts.read(folder, params)
        found += [(folder, entry, known) for entry in places.get(folder.name) or [facts.lone(folder.name, params)]]
    return found


def _exported(runs_dir: Path, files: Path) -> list[tuple[Path, Entry, Facts]]:
    from study.run import export

    try:
        paths = export.exported(files)
    except UserError:
        raise UserError(f"{runs_dir}: no runs, and no exported ones in {files}; `study train` makes one") from None
    return [(path, *run) for path in paths for run in export.runs(path)]


def _summary(entry: Entry, known: Facts, source: str) -> dict[str, Any]:
    metric = entry.place.metric if entry.place.metric in known.final else next(iter(known.final), entry.place.metric)
    apart = difference(known.params, entry.place.scale)
    folder = Path(source)
    live = status.read(folder) if folder.is_dir() else None
    return {
        "signature": entry.signature,
        "sweep": entry.place.sweep,
        "scale": entry.place.scale,
        "name": entry.name,
        "labels": dict(entry.labels),
        "seed": entry.seed,
        "floor": entry.floor,
        "from_scale": apart.scale,
        "difference": str(apart),
        "state": known.state,
        "attempt": known.attempt,
        "step": live.step if live else known.steps,
        "steps": known.steps,
        "metric": metric,
        "result": known.final.get(metric),
        "diverged": int(known.tags[facts.DIVERGED]) if facts.DIVERGED in known.tags else None,
        "final": dict(known.final),
        "train_seconds": known.train_seconds,
        "threads": known.threads,
        "numerics": known.tags.get("study.numerics", numerics.FIRST),
        "started_ms": known.started_ms,
        "ended_ms": known.ended_ms,
        "source": source,
    }


def _detail(folder: Path) -> dict[str, Any]:
    """What only the folder knows."""
    live = status.read(folder)
    try:
        notes = json.loads((folder / "mirror.json").read_bytes())
    except (OSError, ValueError):
        notes = {}
    return {
        "source": str(folder),
        "error": live.error if live else None,
        "attempts": provenance.read(folder).get("attempts", []),
        "tracked": sorted(note["run_id"] for note in notes.values()),
    }
