"""The one trainer: Algorithm 1 of the paper, for each of the three dictionaries.

A run is a pure function of its config: every batch, view, shuffle and draw derives from (seed, purpose, step), so a run
that was killed at any moment and started again ends with the bits of one that never was (on one machine, with the same
number of threads). Everything a person or a program reads of it goes through its `RunRecord`; nothing in the loop waits
for a disk, a tracker or a plot.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from study import consistency
from study.config import Config
from study.data import images
from study.data.stream import Stream
from study.errors import UserError
from study.evaluate import evaluate
from study.model.moco import MoCo
from study.progress import Progress
from study.rng import generator
from study.run import record
from study.run.lock import RunLocked
from study.run.record import RunRecord

REQUEUE = 85
"""Exit code of a run that saved itself because its job is about to be taken away, and wants to be queued again."""

EXIT_CODE = {None: 0, "SIGINT": 130, "SIGTERM": 143, "SIGUSR2": REQUEUE}

READ_EVERY = 16
"""Steps whose losses are read from the device together, so that a GPU is not made to wait at each."""


@dataclass(frozen=True)
class Runtime:
    """What may change between two attempts at one run; its bits stay the same on one machine with as many threads."""

    runs_dir: Path
    device: str = "auto"
    threads: int | None = None
    compile: bool = False
    checkpoint_every: float = 60.0
    """Seconds between two checkpoints."""
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    signature: str
    dir: Path
    final: dict[str, float]
    exit_code: int


class Stopped(Exception):  # noqa: N818 - no error, like StopIteration
    """A signal asked the run to end; what is worth keeping has been saved."""


def train(config: Config, runtime: Runtime) -> Outcome:
    """Train the run that ``config`` defines, or continue it; a finished one is left as it is.

    Raises:
        UserError: the images are absent, do not fit the config, or the device is not there.
    """
    device = pick_device(runtime.device)
    configure_torch(device, runtime.threads)
    signature, folder = config.signature, runtime.runs_dir / config.signature
    try:
        with record.start(runtime.runs_dir, config, command=list(runtime.command)) as run:
            if not run.finished:
                try:
                    if config.probe is None:
                        final = pretrain(run, config, device, runtime)
                    else:
                        from study.probe import train_probe

                        final = train_probe(run, config, runtime.runs_dir, device)
                    if not run.stop:
                        run.finish(final)
                except Stopped:
                    pass
            return Outcome(signature, folder, dict(run.final or {}), EXIT_CODE[run.stop])
    except RunLocked as locked:
        print(f"study: {locked}", file=sys.stderr)
        return Outcome(signature, folder, {}, 0)


def pretrain(run: RunRecord, config: Config, device: torch.device, runtime: Runtime) -> dict[str, float]:
    """Section 3.2: learn f_q by comparing each query with its key and with the dictionary's.

    Returns:
        The final metrics.

    Raises:
        Stopped: a signal arrived; the state is saved at the boundary of a step.
    """
    dataset = images.load(config.data.name)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    stream = Stream(dataset, config, device, dtype)
    model = MoCo(config, stream.n).to(device, memory_format=torch.channels_last)
    optimiser = (
        torch.optim.SGD(
            model.f_q.parameters(),
            lr=config.lr,
            momentum=config.optimiser.momentum,
            weight_decay=config.optimiser.weight_decay,
            foreach=True,
        )
        if config.optimiser.epochs
        else None
    )
    if runtime.compile:
        model.f_q.compile()
        if model.f_k is not None and model.f_k is not model.f_q:
            model.f_k.compile()
    autocast = autocaster(config, device)

    first = 0
    if (saved := run.latest()) is not None:
        first, state = saved
        model.load_state_dict(state["model"])
        if optimiser is not None:
            optimiser.load_state_dict(state["optimiser"])

    def save(step: int) -> None:
        run.save(
            step, {"model": model.state_dict(), "optimiser": optimiser.state_dict() if optimiser is not None else {}}
        )

    loss_floor = math.log(config.K + 1)  # the loss of a collapsed encoder: every logit ties
    unread: list[tuple[int, float, Tensor]] = []

    def read() -> bool:
        """Journal the steps that the device has finished; False when the loss is no longer a number."""
        for (step, lr, _), (loss, accuracy) in zip(
            unread, torch.stack([t for _, _, t in unread]).tolist() if unread else [], strict=True
        ):
            run.log(
                step,
                {
                    "train/loss": loss,
                    "train/excess_loss": loss - loss_floor,
                    "train/accuracy": accuracy,
                    "train/lr": lr,
                },
            )
            if not math.isfinite(loss):
                unread.clear()
                return False
        unread.clear()
        return True

    def knn_now(step: int) -> None:
        with Progress(run, "evaluate", step, stream.steps) as bar:
            run.log(step, evaluate(model.f_q, dataset, config, device, linear=False, progress=guard(run, bar.tick)))

    micro = config.optimiser.accumulate
    saved_at = time.monotonic()
    every = config.evaluation.every_epochs * stream.steps_per_epoch
    with Progress(run, "train", first, stream.steps, config.optimiser.batch) as bar:
        for step, batch in enumerate(stream.batches(first, stream.steps, prefetch=device.type == "cuda"), first):
            assert optimiser is not None
            lr = lr_at(config, step, stream.steps_per_epoch)
            for group in optimiser.param_groups:
                group["lr"] = lr

            model.update_key_encoder()  # θ_k ← m·θ_k + (1−m)·θ_q, before this step's keys are encoded
            keys, losses = [], []
            for i, (x_q, x_k, index) in enumerate(split(batch.x_q, batch.x_k, batch.index, micro)):
                with autocast():
                    out = model(x_q, x_k, index, generator(config.seed, "step", step * micro + i, device))
                (out.loss / micro).backward()
                keys.append(out.keys)
                losses.append(torch.stack((out.loss.detach(), out.accuracy)))
            optimiser.step()
            optimiser.zero_grad(set_to_none=False)
            model.store(torch.cat(keys) if micro > 1 else keys[0], batch.index, step)

            done = step + 1
            unread.append((done, lr, torch.stack(losses).mean(0) if micro > 1 else losses[0]))
            if config.consistency.every_steps and done % config.consistency.every_steps == 0:
                run.log(done, consistency.read(model, stream, done, config, autocast))
            if (len(unread) >= READ_EVERY or done == stream.steps) and not read():
                print(
                    f"study: the loss is not finite at step {done}: the run has diverged and ends here", file=sys.stderr
                )
                return {"knn": math.nan, "knn_output": math.nan, "train/loss": math.nan}
            bar.update(done)
            if every and done % every == 0 and done < stream.steps:
                read()
                knn_now(done)
            if run.stop or done == stream.steps or time.monotonic() - saved_at > runtime.checkpoint_every:
                read()
                save(done)
                saved_at = time.monotonic()
            if run.stop:
                raise Stopped
    if not stream.steps:
        save(0)
    with Progress(run, "evaluate", stream.steps, stream.steps) as bar:
        linear = config.evaluation.linear_epochs > 0
        final = evaluate(model.f_q, dataset, config, device, linear=linear, progress=guard(run, bar.tick))
    run.log(stream.steps, final)
    return final


def lr_at(config: Config, step: int, steps_per_epoch: int) -> float:
    """The learning rate of step 0, 1, …: ×0.1 at each milestone, or half a cosine to zero (v2 report), no warm-up."""
    optimiser = config.optimiser
    if optimiser.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * step / (optimiser.epochs * steps_per_epoch)))
    epoch = step // steps_per_epoch
    return config.lr * 0.1 ** sum(epoch >= share * optimiser.epochs for share in optimiser.milestones)


def split(x_q: Tensor, x_k: Tensor, index: Tensor, parts: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The micro-batches of a step."""
    return zip(x_q.chunk(parts), x_k.chunk(parts), index.chunk(parts), strict=True)


def guard(run: RunRecord, tick: Callable[[float], None]) -> Callable[[float], None]:
    """A progress callback that also ends the work when a signal has arrived: an evaluation can be repeated."""

    def report(share: float) -> None:
        if run.stop:
            raise Stopped
        tick(share)

    return report


def autocaster(config: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The encoder's precision as a context to enter."""
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU when there is one.

    Raises:
        UserError: no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"command line: --device = {name}: allowed is auto, cpu, cuda or cuda:N") from None
    if device.type not in {"cpu", "cuda"} or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        raise UserError(f"command line: --device = {name}: not on this machine; allowed is auto, cpu, cuda or cuda:N")
    return device


def configure_torch(device: torch.device, threads: int | None) -> None:
    """Settings of the process: threads, and the same bits from the same work."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
