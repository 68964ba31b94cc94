"""What of a sweep is done, running, missing or failed, and what the rest would cost.

A plan reads the folder of runs once and asks nothing else: it answers for 10,000 points in about a second.
"""

import heapq
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.config import schema
from study.config.reading import read_yaml, resolve
from study.config.schema import Config
from study.errors import UserError
from study.launch import record
from study.run import numerics, status
from study.run.status import Status
from study.sweep.grid import Point, Sweep

STATES = ("done", "diverged", "running", "pending", "unknown", "missing", "failed", "blocked")
"""``diverged``: done, without numbers. ``unknown``: the cluster did not answer. ``blocked``: the pre-training that a
probe needs has failed."""

LOOKED_AT = 12
"""Finished runs of other sweeps whose configs are read when this sweep has none to measure by; newest first."""


@dataclass(frozen=True, slots=True)
class Row:
    """A point and what is known of it."""

    point: Point
    state: str
    status: Status | None
    cost: float | None
    """Seconds of a core (or of a GPU, see `Plan.unit`) that it still needs; None when nothing tells."""
    source: str
    """Where the cost comes from."""
    note: str = ""
    """What the cluster says of it."""

    @property
    def diverged(self) -> int | None:
        """The step at which it diverged, of a point that is done without numbers."""
        return self.status.diverged if self.status and self.state == "done" else None

    @property
    def shown(self) -> str:
        """`state` as it is shown and counted: ``diverged`` apart from ``done``."""
        return self.state if self.diverged is None else "diverged"

    @property
    def numerics(self) -> str:
        """Which made it, or will have: those of its attempts, and this code's while it is not done."""
        so_far = self.status.numerics if self.status else []
        return numerics.text(so_far if self.state == "done" else [*so_far, schema.NUMERICS])

    @property
    def error(self) -> str | None:
        """Why it failed, on one line."""
        return (self.status.error if self.status else None) or self.note or None


@dataclass(frozen=True, slots=True)
class Removed:
    """A point of the recorded sweep that is no longer in the grid: reported, and never touched unless asked."""

    signature: str
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep's points, in the grid's order."""

    sweep: Sweep
    rows: tuple[Row, ...]
    removed: tuple[Removed, ...]
    unit: str
    """``"core"`` or ``"GPU"``: of what a cost counts seconds."""

    @property
    def to_run(self) -> tuple[Row, ...]:
        """What a submission sends: the missing and the failed, and the probes that these block."""
        return tuple(row for row in self.rows if row.state in ("missing", "failed", "blocked"))

    @property
    def counts(self) -> dict[str, int]:
        """Points by state, those that occur, in the order of `STATES`."""
        found = Counter(row.shown for row in self.rows)
        counts = {state: found[state] for state in STATES if found[state]}
        return counts | ({"removed": len(self.removed)} if self.removed else {})

    @property
    def seconds(self) -> float | None:
        """Seconds of `unit` that the points to run need; None when one of them has no cost."""
        costs = [row.cost for row in self.to_run]
        return None if None in costs else sum(cost for cost in costs if cost is not None)

    def wall(self, workers: int) -> float | None:
        """Wall seconds with so many points side by side; None when one of them has no cost."""
        return makespan((row.cost for row in self.to_run), workers)

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the costs of the points to run come from."""
        return tuple(dict.fromkeys(row.source for row in self.to_run if row.source))

    def as_json(self, workers: int) -> dict[str, Any]:
        """The plan for a program to read."""
        return {
            "sweep": self.sweep.name,
            "scale": self.sweep.scale,
            "counts": self.counts,
            "cost": {
                "unit": self.unit,
                "seconds": self.seconds,
                "hours": None if self.seconds is None else self.seconds / 3600,
                "wall_seconds": self.wall(workers),
                "workers": workers,
                "sources": self.sources,
            },
            "points": [
                {
                    "signature": row.point.signature,
                    "name": row.point.name,
                    "labels": row.point.labels,
                    "seed": row.point.seed,
                    "floor": row.point.floor,
                    "after": row.point.after,
                    "state": row.shown,
                    "diverged": row.diverged,
                    "step": row.status.step if row.status else None,
                    "steps": row.status.steps if row.status else None,
                    "images_per_s": row.status.images_per_s if row.status else None,
                    "numerics": row.numerics,
                    "error": row.error if row.state == "failed" else None,
                    "final": row.status.final if row.status else None,
                    "cost_seconds": row.cost,
                    "source": row.source,
                }
                for row in self.rows
            ],
            "removed": [{"signature": gone.signature, "name": gone.name, "state": gone.state} for gone in self.removed],
        }


def make(sweep: Sweep, runs_dir: Path, queue: Mapping[str, tuple[str, str]] | None = None) -> Plan:
    """Compare a sweep with the folder of runs.

    Args:
        sweep: the grid at one scale.
        runs_dir: where the runs are; it need not exist.
        queue: signature → state (``pending``, ``running``, ``unknown`` or ``failed``) and reason, for points of which
            a cluster knows more than their folders do.
    """
    now = time.time()
    present = _folders(runs_dir)
    queue = queue or {}
    found = {point.signature: _look(runs_dir, point.signature, present, queue, now) for point in sweep.points}
    meter = _Meter(sweep, found, runs_dir, present)
    rows = []
    for point in sweep.points:
        state, known = found[point.signature]
        if state == "missing" and point.after is not None and found[point.after][0] == "failed":
            state = "blocked"
        cost, source = meter.cost(point, state, known)
        rows.append(Row(point, state, known, cost, source, queue.get(point.signature, ("", ""))[1]))
    here = {point.signature for point in sweep.points}
    removed = tuple(
        Removed(gone["signature"], gone["name"], _look(runs_dir, gone["signature"], present, queue, now)[0])
        for gone in record.points(runs_dir, sweep.id)
        if gone["signature"] not in here
    )
    return Plan(sweep, tuple(rows), removed, meter.unit)


def makespan(costs: Iterable[float | None], workers: int) -> float | None:
    """Seconds until the last of these ends, begun in this order, so many side by side; None when one is not known."""
    free = [0.0] * workers
    for cost in costs:
        if cost is None:
            return None
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def state_of(folder: Path) -> tuple[str, Status | None]:
    """State of one run, in a plan's words, and its status."""
    known = status.read(folder)
    if known is None:
        return "missing", None
    return _words(known, time.time()), known


def _look(
    runs_dir: Path, signature: str, present: set[str], queue: Mapping[str, tuple[str, str]], now: float
) -> tuple[str, Status | None]:
    known = status.read(runs_dir / signature) if signature in present else None
    state = _words(known, now) if known else "missing"
    if state in ("missing", "failed"):
        state = queue.get(signature, (state, ""))[0]
    return state, known


def _words(known: Status, now: float) -> str:
    """A run's own state in the words of a plan: one that was stopped is missing, since it will be continued."""
    return {"finished": "done", "running": "running", "failed": "failed"}.get(status.seen(known, now), "missing")


def _folders(runs_dir: Path) -> set[str]:
    """Names in the folder of runs, by one listing."""
    try:
        with os.scandir(runs_dir) as entries:
            return {entry.name for entry in entries}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UserError(f"{runs_dir}: cannot be read: {error.strerror}; allowed is a folder of runs") from None


# ------------------------------------------------------------------------------------------------------------- cost


class _Meter:
    """Seconds an image, from finished runs of one shape; the header's figure where there is none."""

    def __init__(
        self, sweep: Sweep, found: Mapping[str, tuple[str, Status | None]], runs_dir: Path, present: set[str]
    ) -> None:
        self.header = sweep.cost
        self.unit = sweep.cost.unit if sweep.cost else "core"
        self.rates: dict[tuple[Any, ...], list[float]] = {}
        self.images: dict[str, int] = {}  # data set → its training images, as finished runs went through them
        for point in sweep.points:
            self._learn(point.config, found[point.signature][1])
        if not self.rates and any(state != "done" for state, _ in found.values()):
            for config, known in _others(runs_dir, present - found.keys()):
                self._learn(config, known)

    def _learn(self, config: Config, known: Status | None) -> None:
        epochs, batch = _passes(config)
        if known is None or known.state != "finished" or not known.train_seconds or not known.steps or not epochs:
            return
        if known.diverged is not None:
            return  # it ended before its last step
        seconds = known.train_seconds * (known.threads or 1 if self.unit == "core" else 1)
        self.rates.setdefault(_shape(config), []).append(seconds / (known.steps * batch))
        if config.data.train_images is None:
            self.images[config.data.name] = round(known.steps * batch / epochs)

    def cost(self, point: Point, state: str, known: Status | None) -> tuple[float | None, str]:
        """Seconds that a point still needs, and where the figure comes from."""
        if state == "done":
            return 0.0, ""
        epochs, _ = _passes(point.config)
        if not epochs:
            return 0.0, ""  # a floor is evaluated only
        left = 1 - known.step / known.steps if known and known.steps else 1.0
        rates = self.rates.get(_shape(point.config))
        images = point.config.data.train_images or self.images.get(point.config.data.name)
        if rates and images:
            plural = "run" if len(rates) == 1 else "runs"
            return (
                statistics.median(rates) * images * epochs * left,
                f"measured on {len(rates)} {plural} of the same shape",
            )
        if self.header and point.after is None:
            return self.header.seconds * left, f"header: {self.header.source}"
        return None, ""


def _shape(config: Config) -> tuple[Any, ...]:
    """Runs that are equal in these take equally long an image."""
    encoder = config.encoder
    return (
        encoder.arch,
        encoder.stem,
        encoder.width,
        encoder.head,
        config.data.size,
        config.precision,
        config.dictionary.kind,
        config.probe is not None,
    )


def _passes(config: Config) -> tuple[int, int]:
    """Epochs and batch of what the run trains."""
    trained = config.probe or config.optimiser
    return trained.epochs, trained.batch


def _others(runs_dir: Path, names: Iterable[str]) -> list[tuple[Config, Status]]:
    """The newest finished runs of other sweeps, a few of them."""
    stamped = []
    for name in names:
        try:
            stamped.append(((runs_dir / name / "status.json").stat().st_mtime, name))
        except OSError:
            continue
    learned: list[tuple[Config, Status]] = []
    for _, name in sorted(stamped, reverse=True)[:LOOKED_AT]:
        try:
            known = status.read(runs_dir / name)
            config = resolve(read_yaml(runs_dir / name / "config.yaml"), name)
        except UserError:  # damaged, or of another version: not to measure by
            continue
        if known is not None:
            learned.append((config, known))
    return learned
