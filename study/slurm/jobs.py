"""What Slurm knows of points: one query to the queue, one to the accounting, both read in a plan's words."""

import time
from dataclasses import dataclass
from pathlib import Path

from study.run import status
from study.slurm import state as states
from study.slurm.ledger import ANSWER_S, Array, Known
from study.slurm.state import Task, Unanswered


@dataclass(frozen=True, slots=True)
class Job:
    """What Slurm has to say about a point, in a plan's words."""

    state: str
    """``pending``, ``running``, ``unknown`` or ``failed``."""
    id: str | None
    """``<array>_<task>``, as Slurm knows it."""
    reason: str
    """Why it waits, is unknown or failed; may be empty."""


def find(runs_dir: Path, wanted: Known) -> dict[str, Job]:
    """Ask Slurm what became of submitted points.

    One query to the queue; one to the accounting for what is gone from there and left no word of its own.

    Returns:
        Signature → job. Points that were cancelled, or ended and told it themselves, are left out.
    """
    if not wanted:
        return {}
    try:
        tasks = states.queue({array.name for array, _ in wanted.values()})
    except Unanswered as error:
        return {
            signature: Job("unknown", _id(array, index), str(error)) for signature, (array, index) in wanted.items()
        }
    found: dict[str, Job] = {}
    absent: Known = {}
    for signature, (array, index) in wanted.items():
        task = tasks.get((array.name, index))
        if task is not None and task.means in (states.PENDING, states.RUNNING, states.UNKNOWN):
            found[signature] = _live(task)
        elif status.read(runs_dir / signature) is None:  # otherwise the run has told how it ended
            if task is None:
                absent[signature] = array, index
            elif (job := _over(task)) is not None:
                found[signature] = job
    return found | _accounted(absent)


def _live(task: Task) -> Job:
    if task.means == states.UNKNOWN:
        return Job("unknown", task.id, f"Slurm says {task.state}")
    reason = "" if task.reason == "None" else task.reason
    return Job(
        task.means, task.id, reason if task.state in ("PENDING", "RUNNING") else f"{task.state} {reason}".strip()
    )


def _over(task: Task) -> Job | None:
    """A job that is over and left no status: it failed before the trainer began, unless somebody stopped it."""
    if task.means == states.STOPPED:
        return None
    reason = "" if task.reason == "None" else f" ({task.reason})"
    return Job("failed", task.id, f"job {task.id} ended as {task.state}{reason} and left no status")


def _accounted(absent: Known) -> dict[str, Job]:
    """The points that the queue does not have and whose runs said nothing."""
    if not absent:
        return {}
    try:
        names = {array.name for array, _ in absent.values()}
        tasks = states.accounting(names, min(array.time for array, _ in absent.values()))
    except Unanswered:  # most often there is none
        tasks = {}
    found: dict[str, Job] = {}
    for signature, (array, index) in absent.items():
        task = tasks.get((array.name, index))
        if task is not None and task.means in (states.ENDED, states.STOPPED):
            job = _over(task)
        elif array.job is not None:
            job = Job(
                "failed", _id(array, index), f"job {_id(array, index)} is gone and left no status: was it cancelled?"
            )
        else:
            young = time.time() - array.time < ANSWER_S
            job = Job("unknown", None, "sbatch has not answered yet") if young else None
        if job is not None:
            found[signature] = job
    return found


def _id(array: Array, index: int) -> str | None:
    return f"{array.job}_{index}" if array.job else None
