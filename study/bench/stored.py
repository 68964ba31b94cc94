"""Things to point the commands at: a sweep of any size, its exported runs, and a queue that answers like Slurm's."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from study.config.reading import flatten
from study.sweep import grid

SWEEPS = grid.SCALES.parent
METRICS = (
    "train/loss",
    "train/excess_loss",
    "train/accuracy",
    "train/lr",
    "knn",
    "knn_output",
    "linear",
    "consistency/cosine_age_1",
    "consistency/cosine_age_16",
    "consistency/cosine_oldest",
    "consistency/theta_distance",
    "consistency/effective_rank",
)
RUNS_AT_ONCE = 500
"""Runs whose histories are made and written together."""
START_MS = 1_790_000_000_000


def sweeps(folder: Path, points: int) -> Path:
    """The study's own sweeps in ``folder``, with so many seeds of `momentum` that it has at least ``points`` points.

    Returns:
        The file of that sweep.
    """
    shutil.copytree(SWEEPS, folder)
    path = folder / "momentum.yaml"
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    arms = len(tree["axes"]["m"]) + len(tree["floors"])
    tree["seeds"] = list(range(math.ceil(points / arms)))
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def export(folder: Path, sweep: grid.Sweep, length: int) -> None:
    """Exported runs of every point of a sweep, each with a history of ``length`` steps of twelve metrics."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    points = sorted(sweep.points, key=lambda point: point.signature)
    final = random.uniform(0.5, 0.8, (len(points), 3))
    rows = [
        _row(sweep, point, length, dict(zip(("knn", "knn_output", "linear"), found, strict=True)))
        for point, found in zip(points, final.tolist(), strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{sweep.id}.runs.parquet")
    names = sorted(METRICS)
    schema = pa.schema(
        {
            "signature": pa.string(),
            "name": pa.string(),
            "step": pa.int64(),
            "value": pa.float64(),
            "time_ms": pa.int64(),
        }.items()
    )
    strings = ["signature", "name"]
    with pq.ParquetWriter(
        folder / f"{sweep.id}.metrics.parquet", schema, compression="zstd", use_dictionary=strings
    ) as writer:
        for start in range(0, len(points), RUNS_AT_ONCE):
            some = points[start : start + RUNS_AT_ONCE]
            each = len(names) * length
            step = np.tile(np.arange(1, length + 1), len(some) * len(names))
            columns = {
                "signature": np.repeat([point.signature for point in some], each),
                "name": np.tile(np.repeat(names, length), len(some)),
                "step": step,
                "value": random.standard_normal(len(some) * each),
                "time_ms": START_MS + 100 * step,
            }
            writer.write_table(pa.table(columns).cast(schema))


def _row(sweep: grid.Sweep, point: grid.Point, length: int, final: dict[str, float]) -> dict[str, object]:
    return {
        "sweep": sweep.name,
        "scale": sweep.scale,
        "title": sweep.title,
        "description": sweep.description,
        "axes": json.dumps(sweep.axes),
        "metric": sweep.metric,
        "signature": point.signature,
        "name": point.name,
        "labels": json.dumps(point.labels),
        "seed": point.seed,
        "floor": point.floor,
        "state": "finished",
        "attempt": 1,
        "steps": length,
        "train_seconds": 60.0,
        "threads": 1,
        "started_ms": START_MS,
        "ended_ms": START_MS + 60_000,
        "params": json.dumps(flatten(point.config.model_dump(mode="json"))),
        "tags": json.dumps({"study.commit": "0" * 40}),
        "final": json.dumps(final),
    }


SLURM = {
    "sbatch": """\
name=$(sed -n 's/^#SBATCH --job-name=//p' "$2")
last=$(sed -n 's/^#SBATCH --array=//p' "$2" | sed 's/%.*//; s/.*-//')
job=$(($(cat "$state/jobs" 2>/dev/null || echo 100) + 1))
echo $job > "$state/jobs"
seq -f "$name|$job|%.0f|RUNNING|None" 0 "$last" >> "$state/queue"
echo $job""",
    "squeue": 'cat "$state/queue"',
    "scontrol": """\
case "$*" in
*config*) echo "MaxArraySize = 1001" ;;
*) echo "PartitionName=main Default=YES MaxTime=UNLIMITED" ;;
esac""",
    "sacctmgr": "exit 1",
    "sacct": "exit 1",
}
"""Slurm's programs as they answer where every task runs and there is no accounting."""


def slurm(folder: Path) -> Path:
    """Stand-ins for Slurm's programs in ``folder``; each call adds its name to ``folder/calls``.

    Returns:
        The folder to look for programs in.
    """
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, body in SLURM.items():
        path = programs / name
        path.write_text(f"#!/bin/sh\nstate='{folder}'\necho {name} >> \"$state/calls\"\n{body}\n", encoding="utf-8")
        path.chmod(0o755)
    return programs
