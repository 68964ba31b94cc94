"""Histories of a sweep's runs, streamed and reduced at once: the cost is linear in the values, and the memory does not
depend on their number."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

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
AGE = "consistency/cosine_age_"


@dataclass(frozen=True)
class Histories:
    """Reduced histories of one sweep; row i of each array belongs to run i."""

    share: Mapping[str, np.ndarray]
    """Curve's name → (runs, BINS): mean step of each bin as a share of the run; NaN where nothing was logged."""
    value: Mapping[str, np.ndarray]
    """Curve's name → (runs, BINS): mean value of each bin."""
    readings: Mapping[str, np.ndarray]
    """Consistency's name → (runs,): mean of the readings in the middle of the run."""
    times: Mapping[str, np.ndarray]
    """Consistency's name → (runs,): how many readings those are."""
    count: Mapping[str, np.ndarray]
    """Curve's name → (runs,): values logged."""

    @property
    def ages(self) -> dict[int, np.ndarray]:
        """Age of a key in steps → (runs,): cosine between the stored key and the same view encoded again."""
        names = {int(name.removeprefix(AGE)): name for name in self.readings if name.startswith(AGE)}
        return {age: self.readings[names[age]] for age in sorted(names)}

    def counted(self, *names: str) -> str:
        """How many readings a run stand behind these means, in words; empty where there are none."""
        counts = {int(count) for name in names for count in self.times.get(name, ())} - {0}
        if not counts:
            return ""
        least, most = min(counts), max(counts)
        range_ = f"{most}" if least == most else f"{least} to {most}"
        return f"{range_} reading{'s' if most > 1 else ''} a run"


def read(file: Path, signatures: Sequence[str], lengths: Sequence[int]) -> Histories:
    """Stream the values of a sweep and reduce them: curves to bins, readings of consistency to a mean.

    Args:
        file: a ``….metrics.parquet`` with the columns signature, name, step, value.
        signatures: the sweep's runs, which give the rows; values of others are left out.
        lengths: steps of each run.
    """
    row_of = {signature: row for row, signature in enumerate(signatures)}
    steps = np.maximum(np.array(lengths, dtype=np.int64), 1)
    shape = (len(signatures), BINS)
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
                total = readings.setdefault(label, np.zeros((2, len(signatures))))
                np.add.at(total[0], row[middle], v[middle])
                np.add.at(total[1], row[middle], 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Histories(
            share={name: sums[0] / sums[2] for name, sums in curves.items()},
            value={name: sums[1] / sums[2] for name, sums in curves.items()},
            readings={name: sums[0] / sums[1] for name, sums in sorted(readings.items())},
            times={name: sums[1].astype(np.int64) for name, sums in sorted(readings.items())},
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
