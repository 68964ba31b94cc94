"""A run on disk: the one thing that a trainer talks to.

    with record.start(runs_dir, config, command=sys.argv) as run:
        step, state = run.latest() or (0, None)
        ...
        run.log(step, {"train/loss": loss})
        run.save(step, state)
        run.finish({"knn": 0.77})

The folder ``<runs_dir>/<signature>/`` holds config.yaml, metrics.jsonl, status.json, provenance.json, checkpoints,
the lock and the log. Three threads write it (journal, checkpoint, heartbeat), so the training thread never waits for
the disk; what they meet is raised by the next call.
"""

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from study.config.schema import Config
from study.run import attempts, files, provenance
from study.run import status as statuses
from study.run.journal import Journal
from study.run.lock import Lock, RunLocked, RunRemoved
from study.run.signals import StopRequest
from study.run.status import Status

if TYPE_CHECKING:
    from study.run.checkpoint import State


@contextmanager
def start(
    runs_dir: Path, config: Config, *, command: Sequence[str], images: str | None = None
) -> Iterator["RunRecord"]:
    """Open the run of ``config``, continuing it if it was begun.

    A finished run is only read: ``finished`` is true and nothing changes. Otherwise the run is this process's until
    the context is left: finished if ``finish`` was called, failed (with traceback.txt) on an exception, scheduled
    after USR2, killed if it was left for any other reason.

    Args:
        runs_dir: where runs lie.
        config: names the run by its signature.
        command: what was typed, for the provenance.
        images: digest of the data set, for the provenance.

    Raises:
        RunLocked: a live process holds it, or (from any later call) took it over while this one was suspended.
        StorageError: the folder cannot be written, now or (from any later call) later.
        UserError: the folder holds another run, or a damaged config.
    """
    folder = runs_dir / config.signature
    seconds = statuses.heartbeat_seconds()
    if done := _finished(folder):
        yield RunRecord(folder, done)
        return
    with files.storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files.sync_folder(runs_dir)
    lock = Lock(folder)
    try:
        if done := _finished(folder):  # by the process that held the lock until now
            yield RunRecord(folder, done)
            return
        with StopRequest() as stop:
            attempts.settle(folder, config)
            run = RunRecord(folder, attempts.begin(folder, config, command, images), stop)
            run._writers = _Writers(run, lock, seconds)
            try:
                yield run
            except BaseException as error:
                run._leave(error)
                raise
            run._leave(None)
    finally:
        lock.release()


class RunRecord:
    """One attempt at a run.

    Attributes:
        dir: the run's folder.
        finished: it was finished before, or has been now.
        final: what ``finish`` was given.
        attempt: 1 at first, one more each time that the run is taken up again.
    """

    def __init__(self, folder: Path, status: Status, stop: StopRequest | None = None) -> None:
        self.dir = folder
        self._status = status
        self._stop = stop
        self._writers: _Writers | None = None
        self._training_since: float | None = None

    @property
    def finished(self) -> bool:
        return self._status.state == "finished"

    @property
    def final(self) -> dict[str, float]:
        return dict(self._status.final)

    @property
    def diverged(self) -> int | None:
        """The step at which it diverged, of a finished run that has no numbers for results."""
        return self._status.diverged if self.finished else None

    @property
    def attempt(self) -> int:
        return self._status.attempt

    @property
    def stop(self) -> str | None:
        """Name of the signal that asked this process to stop, such as ``"SIGTERM"``; it stops between two steps."""
        return self._stop.name if self._stop else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note metrics; returns at once. What an earlier attempt noted with the same value is not repeated.

        Args:
            step: optimiser steps done when they were measured.
            metrics: plain numbers; what is not finite is kept as NaN.
        """
        self._writing.journal.log(step, metrics)
        if self._status.diverged is None and not all(map(math.isfinite, metrics.values())):
            self._status.diverged = step

    def latest(self) -> tuple[int, "State"] | None:
        """Step and state (on the CPU) of the newest whole checkpoint, None without one; a damaged one is noted."""
        writers = self._writing
        found = writers.checkpoints.latest()
        if found is not None:
            self._status.step = writers.journal.first = found[0]
        return found

    def save(self, step: int, state: "State") -> None:
        """Keep the state after ``step`` optimiser steps.

        The tensors are cloned now. Later, on a thread of its own, the journal is synced, then the file is written and
        verified, then the last but one goes.

        Args:
            step: optimiser steps done.
            state: nested dictionaries and lists of tensors and plain values.
        """
        self._writing.checkpoints.save(step, state)

    def progress(
        self,
        *,
        phase: str | None = None,
        step: int | None = None,
        steps: int | None = None,
        images_per_s: float | None = None,
        threads: int | None = None,
    ) -> None:
        """Tell the heartbeat how far the run is; None leaves a value as it was.

        Args:
            phase: ``"train"``, ``"evaluate"`` or ``"probe"``; time in ``"train"`` adds up to ``train_seconds``.
            step: optimiser steps done.
            steps: of how many.
            images_per_s: the speed of late.
            threads: that torch computes with.
        """
        writers, status = self._writing, self._status
        if phase is not None and phase != status.phase:
            status.train_seconds = self._train_seconds()
            self._training_since = time.monotonic() if phase == "train" else None
            status.phase = phase
        if step is not None:
            status.step = step
        if steps is not None:
            status.steps = steps
        if images_per_s is not None:
            status.images_per_s = images_per_s
        if threads is not None:
            status.threads = threads
        writers.checkpoints.check()

    def note(self, line: str) -> None:
        """Say something to who watches, and keep it in log.txt."""
        with suppress(OSError):
            print(f"{self.dir.name}: {line}", file=sys.stderr, flush=True)
        with suppress(OSError), (self.dir / "log.txt").open("a", encoding="utf-8") as file:
            if os.path.samestat(os.fstat(file.fileno()), os.fstat(2)):
                return  # the launcher already keeps there what is printed
            file.write(f"{time.strftime('%F %T')} attempt {self.attempt}: {line}\n")

    def finish(self, final: Mapping[str, float]) -> None:
        """The run is complete: all is synced, then the status says finished.

        Args:
            final: its results under stable names; one that is not finite says that the run has diverged, at the first
                step that was logged with such a reading, or else at the step where it stands.
        """
        writers = self._writing
        writers.checkpoints.drain()
        writers.journal.flush()
        status = self._status
        status.final = {name: float(value) for name, value in final.items()}
        if all(map(math.isfinite, status.final.values())):
            status.diverged = None
        elif status.diverged is None:
            status.diverged = status.step
        self._end("finished", None)

    @property
    def _writing(self) -> "_Writers":
        if self._writers is None:
            raise RuntimeError(f"{self.dir}: a finished run is only read")
        if self._writers.lost is not None:
            raise self._writers.lost
        return self._writers

    def _train_seconds(self) -> float:
        since = self._training_since
        return self._status.train_seconds + (0.0 if since is None else time.monotonic() - since)

    def _write_status(self, *, durable: bool) -> None:
        now = replace(self._status, heartbeat=time.time(), train_seconds=self._train_seconds())
        statuses.write(self.dir, now, durable=durable)

    def _leave(self, error: BaseException | None) -> None:
        assert self._writers is not None
        trouble = self._writers.close()
        if self._writers.lost is not None:  # the folder is another process's now, or gone
            if error is None:
                raise self._writers.lost
            return
        if not self.finished:
            cause = error if error is not None else trouble
            if cause is None or isinstance(cause, KeyboardInterrupt | SystemExit | GeneratorExit):
                self._end("scheduled" if self.stop == "SIGUSR2" else "killed", None)
            else:
                with suppress(files.StorageError):  # a full disk: the exception under way says so
                    files.write_atomic(self.dir / "traceback.txt", "".join(traceback.format_exception(cause)))
                    self._end("failed", "".join(traceback.format_exception_only(cause)).strip().splitlines()[-1])
        if error is None and trouble is not None:
            raise trouble

    def _end(self, state: str, error: str | None) -> None:
        assert self._writers is not None
        self._writers.stop_heart()
        self._status.train_seconds, self._training_since = self._train_seconds(), None
        self._status.error = error
        self._status.ended = max(time.time(), self._status.started)  # the clock may have been set back meanwhile
        origin = provenance.read(self.dir)
        provenance.write(self.dir, {**origin, "attempts": attempts.closed(origin, state, self._status.ended)})
        self._status.state = state
        self._write_status(durable=True)


class _Writers:
    """The threads that write a run's folder."""

    def __init__(self, run: RunRecord, lock: Lock, heartbeat_s: float) -> None:
        from study.run.checkpoint import Checkpoints

        self.run, self.lock = run, lock
        self.lost: RunLocked | RunRemoved | None = None
        self.journal = Journal(run.dir / "metrics.jsonl")
        signature = run.dir.name
        self.checkpoints = Checkpoints(run.dir / "checkpoints", signature, run.note, self._before_checkpoint)
        self._left = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(heartbeat_s,), name="heartbeat", daemon=True)
        self._heart.start()

    def stop_heart(self) -> None:
        self._left.set()
        self._heart.join()

    def close(self) -> Exception | None:
        """Write what waits and stop all threads; the first trouble, if any."""
        self.stop_heart()
        trouble: Exception | None = None
        for writer in (self.checkpoints, self.journal):
            try:
                writer.close()
            except Exception as error:
                trouble = trouble or error
        return trouble

    def _before_checkpoint(self) -> None:
        self.journal.flush()
        self.lock.beat()

    def _beat(self, seconds: float) -> None:
        while not self._left.wait(seconds):
            try:
                self.lock.beat()
                self.run._write_status(durable=False)
            except (RunLocked, RunRemoved) as lost:
                self.lost = lost
                return
            except (OSError, files.StorageError):  # passing trouble of a file system must not end a run: if it
                continue  # stays, journal and checkpoint meet it too


def _finished(folder: Path) -> Status | None:
    status = statuses.read(folder)
    return status if status is not None and status.state == "finished" else None
