"""The local launcher: a pool of processes that train the missing points of a sweep, a few at a time.

Each point is a ``study train`` of its own, in a session of its own, with its threads set, and writes to the log of its
run. What a point is doing is read from its ``status.json``; a run's lock keeps two launchers from training one point.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import yaml

from study.config.reading import read_yaml, resolve
from study.errors import UserError
from study.launch import plan as plans
from study.launch.plan import Plan
from study.run import files
from study.run.status import Status
from study.sweep.grid import Point

TRAINER = (sys.executable, "-m", "study", "train")
CHILD = Path(__file__).with_name("child.py")
TICK_S = 0.1
FOLLOW_S = 1.0
"""Seconds between two looks at points that run elsewhere."""
STOPPED = {-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGINT, 85}
"""Exit codes of a trainer that was asked to stop; 85 is its wish to be queued again."""
DONE, GONE = "done", ("failed", "blocked", "stopped")
TAKES = 3
"""Times that a point is tried which another process holds although nothing is seen to run."""


@dataclass(frozen=True)
class Options:
    """How a pool works."""

    workers: int
    threads: int = 1
    wait: bool = False
    """Stay until the points that other processes run are done too, and take over those that stop."""
    gpus: tuple[str, ...] = ()
    """Worker i sees GPU i (modulo their number) alone; none: every worker sees what there is."""
    trainer: Sequence[str] = TRAINER


@dataclass
class Child:
    """A point that this pool runs."""

    point: Point
    process: subprocess.Popen[bytes]
    slot: int
    since: float


@dataclass(frozen=True)
class End:
    """How a point of the pool ended: done, failed, stopped, blocked, elsewhere, or waiting."""

    point: Point
    state: str
    detail: str = ""
    diverged: bool = False

    @property
    def shown(self) -> str:
        """`state` as it is shown and counted: ``diverged`` apart from ``done``."""
        return "diverged" if self.diverged else self.state


class Show(Protocol):
    """Who tells the user."""

    def started(self, point: Point) -> None: ...
    def ended(self, end: End, seconds: float) -> None: ...
    def tick(self, pool: "Pool") -> None: ...
    def say(self, line: str) -> None: ...


class Pool:
    """Runs the points that a plan leaves to do.

    Args:
        plan: the sweep as it stands; its record is written already.
        runs_dir: where the runs are.
        options: how many at once, with how many threads.
        show: told of every start and end, and several times a second.
    """

    def __init__(self, plan: Plan, runs_dir: Path, options: Options, show: Show) -> None:
        self.runs_dir, self.options, self.show = runs_dir, options, show
        self.state = {row.point.signature: row.state for row in plan.rows}
        self.waiting = [row.point for row in plan.to_run]
        self.elsewhere = [row.point for row in plan.rows if row.state == "running"]
        self.children: list[Child] = []
        self.ends: dict[str, End] = {}
        self.total = len(self.waiting) + len(self.elsewhere)
        self.costs = {row.point.signature: row.cost for row in plan.rows}
        self._seen = {point.signature for point in self.elsewhere}
        self._takes: dict[str, int] = {}
        self._signals: list[int] = []
        self._told = 0
        self._looked = 0.0
        for point in self.waiting:
            self.state[point.signature] = "missing"

    def run(self) -> int:
        """Train what can be trained.

        Returns:
            0: every point is done or another process has it. 1: one failed, is blocked or was stopped from outside.
            130 or 143: a signal ended the pool; its children have saved and left.
        """
        with self._listening():
            while True:
                self._reap()
                if self._signals:
                    self._stop_children()
                else:
                    self._follow()
                    self._launch()
                if not self.children and (self._signals or not self._more()):
                    break
                self.show.tick(self)
                time.sleep(TICK_S)
        for point in self.waiting:
            self.ends[point.signature] = End(point, "waiting")
        for point in self.elsewhere:
            self.ends[point.signature] = End(point, "elsewhere", "another process runs it")
        if self._signals:
            return 128 + self._signals[0]
        return int(any(end.state in ("failed", "blocked", "stopped") for end in self.ends.values()))

    def _more(self) -> bool:
        """Whether something can still happen without a signal."""
        if any(self.options.wait or point.signature not in self._seen for point in self.elsewhere):
            return True
        return any(self._before(point) in (DONE, *GONE) for point in self.waiting)

    def _before(self, point: Point) -> str:
        """State of what a point needs first."""
        return DONE if point.after is None else self.state[point.after]

    # -------------------------------------------------------------------------------------------------- children

    def _launch(self) -> None:
        for point in list(self.waiting):
            if len(self.children) >= self.options.workers:
                return
            before = self._before(point)
            if before in GONE:
                self.waiting.remove(point)
                self._end(End(point, "blocked", f"its pre-training is {before}"), 0.0)
            elif before == DONE:
                self.waiting.remove(point)
                self._start(point)

    def _start(self, point: Point) -> None:
        slot = min(set(range(self.options.workers)) - {child.slot for child in self.children})
        try:
            command = self._command(point)
            with (self.runs_dir / point.signature / "log.txt").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(slot),
                    start_new_session=True,  # the terminal's Ctrl-C reaches the pool alone, which then stops them
                )
        except (OSError, UserError) as error:
            self._end(End(point, "failed", str(error)), 0.0)
            return
        self.state[point.signature] = "running"
        self.children.append(Child(point, process, slot, time.monotonic()))
        self.show.started(point)

    def _command(self, point: Point) -> list[str]:
        """The trainer's command line; its config lies in the run's folder, so that anyone can repeat it."""
        folder = self.runs_dir / point.signature
        config = folder / "config.yaml"
        if config.exists():
            found = resolve(read_yaml(config), str(config)).signature
            if found != point.signature:
                raise UserError(f"{config}: signature = {found}: allowed is {point.signature}, as its folder is named")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            files.write_atomic(config, yaml.safe_dump(point.config.model_dump(mode="json"), sort_keys=False))
        return [
            *self.options.trainer,
            str(config),
            "--runs-dir",
            str(self.runs_dir),
            "--threads",
            str(self.options.threads),
        ]

    def _environment(self, slot: int) -> Mapping[str, str]:
        threads = str(self.options.threads)
        numbers = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        gpus = self.options.gpus
        device = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
        return {**os.environ, **dict.fromkeys(numbers, threads), **device, "PYTHONUNBUFFERED": "1"}

    def _reap(self) -> None:
        for child in list(self.children):
            code = child.process.poll()
            if code is not None:
                self.children.remove(child)
                self._judge(child, code)

    def _judge(self, child: Child, code: int) -> None:
        point = child.point
        state, known = plans.state_of(self.runs_dir / point.signature)
        if state == "done":
            self._end(done(point, known), time.monotonic() - child.since)
        elif code == 0:
            # It found the run locked. Its holder may not show yet, or be gone already: `_follow` sees.
            self.state[point.signature] = "running"
            self._takes[point.signature] = self._takes.get(point.signature, 0) + 1
            self.elsewhere.append(point)
            self.show.say(f"{point.name}: another process runs it")
        elif code in STOPPED or self._killed(code) or _saved(child, known):
            self._end(End(point, "stopped", f"stopped at step {known.step}" if known else ""), 0.0)
        else:
            error = known.error if known and state == "failed" and known.error else self._last_line(point)
            reason = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
            self._end(End(point, "failed", error or reason), 0.0)

    def _killed(self, code: int) -> bool:
        """Whether it ended because this pool killed it, at a second signal."""
        return code == -signal.SIGKILL and self._told > 1

    def _last_line(self, point: Point) -> str:
        with suppress(OSError), (self.runs_dir / point.signature / "log.txt").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def _end(self, end: End, seconds: float) -> None:
        self.state[end.point.signature] = end.state
        self.ends[end.point.signature] = end
        self.show.ended(end, seconds)

    # ------------------------------------------------------------------------------------------------- elsewhere

    def _follow(self) -> None:
        """See what became of points that other processes run; one that stopped there is taken over."""
        if time.monotonic() - self._looked < FOLLOW_S:
            return
        self._looked = time.monotonic()
        for point in list(self.elsewhere):
            state, known = plans.state_of(self.runs_dir / point.signature)
            if state == "running":
                self._seen.add(point.signature)
                continue
            self.elsewhere.remove(point)
            if state == "done":
                self._end(done(point, known), 0.0)
            elif state == "failed" or self._takes.get(point.signature, 0) >= TAKES:
                error = (known.error if known else None) or "another process holds it, and nothing runs"
                self._end(End(point, "failed", error), 0.0)
            else:
                self.state[point.signature] = "missing"
                self.waiting.append(point)

    # --------------------------------------------------------------------------------------------------- signals

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Signals are noted, and acted on between two looks at the children."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before: dict[signal.Signals, Any] = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop_children(self) -> None:
        """At the first signal children save and leave; at the second they are killed."""
        if self._told == len(self._signals):
            return
        self._told = len(self._signals)
        running = f"{len(self.children)} {'run' if len(self.children) == 1 else 'runs'}"
        if self._told == 1:
            self.show.say(f"stopping {running}, which save first; Ctrl-C again kills them")
        else:
            self.show.say(f"killing {running}; their last checkpoints are whole")
        for child in self.children:
            with suppress(ProcessLookupError):
                if self._told == 1:
                    child.process.terminate()
                else:
                    os.killpg(child.process.pid, signal.SIGKILL)


def _saved(child: Child, known: Status | None) -> bool:
    """Whether this very process, not an earlier attempt, noted that it was stopped and will be continued."""
    return known is not None and known.pid == child.process.pid and known.state in ("killed", "scheduled")


def done(point: Point, known: Status | None) -> End:
    """A finished run, with the first of its results or the step at which it diverged."""
    if known is not None and known.diverged is not None:
        return End(point, DONE, f"at step {known.diverged:,}", diverged=True)
    found = list((known.final if known else {}).items())[:2]
    return End(point, DONE, " ".join(f"{name} {value:.4g}" for name, value in found))
