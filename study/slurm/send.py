"""Points to arrays, arrays to sbatch, each step in the ledger."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from study.errors import UserError
from study.run import status
from study.slurm import ledger, snapshot, state
from study.slurm import script as scripts
from study.slurm.cluster import Cluster
from study.slurm.ledger import ANSWER_S, Array, Known
from study.slurm.state import Limits, Unanswered
from study.sweep.grid import Point, Sweep

SBATCH_TIMEOUT_S = 120.0

_LOST = re.compile(r"timed out|contact|connect|communicat|zero bytes", re.IGNORECASE)
"""Words of an sbatch that failed without knowing whether the controller has the job."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """An array to submit."""

    tasks: dict[int, str]
    """Index → signature."""
    after: int | str | None = None
    """The array whose equal index must succeed first: its position in this submission, or Slurm's number of it."""


class Refused(Exception):  # noqa: N818
    """sbatch said no; the message is why."""


def settle(runs_dir: Path) -> None:
    """Find out what became of every sbatch whose answer was lost: adopt its job by name, or note that there is none.

    To be called with the lock held.

    Raises:
        UserError: Slurm does not answer; nothing is changed.
    """
    open_ = [array for array in ledger.arrays(runs_dir) if array.job is None and not array.gone]
    if not open_:
        return
    names = {array.name for array in open_}
    time.sleep(max(0.0, ANSWER_S - (time.time() - max(array.time for array in open_))))
    try:
        tasks = state.queue(names)
    except Unanswered as error:
        raise UserError(
            f"{open_[0].ledger}: the answer of an sbatch is missing, and Slurm cannot be asked: {error}; "
            "allowed is to try again when it answers"
        ) from None
    if missing := names - {name for name, _ in tasks}:
        # Without accounting: the queue keeps jobs for MinJobAge, and an ended one left its mark in its run.
        with contextlib.suppress(Unanswered):
            tasks |= state.accounting(missing, min(array.time for array in open_))
    jobs_by_name = {name: task.array for (name, _), task in tasks.items()}
    for array in open_:
        if job := jobs_by_name.get(array.name):
            ledger.answer(array, job)
            print(f"adopted array {job}, whose answer had been lost: {len(array.tasks)} points")
        else:
            ledger.drop(array, "not in the queue")


def array_size(allowed: Limits) -> int:
    return min(allowed.max_array_size, allowed.max_submit_jobs or allowed.max_array_size)


def split(points: Sequence[Point], known: Known, runs_dir: Path, size: int) -> list[Chunk]:
    """Arrays of at most ``size`` points. A probe whose pre-training is still to be done takes the index of that one,
    so that its array can wait task by task (aftercorr); further probes of it go to further arrays."""
    sending = {point.signature for point in points}

    def waits(point: Point) -> bool:
        if point.after is None or point.after in sending:
            return point.after is not None
        before = status.read(runs_dir / point.after)
        return before is None or before.state != "finished"

    waiting = [point for point in points if waits(point)]
    free = [point.signature for point in points if not waits(point)]
    chunks = [Chunk(dict(enumerate(free[start : start + size]))) for start in range(0, len(free), size)]
    place = {signature: (at, i) for at, chunk in enumerate(chunks) for i, signature in chunk.tasks.items()}
    arrays: dict[tuple[int | str, int], dict[int, str]] = defaultdict(dict)  # (array waited for, n-th probe) → tasks
    probes: Counter[str] = Counter()
    for point in waiting:
        assert point.after is not None
        if point.after in place:
            before: tuple[int | str, int] = place[point.after]
        else:
            array, i = known[point.after]
            assert array.job is not None, "every answer was settled before"
            before = array.job, i
        arrays[before[0], probes[point.after]][before[1]] = point.signature
        probes[point.after] += 1
    return chunks + [Chunk(tasks, after) for (after, _), tasks in arrays.items()]


def lanes(chunks: int, limit: int | None) -> list[tuple[int | None, int | None]]:
    """Share the parallel limit between arrays: for each its own limit, and the array that must end before it starts.

    With as many arrays as the limit or fewer, the shares add up to it; with more, arrays queue up behind each other.
    """
    if limit is None or not chunks:
        return [(None, None)] * chunks
    width = min(chunks, limit)
    shares = [limit // width + (lane < limit % width) for lane in range(width)]
    return [(shares[i % width], i - width if i >= width else None) for i in range(chunks)]


def send(
    sweep: Sweep, points: Sequence[Point], resources: Cluster, allowed: Limits, runs_dir: Path, known: Known, lock: int
) -> bool:
    """Submit the points, array by array, until one is refused. True when all went."""
    code = snapshot.take(runs_dir)
    by_signature = {point.signature: point for point in points}
    chunks = split(points, known, runs_dir, array_size(allowed))
    sent: list[Array] = []
    for chunk, (limit, behind) in zip(chunks, lanes(len(chunks), resources.parallel), strict=True):
        conditions = (
            []
            if chunk.after is None
            else [f"aftercorr:{chunk.after if isinstance(chunk.after, str) else sent[chunk.after].job}"]
        )
        conditions += [] if behind is None else [f"afterany:{sent[behind].job}"]
        array = ledger.new(ledger.path_of(runs_dir, sweep.id), chunk.tasks)
        script = scripts.write(
            array, by_signature, resources, comment=sweep.id, runs_dir=runs_dir, snapshot=code,
            limit=limit, dependency=",".join(conditions) or None,
        )  # fmt: skip
        ledger.intend(array)
        try:
            array = ledger.answer(array, _sbatch(script, lock))
        except Refused as error:
            ledger.drop(array, str(error))
            print(f"study: sbatch refused {len(array.tasks)} points: {error}", file=sys.stderr)
        except Unanswered as error:
            print(
                f"study: sbatch did not say whether {len(array.tasks)} points went: {error}; the next call finds out",
                file=sys.stderr,
            )
        if array.job is None:
            went = ", ".join(f"{array.job} ({len(array.tasks)} points)" for array in sent) or "none"
            print(f"study: arrays that went: {went}; the same command sends the rest", file=sys.stderr)
            return False
        sent.append(array)
        print(f"submitted array {array.job}: {len(array.tasks)} points")
    return True


def _sbatch(script: Path, lock: int) -> str:
    """Call sbatch. It inherits the lock, so that it cannot outlive its caller unnoticed.

    Raises:
        Refused: it said no.
        Unanswered: it may have submitted the job or not.
    """
    from submitit.helpers import clean_env

    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with clean_env():  # this may itself run in a job
        env = os.environ | kept
    command = ["sbatch", "--parsable", str(script)]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S, pass_fds=(lock,), check=False
        )
    except subprocess.TimeoutExpired:
        raise Unanswered(f"no answer after {SBATCH_TIMEOUT_S:.0f} s") from None
    said = state.last_line(done.stderr)
    if done.returncode == 0 and (job := done.stdout.strip().partition(";")[0]).isdigit():
        return job
    if done.returncode <= 0 or _LOST.search(done.stderr):
        raise Unanswered(said or f"exit status {done.returncode}, answer {done.stdout.strip()!r}")
    raise Refused(said or f"exit status {done.returncode}")
