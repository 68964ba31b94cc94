"""Exported runs as the report sees them: sweeps of arms of seeds, and their histories.

Two files a sweep and scale, ``<sweep>-<scale>.runs.parquet`` (a row a run) and ``….metrics.parquet`` (a row a value).
Histories are streamed with the columns that are needed and reduced at once, so that the cost is linear in the rows and
the memory does not depend on their number.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from study.config import parse_yaml, read_yaml
from study.errors import UserError

Label = str | int | float | bool | None

CURVES = ("train/excess_loss", "train/accuracy", "knn")
"""Metrics whose course over the training is shown."""
BINS = 120
"""Points that a curve is reduced to: each is the mean over one of so many equal parts of the run."""
MIDDLE = (0.25, 0.75)
"""Share of the run over which readings of consistency are averaged: keys are random before it, and the encoder stands
still after it because the learning rate is gone."""
OLDEST = "consistency/cosine_oldest"
"""How well the oldest keys still agree with the encoder that they are compared with."""
_CONSISTENCY = "consistency/"
_AGE = "consistency/cosine_age_"


@dataclass(frozen=True)
class Run:
    """One exported run: a seed of an arm."""

    signature: str
    name: str
    labels: Mapping[str, Label]
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
    def epochs(self) -> float:
        """Length of the run in passes over the images."""
        return float(self.config.get("optimiser.epochs") or 0)


@dataclass(frozen=True)
class Histories:
    """Reduced histories of one sweep; row i of each array belongs to run i."""

    share: Mapping[str, np.ndarray]
    """Curve's name → (runs, BINS): mean step of each bin as a share of the run; NaN where nothing was logged."""
    value: Mapping[str, np.ndarray]
    """Curve's name → (runs, BINS): mean value of each bin."""
    readings: Mapping[str, np.ndarray]
    """Consistency's name → (runs,): mean of the readings in the middle of the run."""
    count: Mapping[str, np.ndarray]
    """Curve's name → (runs,): values logged."""

    @property
    def ages(self) -> dict[int, np.ndarray]:
        """Age of a key in steps → (runs,): cosine between the stored key and the same view encoded again."""
        names = {int(name.removeprefix(_AGE)): name for name in self.readings if name.startswith(_AGE)}
        return {age: self.readings[names[age]] for age in sorted(names)}


@dataclass(frozen=True)
class Arm:
    """The runs that differ in nothing but their seed; ``rows`` are their places in the sweep's runs."""

    labels: Mapping[str, Label]
    floor: str | None
    planned: int
    runs: tuple[Run, ...]
    rows: tuple[int, ...]

    @property
    def diverged(self) -> int:
        """Seeds whose loss or features were no longer finite."""
        return sum(any(not math.isfinite(value) for value in run.final.values()) for run in self.runs)

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
    command: str
    runs: tuple[Run, ...]
    metrics_file: Path

    @cached_property
    def histories(self) -> Histories:
        """Read when first asked for."""
        return read_histories(self.metrics_file, self.runs)

    def values(self, arm: Arm, metric: str) -> np.ndarray:
        """(n,) finite values of an arm's finished runs, in the order of the seeds: at the last step as a run states it,
        else the mean over the last part of a curve, or over the readings of consistency in the middle of the run; never
        a maximum over a run.
        """
        rows = [row for row, run in zip(arm.rows, arm.runs, strict=True) if run.state == "finished"]
        found = np.empty(0)
        if any(metric in self.runs[row].final for row in rows):
            found = np.array([self.runs[row].final.get(metric, math.nan) for row in rows], dtype=float)
        elif metric in self.histories.readings:
            found = self.histories.readings[metric][rows]
        elif metric in CURVES:
            found = self.histories.value[metric][rows, -1]
        finite: np.ndarray = found[np.isfinite(found)]
        return finite

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


def show(value: Label) -> str:
    """A label as people write it: no exponents, YAML's words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "–" if value is None else str(value)


def named(axis: str, value: Label) -> str:
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
        name, scale, title, axes = first["sweep"], first["scale"], first["title"], json.loads(first["axes"])
        metric = first["metric"]
    except (KeyError, pa.ArrowInvalid, json.JSONDecodeError) as error:
        raise UserError(f"{file}: {error}; allowed is what `study runs export` writes") from None
    metrics_file = file.with_name(file.name.replace(".runs.parquet", ".metrics.parquet"))
    planned, header = _planned(sweeps / f"{name}.yaml", scale)
    return SweepRuns(
        name=name,
        scale=scale,
        title=title or name,
        description=str(header.get("description", "")).strip(),
        axes=tuple(axes),
        metric=metric,
        arms=_arms(runs, planned, tuple(axes)),
        paper=tuple(header.get("paper", ())),
        command=str(header.get("command", "")).strip(),
        runs=runs,
        metrics_file=metrics_file,
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
        config={key: _typed(value) for key, value in json.loads(row["params"]).items()},
        tags=json.loads(row["tags"]),
        final={name: math.nan if value is None else float(value) for name, value in json.loads(row["final"]).items()},
        train_seconds=float(row["train_seconds"] or 0.0),
        threads=int(row["threads"] or 1),
    )


def _typed(value: Any) -> Any:
    """A parameter's value: a tracker keeps only text, and ``None`` in Python's spelling."""
    if not isinstance(value, str):
        return value
    return None if value in {"None", "null"} else parse_yaml(value, "params")


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


def _key(floor: str | None, labels: Mapping[str, Label]) -> tuple[Any, ...]:
    return (floor,) if floor else (None, *sorted(labels.items()))


def _arms(runs: Sequence[Run], planned: Mapping[tuple[Any, ...], int], axes: tuple[str, ...]) -> tuple[Arm, ...]:
    """Group runs by arm: the grid's order first, then what the grid does not know; floors last."""
    members: dict[tuple[Any, ...], list[int]] = {key: [] for key in planned}
    for row, run in enumerate(runs):
        members.setdefault(_key(run.floor, run.labels), []).append(row)

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        known = list(planned).index(key) if key in planned else len(planned)
        labels = dict(key[1:])
        return (key[0] is not None, known, [_sortable(labels.get(axis)) for axis in axes], key[0] or "")

    arms = []
    for key in sorted(members, key=place):
        rows = sorted(members[key], key=lambda row: (runs[row].seed, runs[row].signature))
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


def _sortable(value: Label) -> tuple[int, float, str]:
    numeric = isinstance(value, int | float)
    return (0, float(value), "") if numeric else (1, 0.0, str(value))  # type: ignore[arg-type]


def read_histories(file: Path, runs: Sequence[Run]) -> Histories:
    """Stream the values of a sweep and reduce them: curves to bins, readings of consistency to a mean.

    Args:
        file: a ``….metrics.parquet`` with the columns signature, name, step, value.
        runs: the sweep's runs; values of other signatures are left out.
    """
    row_of = {run.signature: row for row, run in enumerate(runs)}
    steps = np.array([max(run.steps, 1) for run in runs], dtype=np.int64)
    shape = (len(runs), BINS)
    curves = {name: np.zeros((3, *shape)) for name in CURVES}  # sums of: step, value, one
    readings: dict[str, np.ndarray] = {}  # name → (2, runs): sums of: value, one
    for batch in _batches(file):
        owner = _codes(batch, "signature", lambda signature: row_of.get(signature, -1))
        names = batch.column("name").dictionary.to_pylist()
        name = batch.column("name").indices.to_numpy()
        step, value = batch.column("step").to_numpy(), batch.column("value").to_numpy(zero_copy_only=False)
        for code, label in enumerate(names):
            if label not in curves and not label.startswith(_CONSISTENCY):
                continue
            at = np.flatnonzero((name == code) & (owner >= 0))
            row, s, v = owner[at], step[at], value[at]
            if label in curves:
                bin_ = np.minimum(s * BINS // steps[row], BINS - 1)
                for total, addend in zip(curves[label], (s / steps[row], v, 1.0), strict=True):
                    np.add.at(total, (row, bin_), addend)
            else:
                middle = (s >= MIDDLE[0] * steps[row]) & (s <= MIDDLE[1] * steps[row])
                total = readings.setdefault(label, np.zeros((2, len(runs))))
                np.add.at(total[0], row[middle], v[middle])
                np.add.at(total[1], row[middle], 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Histories(
            share={name: sums[0] / sums[2] for name, sums in curves.items()},
            value={name: sums[1] / sums[2] for name, sums in curves.items()},
            readings={name: sums[0] / sums[1] for name, sums in sorted(readings.items())},
            count={name: sums[2].sum(axis=1).astype(np.int64) for name, sums in curves.items()},
        )


def _batches(file: Path) -> Iterable[pa.RecordBatch]:
    columns = ["signature", "name", "step", "value"]
    with pq.ParquetFile(file, read_dictionary=columns[:2]) as parquet:
        yield from parquet.iter_batches(batch_size=1 << 19, columns=columns)


def _codes(batch: pa.RecordBatch, column: str, code: Any) -> np.ndarray:
    """(rows,) of ``code(text)``, computed once a distinct text."""
    array = batch.column(column)
    codes = np.array([code(text) for text in array.dictionary.to_pylist()], dtype=np.int64)
    rows: np.ndarray = codes[array.indices.to_numpy()]
    return rows
