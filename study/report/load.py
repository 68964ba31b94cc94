"""Exported runs as the report sees them: sweeps of arms of seeds, and their histories.

Two files a sweep and scale: ``<sweep>-<scale>.runs.parquet``, a row a run, and ``….metrics.parquet``, a row a value.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from study import strict
from study.config.reading import read_yaml
from study.errors import UserError
from study.report import histories
from study.report.histories import CURVES, Histories
from study.run import numerics
from study.sweep.grid import Label

_UNREADABLE = (OSError, KeyError, TypeError, pa.ArrowException, json.JSONDecodeError)
"""What reading a file raises that is missing, torn, or not what was exported."""


def _unreadable(file: Path, error: Exception) -> UserError:
    why = (str(error).splitlines() or [""])[0]
    return UserError(f"{file}: {type(error).__name__}: {why}; allowed is what `study runs export` writes")


@dataclass(frozen=True)
class Run:
    """One exported run: a seed of an arm."""

    signature: str
    name: str
    labels: Mapping[str, Label | None]
    seed: int
    floor: str | None
    state: str
    steps: int
    config: Mapping[str, Any]
    tags: Mapping[str, str]
    final: Mapping[str, float]
    train_seconds: float
    threads: int

    @property
    def diverged(self) -> bool:
        """The loss, or the features, were no longer finite."""
        return any(not math.isfinite(value) for value in self.final.values())

    @property
    def numerics(self) -> str:
        """Which numerics made it."""
        return self.tags.get("study.numerics", numerics.FIRST)

    @property
    def is_probe(self) -> bool:
        """A linear probe on a pre-training that is a run of its own."""
        return "probe.epochs" in self.config

    @property
    def constant(self) -> bool:
        """Nothing of it depends on the seed: raw pixels have no weights, unless a probe is trained on them."""
        return self.config.get("encoder.arch") == "pixels" and not self.is_probe

    @property
    def epochs(self) -> float:
        """Length of the pre-training in passes over the images."""
        return float(self.config["optimiser.epochs"])


@dataclass(frozen=True)
class Arm:
    """The runs that differ in nothing but their seed; ``rows`` are their places in the sweep's runs."""

    labels: Mapping[str, Label | None]
    floor: str | None
    planned: int
    runs: tuple[Run, ...]
    rows: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Length of the pre-training."""
        return max((run.steps for run in self.runs if not run.is_probe), default=0)

    @property
    def diverged(self) -> int:
        """Number of seeds that diverged."""
        return sum(run.diverged for run in self.runs)

    @property
    def constant(self) -> bool:
        """Its numbers do not depend on the seed."""
        return any(run.constant for run in self.runs)

    def get(self, key: str) -> Any:
        """The arm's label of that name, or else the value of that key of its config."""
        if key in self.labels:
            return self.labels[key]
        if not self.runs:
            return None
        config = self.runs[0].config
        if key == "K" and config.get("dictionary.K") is None:
            return config["optimiser.batch"] - 1
        return config["dictionary.K"] if key == "K" else config.get(key)

    @property
    def name(self) -> str:
        """Short name for people: the floor's, or what the arm sets."""
        return self.floor or ", ".join(named(axis, value) for axis, value in self.labels.items())

    @property
    def absent(self) -> str:
        """Why seeds are missing, such as ``1 failed, 1 not run``; empty when none is."""
        states = [run.state for run in self.runs if run.state != "finished" and not run.final]
        reasons = {state: states.count(state) for state in sorted(set(states))}
        missing = self.planned - len({run.seed for run in self.runs})
        if missing > 0:
            reasons["not run"] = missing
        return ", ".join(f"{count} {reason}" for reason, count in reasons.items())


@dataclass(frozen=True)
class SweepRuns:
    """All that the report knows of one sweep at one scale."""

    name: str
    scale: str
    title: str
    description: str
    axes: tuple[str, ...]
    metric: str
    arms: tuple[Arm, ...]
    paper: tuple[Mapping[str, Any], ...]
    runs: tuple[Run, ...]
    metrics_file: Path

    @cached_property
    def histories(self) -> Histories:
        """Read when first asked for.

        Raises:
            UserError: the file is missing, torn, or lacks a column.
        """
        try:
            return histories.read(
                self.metrics_file, [run.signature for run in self.runs], [run.steps for run in self.runs]
            )
        except _UNREADABLE as error:
            raise _unreadable(self.metrics_file, error) from None

    def values(self, arm: Arm, metric: str) -> np.ndarray:
        """(n,) values of an arm's finished runs that did not diverge, in the order of the seeds; see `by_seed`."""
        return np.array([value for _, value in self.by_seed(arm, metric)], dtype=float)

    def by_seed(self, arm: Arm, metric: str) -> list[tuple[int, float]]:
        """(seed, value) of an arm's finished runs that did not diverge, in the order of the seeds.

        At the last step as a run states it, else the mean over the last part of a curve, or over the readings of
        consistency in the middle of the run; never a maximum over a run.
        """
        rows = [
            row for row, run in zip(arm.rows, arm.runs, strict=True) if run.state == "finished" and not run.diverged
        ]
        found = np.full(len(rows), np.nan)
        if any(metric in self.runs[row].final for row in rows):
            found = np.array([self.runs[row].final.get(metric, math.nan) for row in rows], dtype=float)
        elif rows and metric in self.histories.readings:
            found = self.histories.readings[metric][rows]
        elif rows and metric in CURVES:
            found = self.histories.value[metric][rows, -1]
        pairs = zip((self.runs[row].seed for row in rows), found, strict=True)
        return [(seed, float(value)) for seed, value in pairs if np.isfinite(value)]

    @property
    def measured(self) -> tuple[Arm, ...]:
        """Arms that are no floors."""
        return tuple(arm for arm in self.arms if arm.floor is None)

    @property
    def floors(self) -> tuple[Arm, ...]:
        """What no training, or no encoder, gives."""
        return tuple(arm for arm in self.arms if arm.floor is not None)

    @property
    def epochs(self) -> list[float]:
        """Lengths of the arms' runs, each once."""
        return sorted({run.epochs for arm in self.measured for run in arm.runs})


def show(value: Label | None) -> str:
    """A label as people write it: no exponents, YAML's words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "–" if value is None else str(value)


def named(axis: str, value: Label | None) -> str:
    """A label that says what it is: a word speaks for itself, a number needs its axis."""
    return value if isinstance(value, str) else f"{axis} = {show(value)}"


def load(runs: Path, sweeps: Path) -> list[SweepRuns]:
    """Read every exported sweep, sorted by scale and name.

    Args:
        runs: folder of the exported runs.
        sweeps: folder of the sweeps' YAML files: the paper's numbers and the planned points stand there.

    Raises:
        UserError: there are no exported runs, or a file lacks a column.
    """
    files = sorted(runs.glob("*.runs.parquet"))
    if not files:
        raise UserError(f"{runs}: no *.runs.parquet; `study runs export` writes them")
    found = [_read_sweep(file, sweeps) for file in files]
    return sorted((sweep for sweep in found if sweep is not None), key=lambda sweep: (sweep.scale, sweep.name))


def _read_sweep(file: Path, sweeps: Path) -> SweepRuns | None:
    try:
        rows = pq.read_table(file).to_pylist()
        runs = tuple(_run(row) for row in rows)
        if not runs:
            return None
        first = rows[0]
        axes = tuple(json.loads(first["axes"]))
        name, scale, title, metric = (first[key] for key in ("sweep", "scale", "title", "metric"))
    except _UNREADABLE as error:
        raise _unreadable(file, error) from None
    if not axes:  # single runs, of no sweep: each is an arm of its own
        axes = ("run",)
        runs = tuple(dataclasses.replace(run, labels={"run": run.name}) for run in runs)
    planned, header = _planned(sweeps / f"{name}.yaml", scale)
    return SweepRuns(
        name=name,
        scale=scale or "single",
        title=title or name,
        description=str(header.get("description", "")).strip(),
        axes=axes,
        metric=metric,
        arms=_arms(runs, planned, axes),
        paper=tuple(header.get("paper", ())),
        runs=runs,
        metrics_file=file.with_name(file.name.replace(".runs.parquet", ".metrics.parquet")),
    )


def _run(row: Mapping[str, Any]) -> Run:
    return Run(
        signature=row["signature"],
        name=row["name"],
        labels=json.loads(row["labels"]),
        seed=int(row["seed"]),
        floor=row["floor"] or None,
        state=row["state"],
        steps=int(row["steps"] or 0),
        config=json.loads(row["params"]),
        tags=json.loads(row["tags"]),
        final={name: strict.number(value) for name, value in json.loads(row["final"]).items()},
        train_seconds=float(row["train_seconds"] or 0.0),
        threads=int(row["threads"] or 1),
    )


def _planned(file: Path, scale: str) -> tuple[dict[tuple[Any, ...], int], dict[str, Any]]:
    """Seeds an arm that the grid asks for, in the grid's order, and the sweep's header."""
    if not file.is_file():
        return {}, {}
    from study.sweep import grid

    planned: dict[tuple[Any, ...], int] = {}
    for point in grid.load(file, scale).points:
        if point.after is None:
            key = _key(point.floor, point.labels)
            planned[key] = planned.get(key, 0) + 1
    return planned, read_yaml(file)


def _key(floor: str | None, labels: Mapping[str, Label | None]) -> tuple[Any, ...]:
    return (floor,) if floor else (None, *sorted(labels.items()))


def _arms(runs: Sequence[Run], planned: Mapping[tuple[Any, ...], int], axes: tuple[str, ...]) -> tuple[Arm, ...]:
    """Group runs by arm: the grid's order first, then what the grid does not know; floors last."""
    members: dict[tuple[Any, ...], list[int]] = {key: [] for key in planned}
    for row, run in enumerate(runs):
        members.setdefault(_key(run.floor, run.labels), []).append(row)

    position = {key: i for i, key in enumerate(planned)}

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        labels = dict(key[1:])
        return (
            key[0] is not None,
            position.get(key, len(position)),
            [_sortable(labels.get(axis)) for axis in axes],
            key[0] or "",
        )

    arms = []
    for key in sorted(members, key=place):
        rows = sorted(members[key], key=lambda row: (runs[row].seed, runs[row].signature))
        if rows and all(runs[row].constant and runs[row].final == runs[rows[0]].final for row in rows):
            rows = rows[:1]  # one number, however many seeds it was run with
        mine = tuple(runs[row] for row in rows)
        labels = {axis: dict(key[1:]).get(axis) for axis in axes} if key[0] is None else {}
        arms.append(
            Arm(
                labels={axis: value for axis, value in labels.items() if value is not None},
                floor=key[0],
                planned=planned.get(key, len({run.seed for run in mine})),
                runs=mine,
                rows=tuple(rows),
            )
        )
    return tuple(arms)


def _sortable(value: Label | None) -> tuple[int, float, str]:
    numeric = isinstance(value, int | float)
    return (0, float(value), "") if numeric else (1, 0.0, str(value))  # type: ignore[arg-type]
