"""The trainer against its encoder, and the cost of what a run writes and of its evaluation."""

import contextlib
import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from study.bench import sides
from study.bench.measure import Bench, take_turns, timed
from study.bench.sides import RESNET18, TINY, Steps, config_of
from study.config.schema import Config
from study.data import images
from study.model import encoder
from study.run import record
from study.sweep import grid
from study.train import consistency
from study.train.device import configure_torch
from study.train.evaluate import encode, evaluate, frozen
from study.train.trainer import READ_EVERY

RUNS = "runs"
STEPS, SHORT_TURNS = 4, 4
"""Steps of a turn of the tiny ResNet, half a second, and by how much more turns than repeats: what disturbs one of many
short turns does not move their median."""
CHECKPOINT_S = 60.0
"""Seconds between checkpoints, the trainer's default."""
SCALES = ("quick", "cpu")
"""Each says how many steps lie between two readings of consistency."""
LINES = 2000
"""Steps that are journalled to time it."""


def trainer(bench: Bench) -> None:
    """Images/s of the trainer ÷ encoder alone; one thread on a CPU."""
    configure_torch(bench.device, 1)
    usual = "bf16" if bench.device.type == "cuda" else "fp32"
    other = "fp32" if usual == "bf16" else "bf16"
    tiny, large = config_of(TINY, precision=usual), config_of(TINY, precision=usual, dictionary__K=65536)
    often = SHORT_TURNS * bench.repeats
    seconds = _against_encoder(bench, "trainer ÷ encoder, tiny ResNet", tiny, STEPS, often, 0.90)
    bench.add("trainer, tiny ResNet", STEPS * 256 / seconds["trainer"], "images/s")
    bench.add("encoder alone, tiny ResNet", STEPS * 256 / seconds["alone"], "images/s")
    other_tiny = config_of(TINY, precision=other)
    _against_encoder(bench, f"trainer ÷ encoder, tiny ResNet, {other}", other_tiny, STEPS, often, None)
    resnet18 = config_of(RESNET18, precision=usual)
    _against_encoder(bench, "trainer ÷ encoder, ResNet-18 with CIFAR's stem", resnet18, 1, bench.repeats, 0.97)
    name = "trainer ÷ (encoder + 2 products), tiny ResNet, K 65536"
    _against_encoder(bench, name, large, STEPS, often, 0.75, sides.products(large, bench.device))


def _against_encoder(
    bench: Bench, name: str, config: Config, steps: int, turns: int, goal: float | None, also: Steps | None = None
) -> dict[str, Any]:
    alone = sides.encoder_alone(config, bench.device)

    def reference() -> None:
        alone(steps)
        if also is not None:
            also(steps)

    with sides.trainer(config, bench.folder / RUNS, bench.device) as (take, _):
        seconds = take_turns({"trainer": timed(lambda: take(steps)), "alone": timed(reference)}, turns)
    bench.add(name, seconds["alone"] / seconds["trainer"], "", at_least=goal)
    return seconds


def overhead(bench: Bench) -> None:
    """What diagnostics, journal and checkpoints add to a step, each timed by itself: 2 % is below what the difference
    of two runs would show."""
    configure_torch(bench.device, 1)
    config = config_of(TINY, consistency__every_steps=0)
    with sides.trainer(config, bench.folder / RUNS, bench.device) as (take, run):
        take(READ_EVERY)

        def read() -> None:
            consistency.read(run.model, run.stream, READ_EVERY, config, run.autocast)

        journal, checkpoint = _journal(bench, config), _checkpoint(bench, run.model.state_dict())
        seconds = take_turns(
            {
                "step": timed(lambda: take(READ_EVERY)),
                "consistency": timed(read, bench.device),
                "journal": journal,
                "checkpoint": checkpoint,
            },
            bench.repeats,
        )
    step = seconds["step"] / READ_EVERY
    for scale in SCALES:
        parts = {
            "consistency": seconds["consistency"] / grid.scale_overlay(scale)["consistency"]["every_steps"] / step,
            "journal": seconds["journal"] / LINES / step,
            "checkpoints": seconds["checkpoint"] / CHECKPOINT_S,
        }
        bench.add(
            f"diagnostics, journal and checkpoints ÷ step, scale {scale}",
            100 * np.sum(list(parts.values()), 0),
            "%",
            at_most=2.0,
            note=", ".join(f"{name} {100 * np.median(part):.2f} %" for name, part in parts.items()),
        )


def _journal(bench: Bench, config: Config) -> Callable[[], float]:
    """Seconds of so many journalled steps, the writing thread's and the disk's included."""
    attempt = iter(range(10**9))

    def side() -> float:
        other = config.model_copy(update={"seed": 1 + next(attempt)})
        with record.start(bench.folder / RUNS, other, command=["study", "bench"]) as run:
            began = time.perf_counter()
            for step in range(LINES):
                loss = 8.0 + step / LINES
                run.progress(step=step, steps=LINES, images_per_s=1.0)
                run.log(
                    step,
                    {"train/loss": loss, "train/excess_loss": loss - 8.3, "train/accuracy": 0.5, "train/lr": 0.03},
                )
            run.finish({})
            return time.perf_counter() - began

    return side


def _checkpoint(bench: Bench, state: dict[str, torch.Tensor]) -> Callable[[], float]:
    """Seconds of one checkpoint, from the clone to the verified file."""
    attempt = iter(range(10**9))

    def side() -> float:
        config = config_of(TINY, seed=10**6 + next(attempt))
        with record.start(bench.folder / RUNS, config, command=["study", "bench"]) as run:
            began = time.perf_counter()
            run.save(1, {"model": state})
            run.finish({})
            return time.perf_counter() - began

    return side


def evaluation(bench: Bench) -> None:
    """kNN on features and on outputs and the fast linear probe, the encoding included, ÷ the encoding."""
    configure_torch(bench.device, 1)
    config = config_of(TINY)
    data = images.load(config.data.name)
    f_q = encoder.build(config.encoder, config.data.size).to(bench.device)

    def forward() -> None:
        with frozen(f_q):
            for split in (data.train, data.test):
                encode(f_q, data, split, images.subset(split.labels, None), config, bench.device)

    def whole() -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            evaluate(f_q, data, config, bench.device, linear=True)

    seconds = take_turns({"whole": timed(whole, bench.device), "forward": timed(forward, bench.device)}, bench.repeats)
    bench.add(
        "evaluation ÷ one forward pass, 50,000 / 10,000 images",
        seconds["whole"] / seconds["forward"],
        "",
        at_most=1.5,
        note="kNN twice (features, outputs) and the linear probe (≤ 100 passes), with the forward pass that they need",
    )
