"""Exported runs that look like the study's: what `study runs export` writes, without training.

The points come from the real grids; the numbers from smooth formulas and a fixed generator, so that a golden table can
be stored.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from study.config.reading import flatten
from study.sweep import grid
from study.sweep.grid import Point

ROOT = Path(__file__).parents[2]
SWEEPS = ROOT / "sweeps"
START_MS = 1_790_000_000_000


def score(point: Point) -> dict[str, float]:
    """Final metrics that follow the paper's story: consistency and size help, staleness and leaks hurt."""
    config, noise = point.config, np.random.default_rng([int(point.signature, 16) % 2**32, point.seed])
    if config.encoder.arch == "pixels":
        knn = 0.742
    elif config.optimiser.epochs == 0:
        knn = 0.661
    else:
        m = config.m if config.m is not None else 0.0
        if config.dictionary.kind == "bank":
            knn = 0.735 - 0.01 * math.log2(65536 / config.K) / 4
        elif config.dictionary.kind == "in-batch":
            knn = 0.745 + 0.005 * math.log2(config.optimiser.batch / 256) + 0.01 * m
        else:
            knn = (
                0.65 + 0.125 * min(1.0, math.log10(1 / max(1 - m, 1e-4)) / 3) - 0.005 * math.log2(65536 / config.K) / 2
            )
            knn -= {"oldest": 0.0, "random": 0.012, "newest": 0.05}[config.dictionary.eviction or "oldest"]
        if config.encoder.bn == "split" and config.dictionary.kind != "bank":
            knn -= 0.06
        if not config.optimiser.lr_rule:
            knn -= 0.01 * abs(math.log2(config.optimiser.batch / 256))
        knn += 0.003 * noise.standard_normal()
    final = {"knn": knn, "knn_output": knn - 0.03}
    if config.evaluation.linear_epochs:
        final["linear"] = knn + 0.04
    return {"probe/top1": knn + 0.05} if config.probe is not None else final


def histories(point: Point, steps: int, every: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name → (steps, values) for a run of that many steps, with a reading of consistency each ``every``."""
    config, noise = point.config, np.random.default_rng(int(point.signature, 16) % 2**32)
    if not config.optimiser.epochs or config.probe is not None:
        return {}
    step = np.arange(1, steps + 1)
    share = step / steps
    leak = config.encoder.bn == "split" and config.dictionary.kind != "bank"
    m = config.m if config.m is not None else 0.0
    speed = 3.0 + 4.0 * (m >= 0.99)
    excess = -4.5 * (1 - np.exp(-speed * share)) * (1.25 if leak else 1.0) + 1.2 * np.exp(-60 * share)
    excess += (0.6 if m == 0 else 0.1) * noise.standard_normal(steps)
    accuracy = np.clip(
        (1 - np.exp(-speed * share)) * (0.99 if leak else 0.8) + 0.02 * noise.standard_normal(steps), 0, 1
    )
    found = {
        "train/excess_loss": (step, excess),
        "train/loss": (step, excess + math.log(config.K + 1)),
        "train/accuracy": (step, accuracy),
        "train/lr": (step, config.lr * 0.5 * (1 + np.cos(np.pi * share))),
    }
    reading = np.arange(every, steps + 1, every)
    reach = max(1, config.K // config.optimiser.batch)
    for age in sorted({round(reach ** (i / 4)) for i in range(5)}):
        drift = (1 - m) * age * {"bank": 6.0}.get(config.dictionary.kind, 1.0)
        cosine = np.exp(-0.25 * drift / (1 + 0.2 * drift)) - 0.01 + 0.003 * noise.standard_normal(len(reading))
        found[f"consistency/cosine_age_{age}"] = (reading, cosine)
    found["consistency/cosine_oldest"] = found[f"consistency/cosine_age_{reach}"]
    found["consistency/theta_distance"] = (reading, np.full(len(reading), 0.1 * m))
    count = config.optimiser.epochs // config.evaluation.every_epochs if config.evaluation.every_epochs else 1
    at = np.linspace(0, steps, count + 1)[1:].astype(np.int64)
    found["knn"] = (at, score(point)["knn"] - 0.1 * np.exp(-4 * at / steps) + 0.1 * math.exp(-4))
    return found


def write(
    out: Path,
    sweep: grid.Sweep,
    *,
    steps: int = 240,
    every: int = 20,
    keep: Callable[[Point], bool] = lambda point: True,
    change: Callable[[Point, dict[str, float]], dict[str, float]] = lambda point, final: final,
) -> None:
    """Write ``<sweep>-<scale>.runs.parquet`` and ``.metrics.parquet`` for the points that ``keep`` lets pass."""
    out.mkdir(parents=True, exist_ok=True)
    runs, rows = [], {"signature": [], "name": [], "step": [], "value": [], "time_ms": []}
    for point in sorted((point for point in sweep.points if keep(point)), key=lambda point: point.signature):
        epochs = point.config.optimiser.epochs if point.config.probe is None else 0
        final = change(point, score(point))
        runs.append(
            {
                "sweep": sweep.name,
                "scale": sweep.scale,
                "title": sweep.title,
                "axes": json.dumps(sweep.axes),
                "metric": sweep.metric,
                "signature": point.signature,
                "name": point.name,
                "labels": json.dumps(point.labels),
                "seed": point.seed,
                "floor": point.floor,
                "state": "finished",
                "attempt": 1,
                "steps": steps if epochs else 0,
                "train_seconds": 60.0 if epochs else 1.0,
                "threads": 1,
                "started_ms": START_MS,
                "ended_ms": START_MS + 60_000,
                "params": json.dumps(flatten(point.config.model_dump(mode="json"))),
                "tags": json.dumps(
                    {"commit": "0123456789abcdef", "dirty": "false", "torch": "2.14.1", "host": "node1"}
                ),
                "final": json.dumps(final),
            }
        )
        for name, (step, value) in sorted(histories(point, steps, every).items()):
            rows["signature"].append(np.full(len(step), point.signature))
            rows["name"].append(np.full(len(step), name))
            rows["step"].append(step)
            rows["value"].append(value)
            rows["time_ms"].append(START_MS + step * 100)
    pq.write_table(pa.Table.from_pylist(runs, schema=RUNS), out / f"{sweep.id}.runs.parquet")
    columns = {name: np.concatenate(parts) if parts else np.empty(0) for name, parts in rows.items()}
    pq.write_table(pa.table(columns).cast(METRICS), out / f"{sweep.id}.metrics.parquet")


_TEXT = ("sweep", "scale", "title", "axes", "metric", "signature", "name", "labels")
RUNS = pa.schema(
    [
        *((name, pa.string()) for name in _TEXT),
        ("seed", pa.int64()),
        ("floor", pa.string()),
        ("state", pa.string()),
        ("attempt", pa.int64()),
        ("steps", pa.int64()),
        ("train_seconds", pa.float64()),
        ("threads", pa.int64()),
        ("started_ms", pa.int64()),
        ("ended_ms", pa.int64()),
        ("params", pa.string()),
        ("tags", pa.string()),
        ("final", pa.string()),
    ]
)
METRICS = pa.schema(
    [
        ("signature", pa.string()),
        ("name", pa.string()),
        ("step", pa.int64()),
        ("value", pa.float64()),
        ("time_ms", pa.int64()),
    ]
)

STORED = ROOT / "tests" / "report"
"""A small sweep with its runs, and what the report made of them when a person looked at it."""


def store() -> None:
    """Make the stored runs: three seeds, of which m = 0.9 lacks one and m = 0.999 has one that diverged."""

    def change(point: Point, final: dict[str, float]) -> dict[str, float]:
        diverged = point.labels.get("m") == 0.999 and point.seed == 1
        return dict.fromkeys(final, math.nan) if diverged else final

    sweep = grid.load(STORED / "sweeps" / "momentum.yaml", "quick")
    write(
        STORED / "runs",
        sweep,
        steps=24,
        every=4,
        keep=lambda point: not (point.labels.get("m") == 0.9 and point.seed == 2),
        change=change,
    )


if __name__ == "__main__":
    store()
