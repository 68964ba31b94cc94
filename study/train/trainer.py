"""The one trainer: Algorithm 1 of the paper, for each of the three dictionaries.

A run is a pure function of its config: every batch, view, shuffle and draw derives from (seed, purpose, step), so a run
that was killed at any moment and started again ends with the bits of one that never was (on one machine, with the same
number of threads). Everything a person or a program reads of it goes through its `RunRecord`; nothing in the loop waits
for a disk, a tracker or a plot.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from study.config import schema
from study.config.schema import Config
from study.data import images
from study.data.stream import Batch, Stream
from study.errors import UserError
from study.model.moco import MoCo
from study.rng import generator
from study.run import numerics, provenance, record, status
from study.run.lock import RunLocked
from study.run.record import RunRecord
from study.train import consistency, probe
from study.train.device import autocaster, configure_torch, pick_device
from study.train.evaluate import evaluate
from study.train.progress import Progress

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
    state: str = field(default="", compare=False)
    """What became of it, in a word or two; empty when another process holds the run."""
    diverged: int | None = None
    """The step at which it diverged."""


Work = Callable[[RunRecord], dict[str, float]]
"""The whole of a run, or what is left of it; gives the final metrics."""


class Stopped(Exception):  # noqa: N818 - no error, like StopIteration
    """A signal asked the run to end; what is worth keeping has been saved."""


def train(config: Config, runtime: Runtime) -> Outcome:
    """Train the run that ``config`` defines, or continue it; a finished one is left as it is.

    Raises:
        UserError: the images are absent, do not fit the config, or the device is not there.
    """
    device = pick_device(runtime.device)
    signature, folder = config.signature, runtime.runs_dir / config.signature
    before = status.read(folder)
    begun_with = before.threads if before else None
    configure_torch(device, runtime.threads or begun_with)  # another number of threads gives other bits
    digest, work = prepare(config, folder, device, runtime)
    try:
        with record.start(runtime.runs_dir, config, command=list(runtime.command), images=digest) as run:
            if run.finished or work is None:
                return Outcome(signature, folder, dict(run.final), 0, "finished already", run.diverged)
            threads = torch.get_num_threads()
            run.progress(threads=threads)
            if begun_with not in (None, threads):
                run.note(f"begun with {begun_with} threads and continued with {threads}: other bits than unbroken")
            if before is not None and before.numerics != [schema.NUMERICS]:
                earlier = numerics.text(before.numerics)
                run.note(f"begun by numerics {earlier} and continued by {schema.NUMERICS}: other bits than unbroken")
            with suppress(Stopped):
                final = work(run)
                if not run.stop:
                    run.finish(final)
            state = "finished" if run.finished else "saved, to be continued"
            return Outcome(signature, folder, dict(run.final), EXIT_CODE[run.stop], state, run.diverged)
    except RunLocked as locked:
        print(f"study: {locked}", file=sys.stderr)
        return Outcome(signature, folder, {}, 0)


def prepare(config: Config, folder: Path, device: torch.device, runtime: Runtime) -> tuple[str | None, Work | None]:
    """Open what the run reads, once, and before anything is made in its ``folder``.

    Returns:
        The images' digest (None of a finished run whose images have gone), and what is to be done with them (None of
        a finished run).

    Raises:
        UserError: the images are absent, do not fit the config, or are not those that the run began with; a probe's
            pre-training is not finished.
    """
    finished = status.effective(folder) == "finished"
    try:
        dataset = images.load(config.data.name)
    except UserError:
        if finished:
            return None, None
        raise
    began_with = provenance.read(folder).get("images")
    if began_with not in (None, dataset.digest):
        raise UserError(
            f"data.name = {config.data.name}: its images are {dataset.digest}, and {folder} began with {began_with};"
            " allowed is another name for other images, or to remove that folder"
        )
    if finished:
        return dataset.digest, None
    if config.probe is not None:
        f_q = probe.pretrained(config.pretraining, folder.parent, device)
        return dataset.digest, lambda run: probe.train_probe(run, config, dataset, f_q, device)
    stream = Stream(dataset, config, device)
    return dataset.digest, lambda run: pretrain(run, config, stream, device, runtime)


def pretrain(
    run: RunRecord, config: Config, stream: Stream, device: torch.device, runtime: Runtime
) -> dict[str, float]:
    """Section 3.2: learn f_q by comparing each query with its key and with the dictionary's.

    Returns:
        The final metrics.

    Raises:
        Stopped: a signal arrived; the state is saved at the boundary of a step.
    """
    pretraining = Pretraining(run, config, stream, device, runtime)
    for _ in pretraining.steps():
        pass
    return pretraining.final()


class Pretraining:
    """One run in memory: begun, or taken up where its newest checkpoint is.

    Attributes:
        stream: the batches.
        model: both encoders and the dictionary.
        diverged: the step whose loss was the first that is not finite, so no step follows; else None.
    """

    def __init__(self, run: RunRecord, config: Config, stream: Stream, device: torch.device, runtime: Runtime) -> None:
        self.run, self.config, self.stream, self.device, self.runtime = run, config, stream, device, runtime
        self.model = MoCo(config, self.stream.n).to(device)
        self.optimiser = (
            torch.optim.SGD(
                self.model.f_q.parameters(),
                lr=config.lr,
                momentum=config.optimiser.momentum,
                weight_decay=config.optimiser.weight_decay,
                fused=True,
            )
            if config.optimiser.epochs
            else None
        )
        if runtime.compile:
            self.model.f_q.compile()
            if self.model.f_k is not None and self.model.f_k is not self.model.f_q:
                self.model.f_k.compile()
        self.autocast = autocaster(config, device)
        self.diverged: int | None = None
        self._unread: list[tuple[int, float, Tensor]] = []  # step, lr, (loss, accuracy) on the device
        self._first = 0
        if (saved := run.latest()) is not None:
            self._first, state = saved
            self.model.load_state_dict(state["model"])
            if self.optimiser is not None:
                self.optimiser.load_state_dict(state["optimiser"])

    def steps(self) -> Iterator[int]:
        """Take the steps that are left, with all that belongs to them; yields how many are done, after each.

        Raises:
            Stopped: a signal arrived; the state is saved.
        """
        config, stream = self.config, self.stream
        every = config.evaluation.every_epochs * stream.steps_per_epoch
        saved_at = time.monotonic()
        with Progress(self.run, "train", self._first, stream.steps, config.optimiser.batch) as bar:
            batches = stream.batches(self._first, stream.steps, prefetch=self.device.type == "cuda")
            for done, batch in enumerate(batches, self._first + 1):
                self._step(done - 1, batch)
                due = config.consistency.every_steps and done % config.consistency.every_steps == 0
                if due or len(self._unread) >= READ_EVERY or done == stream.steps:
                    self._read()
                if self.diverged is not None:
                    self.run.progress(step=self.diverged)
                    self.run.note(f"the loss is not finite at step {self.diverged}: the run has diverged and ends here")
                    return
                if due:
                    self.run.log(done, consistency.read(self.model, stream, done, config, self.autocast))
                bar.update(done)
                if every and done % every == 0 and done < stream.steps:
                    self._read()
                    self.run.log(done, self._evaluate(done, linear=False))
                if self.run.stop or done == stream.steps or time.monotonic() - saved_at > self.runtime.checkpoint_every:
                    self._read()
                    self._save(done)
                    saved_at = time.monotonic()
                if self.run.stop:
                    raise Stopped
                yield done
        if not stream.steps:
            self._save(0)

    def final(self) -> dict[str, float]:
        """The final metrics, journalled too; NaN of a run that diverged.

        Raises:
            Stopped: a signal arrived.
        """
        if self.diverged is not None:
            return {"knn": math.nan, "knn_output": math.nan, "train/loss": math.nan}
        found = self._evaluate(self.stream.steps, linear=self.config.evaluation.linear_epochs > 0)
        self.run.log(self.stream.steps, found)
        return found

    def _step(self, step: int, batch: Batch) -> None:
        """Algorithm 1, once."""
        config, model, optimiser = self.config, self.model, self.optimiser
        assert optimiser is not None
        micro = config.optimiser.accumulate
        lr = lr_at(config, step, self.stream.steps_per_epoch)
        for group in optimiser.param_groups:
            group["lr"] = lr

        model.update_key_encoder()  # θ_k ← m·θ_k + (1−m)·θ_q, before this step's keys are encoded
        keys, losses = [], []
        for i, (x_q, x_k, index) in enumerate(split(batch.x_q, batch.x_k, batch.index, micro)):
            with self.autocast():
                out = model(x_q, x_k, index, generator(config.seed, "step", step * micro + i, self.device))
            (out.loss / micro).backward()
            keys.append(out.keys)
            losses.append(torch.stack((out.loss.detach(), out.accuracy)))
        optimiser.step()
        optimiser.zero_grad()
        model.store(torch.cat(keys) if micro > 1 else keys[0], batch.index, step)
        self._unread.append((step + 1, lr, torch.stack(losses).mean(0) if micro > 1 else losses[0]))

    def _read(self) -> None:
        """Journal the steps that the device has finished, up to one whose loss is no longer a number."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        loss_floor = math.log(self.config.K + 1)  # the loss of a collapsed encoder: every logit ties
        for (step, lr, _), (loss, accuracy) in zip(
            unread, torch.stack([read for _, _, read in unread]).tolist(), strict=True
        ):
            self.run.log(
                step,
                {
                    "train/loss": loss,
                    "train/excess_loss": loss - loss_floor,
                    "train/accuracy": accuracy,
                    "train/lr": lr,
                },
            )
            if not math.isfinite(loss):
                self.diverged = step
                return

    def _save(self, step: int) -> None:
        optimiser = self.optimiser.state_dict() if self.optimiser is not None else {}
        self.run.save(step, {"model": self.model.state_dict(), "optimiser": optimiser})

    def _evaluate(self, step: int, *, linear: bool) -> dict[str, float]:
        with Progress(self.run, "evaluate", step, self.stream.steps) as bar:
            return evaluate(
                self.model.f_q,
                self.stream.images,
                self.config,
                self.device,
                linear=linear,
                progress=guard(self.run, bar.tick),
            )


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
