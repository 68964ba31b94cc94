"""The golden runs: what each mechanism comes to in a few steps on images of scale smoke, kept with its NUMERICS.

`make golden` (this file as a program) writes them anew, once NUMERICS in study/config/schema.py has been raised.

The tolerance is for what kinds of CPU and numbers of threads do to one code. It was found on one machine by holding
torch, oneDNN, MKL and numba to SSE4, to AVX2 and to what it has (AVX-512), each with one and two threads. Sums differ
in their last bit from the first step on; once in a while that turns a ReLU over, which multiplies it. After 3 steps
the largest differences were 8e-5 of a loss, 4e-5 of a weight and 2 images of 10,000; after 4 they were twenty, eight
and thirty times as large. So a change that moves less than the tolerance in 3 steps is not seen here; T changed by 1
%, 1 − m by 10 %, SGD's momentum by 2 %, or another order in the queue are.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from study.config.reading import merge, resolve
from study.config.schema import NUMERICS
from study.run import checkpoint, journal
from study.sweep.grid import scale_overlay
from study.train.trainer import Runtime, train

FILE = Path(__file__).parents[1] / "train" / "golden.json"

STEPS = 3
SMALL = {
    "data": {"train_images": 32 * STEPS},
    "dictionary": {"K": 48},  # a queue evicts from the second step on, and the batch does not divide it
    "optimiser": {"batch": 32, "epochs": 1, "lr_rule": False, "weight_decay": 1e-2},
    "consistency": {"every_steps": 0},
}
MECHANISMS: dict[str, dict[str, Any]] = {
    "queue": {"m": 0.9},
    "bank": {"dictionary": {"kind": "bank"}, "encoder": {"bn": "split"}, "m": None},
    "in-batch": {"dictionary": {"kind": "in-batch", "K": None}, "m": None},
}
WEIGHTS = 4
"""Numbers that are kept of a tensor's first row, and of its last."""
TENSORS = ("f_q.backbone.conv1.weight", "f_q.head.0.weight", "f_k.head.0.weight", "dictionary.queue", "dictionary.bank")
TOLERANCE = {"loss": 1e-3, "weights": 2e-4, "final": 2e-3}
"""Absolute: losses are about 4, weights and keys up to 0.5, results are shares of 10,000 images."""

Values = dict[str, dict[str, list[float]]]
"""Kind → name → numbers."""


def made(mechanism: str, threads: int = 1) -> Values:
    """Train the mechanism's run, and take its numbers."""
    config = resolve(merge(merge(scale_overlay("smoke"), SMALL), MECHANISMS[mechanism]), f"golden {mechanism}")
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(config, Runtime(Path(folder), device="cpu", threads=threads))
        readings = journal.read(outcome.dir / "metrics.jsonl")
        found = checkpoint.latest(outcome.dir / "checkpoints", config.signature, warn=print)
    assert found is not None
    tensors = {name: found[1]["model"][name].flatten(1) for name in TENSORS if name in found[1]["model"]}
    return {
        "loss": {"train/loss": [reading.value for reading in readings if reading.name == "train/loss"]},
        "weights": {
            name: [*tensor[0, :WEIGHTS].tolist(), *tensor[-1, :WEIGHTS].tolist()] for name, tensor in tensors.items()
        },
        "final": {name: [value] for name, value in outcome.final.items()},
    }


def differences(kept: Values, found: Values) -> Iterator[str]:
    """Each number that is not what it was, beyond the tolerance."""
    for kind, tolerance in TOLERANCE.items():
        for name in kept[kind].keys() | found[kind].keys():
            before, now = kept[kind].get(name, []), found[kind].get(name, [])
            if len(before) != len(now):
                yield f"{name}: {len(now)} numbers, and was {len(before)}"
            for i, (old, new) in enumerate(zip(before, now, strict=False), 1):
                if not abs(new - old) <= tolerance:
                    yield f"{name}, number {i}: {new:.6g}, and was {old:.6g} (tolerance {tolerance:g})"


def kept() -> dict[str, Any]:
    """The file: ``numerics``, and ``runs`` by mechanism."""
    tree: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return tree


def renew() -> int:
    """Write the file for this NUMERICS; refused where numbers have changed and NUMERICS has not."""
    runs = {mechanism: made(mechanism) for mechanism in MECHANISMS}
    if FILE.exists():
        before = kept()
        changed = [f"{name}: {line}" for name in runs for line in differences(before["runs"].get(name, {}), runs[name])]
        if before["numerics"] >= NUMERICS:
            print(*changed, sep="\n")
            print(f"{FILE}: is of NUMERICS = {before['numerics']}", end="")
            print("; raise NUMERICS in study/config/schema.py first" if changed else ", and holds")
            return int(bool(changed))
    text = json.dumps({"numerics": NUMERICS, "runs": runs}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")
    print(f"{FILE}: written for NUMERICS = {NUMERICS}")
    return 0


if __name__ == "__main__":
    sys.exit(renew())
