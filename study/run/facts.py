"""What the mirror and the export both say of a run: its place among the sweeps, its facts and its points.

Read from a run's folder, or from exported files; the same either way, so that a store filled from the one equals a
store filled from the other.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from study.config.reading import flatten, read_yaml
from study.errors import UserError
from study.run import numerics, provenance, status
from study.run.journal import Reading
from study.sweep.nearest import difference

LONE = "train"
"""Where a run stands that no sweep asked for."""
LONGEST_PARAM = 500
DIVERGED = "diverged"
"""The tag of a run that diverged; its value is the step."""


@dataclass(frozen=True)
class Place:
    """A sweep at a scale, which is an experiment in MLflow and a pair of exported files."""

    sweep: str
    scale: str
    title: str
    description: str = ""
    axes: tuple[str, ...] = ()
    metric: str = "knn"

    @property
    def name(self) -> str:
        """Name of the experiment and of the files; a lone run has no scale."""
        return f"{self.sweep}-{self.scale}" if self.scale else self.sweep


@dataclass(frozen=True)
class Entry:
    """A run as one place knows it; ``removed``: the sweep's grid no longer has it."""

    place: Place
    signature: str
    name: str
    labels: Mapping[str, Any]
    seed: int
    floor: str | None = None
    removed: bool = False


class Point(NamedTuple):
    """One finite value of one metric as a store keeps it.

    What is not finite is told by the tag ``diverged``: MLflow shows no curve of a metric whose newest value is NaN, and
    keeps ±inf as a number.
    """

    name: str
    step: int
    value: float
    time_ms: int

    @property
    def key(self) -> tuple[str, int, str, int]:
        """Comparable where values are not: a store may hold NaN from elsewhere."""
        return self.name, self.step, repr(float(self.value)), self.time_ms


@dataclass(frozen=True)
class Facts:
    """What a run is and did, apart from its history; times in Unix milliseconds.

    ``tags`` may be published; ``private`` names hosts, users and jobs, and stays in the reader's own store.
    """

    signature: str
    state: str
    attempt: int
    steps: int
    started_ms: int | None
    ended_ms: int | None
    train_seconds: float
    threads: int | None
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    final: Mapping[str, float]
    private: Mapping[str, str] = field(default_factory=dict)


def places(runs_dir: Path) -> dict[str, list[Entry]]:
    """Every submitted sweep's points: signature → where that run stands.

    Raises:
        UserError: the record of a sweep is damaged.
    """
    found: dict[str, list[Entry]] = {}
    for path in sorted((runs_dir / "sweeps").glob("*.json")):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            place = Place(
                tree["sweep"],
                tree["scale"],
                tree.get("title") or tree["sweep"],
                tree.get("description") or "",
                tuple(tree["axes"]),
                tree.get("metric") or "knn",
            )
            for removed, points in ((False, tree["points"]), (True, tree.get("removed", []))):
                for point in points:
                    entry = Entry(
                        place,
                        point["signature"],
                        point["name"],
                        point["labels"],
                        point["seed"],
                        point["floor"],
                        removed,
                    )
                    found.setdefault(entry.signature, []).append(entry)
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}: is no record of a sweep; allowed is one that `study sweep submit` wrote"
            ) from None
    return found


def folders(runs_dir: Path) -> list[Path]:
    """Folders of all runs, sorted by signature."""
    return sorted(path.parent for path in runs_dir.glob("*/config.yaml"))


def lone(signature: str, params: Mapping[str, Any]) -> Entry:
    """Where a run stands that no sweep asked for; named, as an arm is, by what differs from its scale."""
    place = Place(LONE, "", "Single runs", "Runs of `study train` that belong to no sweep.")
    seed = int(params.get("seed", 0))
    return Entry(place, signature, f"{difference(params).name} seed={seed}".strip(), {}, seed)


def params(folder: Path) -> dict[str, Any]:
    """The run's flattened config.

    Raises:
        UserError: config.yaml is damaged.
    """
    return flatten(read_yaml(folder / "config.yaml"))


def read(folder: Path, params: Mapping[str, Any], now: float | None = None) -> Facts:
    """Read what a run's folder says now.

    Args:
        folder: the run's folder.
        params: its flattened config, as ``params`` gives it.
        now: Unix seconds, to tell a live run from a dead one; the present by default.
    """
    known = status.read(folder)
    if known is None:
        return Facts(folder.name, "pending", 0, 0, None, None, 0.0, None, params, {}, {})
    state = status.seen(known, now)
    origin = provenance.read(folder)
    ended = known.ended
    if state == "killed" and ended is None:
        ended = known.heartbeat  # it was last seen alive then
    attempts = origin.get("attempts", [])
    versions = origin.get("versions") or {}
    tags = {
        "study.attempt": str(known.attempt),
        "study.commit": origin.get("commit"),
        "study.dirty": None if origin.get("dirty") is None else param(origin["dirty"]),
        "study.branch": origin.get("branch"),
        "study.cpu": origin.get("cpu"),
        "study.cores": None if origin.get("cores") is None else str(origin["cores"]),
        "study.gpus": ", ".join(origin.get("gpus") or []),
        "study.images": origin.get("images"),
        "study.numerics": numerics.text(known.numerics),
        DIVERGED: None if known.diverged is None or state != "finished" else str(known.diverged),
        **{f"study.version.{name}": version for name, version in sorted(versions.items())},
    }
    private = {
        "study.hosts": ", ".join(_each(attempt.get("host") for attempt in attempts)) or known.host,
        "study.jobs": ", ".join(_each(attempt.get("job_id") for attempt in attempts)),
        "study.error": known.error,
    }
    return Facts(
        signature=folder.name,
        state=state,
        attempt=known.attempt,
        steps=known.steps if known.steps is not None else known.step,
        started_ms=round(known.started * 1000) if known.started else None,
        ended_ms=round(ended * 1000) if ended is not None and state in {"finished", "failed", "killed"} else None,
        train_seconds=known.train_seconds,
        threads=known.threads,
        params=params,
        tags={name: value for name, value in tags.items() if value},
        final=known.final if state == "finished" else {},
        private={name: value for name, value in private.items() if value},
    )


def _each(values: Iterable[Any]) -> list[str]:
    """Each value once, in order of its first coming, without the empty ones."""
    return list(dict.fromkeys(str(value) for value in values if value))


def final_points(known: Facts, last: Mapping[str, float]) -> list[Point]:
    """Points for the final values that the history does not already end with.

    Args:
        known: the run.
        last: the newest finite value of each metric in its history.
    """
    if known.state != "finished" or known.ended_ms is None:
        return []
    return [
        Point(name, known.steps, value, known.ended_ms)
        for name, value in sorted(known.final.items())
        if math.isfinite(value) and (name not in last or repr(last[name]) != repr(value))
    ]


def points(known: Facts, readings: Iterable[Reading]) -> list[Point]:
    """All that a store should hold of a run.

    Args:
        known: the run.
        readings: its journal, one value for each (step, name).
    """
    history = sorted(history_points(readings), key=lambda point: (point.step, point.name))
    return history + final_points(known, {point.name: point.value for point in history})


def history_points(readings: Iterable[Reading]) -> list[Point]:
    """What a store should hold of some readings, in their order: those that are finite."""
    return [
        Point(reading.name, reading.step, reading.value, reading.time_ms)
        for reading in readings
        if math.isfinite(reading.value)
    ]


def param(value: Any) -> str:
    """The one way in which a value becomes text: YAML's words, the shortest digits that give the same float."""
    if value is None or isinstance(value, bool):
        text = json.dumps(value)
    elif isinstance(value, float):
        text = repr(value)
    elif isinstance(value, list | tuple | dict):
        text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    else:
        text = str(value)
    return text[:LONGEST_PARAM]
