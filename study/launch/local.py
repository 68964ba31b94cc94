"""One launch of a pool on this machine: the mirror beside it, the summary after it, and how to stop it from outside."""

import fcntl
import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from study.launch import plan as plans
from study.launch.plan import Plan
from study.launch.pool import Options, Pool
from study.launch.progress import Progress
from study.run import files, lock

LOOK_S = 1.0
"""Seconds between two looks at the mirror."""
RESTARTS = 3
"""Mirrors that are started in place of one that ended early: one that cannot live would end for ever."""


def launch(plan: Plan, runs_dir: Path, options: Options, *, mirror: bool = True) -> int:
    """Train what a plan leaves to do; its record is written already.

    Args:
        plan: the sweep as it stands.
        runs_dir: where the runs are.
        options: of the pool.
        mirror: log to MLflow meanwhile.

    Returns:
        The pool's exit code.

    Raises:
        UserError: the tracking store cannot be used, or the folder of runs cannot be written; nothing was started.
    """
    with _presence(runs_dir, plan.sweep.id), Progress() as show, mirrored(runs_dir, show.say, wanted=mirror):
        pool = Pool(plan, runs_dir, options, show)
        code = pool.run()
        _summary(pool, show)
    return code


def options(plan: Plan, *, workers: int | None = None, threads: int | None = None, wait: bool = False) -> Options:
    """A pool that fits this machine: one point a core, of one thread; or one a GPU, which shares the cores.

    With as many threads a run gives the same bits, so on a machine without a GPU their number does not follow the
    machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = _gpus() if plan.unit == "GPU" else ()
    workers = workers or len(gpus) or (1 if plan.unit == "GPU" else cores)
    return Options(workers, threads or (max(1, cores // workers) if gpus else 1), wait, gpus)


def _gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, without asking their driver."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name for name in visible.split(",") if name)
    return tuple(str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


@contextmanager
def mirrored(runs_dir: Path, say: Callable[[str], None], *, wanted: bool = True) -> Iterator[None]:
    """Log a folder of runs to MLflow meanwhile, and what is left of it at the end.

    Args:
        runs_dir: where the runs are.
        say: tells the user.
        wanted: otherwise nothing happens.
    """
    if wanted and importlib.util.find_spec("mlflow") is None:
        say("not logged to MLflow, which is not installed; `study runs sync` does it later")
        wanted = False
    if not wanted:
        yield
        return
    from study.tracking.mirror import start_mirror

    beside = start_mirror(runs_dir)
    over = threading.Event()

    def look_after() -> None:
        nonlocal beside
        for _ in range(RESTARTS):
            while not beside.ended:
                if over.wait(LOOK_S):
                    return
            say("MLflow: the mirror ended early; another one goes on")
            beside = start_mirror(runs_dir)

    keeper = threading.Thread(target=look_after, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        say("bringing MLflow up to date")
        if not (report := beside.stop()).complete:
            say(f"MLflow: {report.error or '; '.join(report.problems)}")


def _summary(pool: Pool, show: Progress) -> None:
    """What is left, and why; failed points with where to look."""
    by_state: dict[str, int] = {}
    for end in pool.ends.values():
        by_state[end.shown] = by_state.get(end.shown, 0) + 1
    if by_state:  # otherwise the plan has said that there is nothing to run
        show.say(", ".join(f"{number} {state}" for state, number in by_state.items()))
    for end in pool.ends.values():
        if end.state in ("failed", "elsewhere"):
            log = pool.runs_dir / end.point.signature / "log.txt"
            show.say(
                f"{end.point.name} ({end.point.signature}) {end.state}: {end.detail}"
                + f"; see {log}" * (end.state == "failed")
            )


# ------------------------------------------------------------------------------------------------ seen from outside


@contextmanager
def _presence(runs_dir: Path, sweep_id: str) -> Iterator[None]:
    """A file that says, as long as this process lives, that it launches a sweep."""
    path = runs_dir / "sweeps" / f"{sweep_id}.{socket.gethostname()}.{os.getpid()}.launcher"
    with files.storage(path), path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def stop_launchers(runs_dir: Path, sweep_id: str) -> int:
    """Ask every launcher of a sweep on this machine to stop its points and leave; how many there were."""
    stopped = 0
    for path in (runs_dir / "sweeps").glob(f"{sweep_id}.{socket.gethostname()}.*.launcher"):
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                os.kill(int(path.name.split(".")[-2]), signal.SIGTERM)
                stopped += 1
            else:
                path.unlink(missing_ok=True)  # its launcher was killed
    return stopped


def running_here(runs_dir: Path, signatures: Collection[str]) -> dict[str, int]:
    """Signature → process, of the runs that live processes of this machine hold, outside any cluster's job."""
    found = {}
    for signature in signatures:
        state, known = plans.state_of(runs_dir / signature)
        holder = lock.holder(runs_dir / signature) if state == "running" else None
        if known and holder and known.job_id is None and (holder.host, holder.pid) == (socket.gethostname(), known.pid):
            found[signature] = holder.pid
    return found
