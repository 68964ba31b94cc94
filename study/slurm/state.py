"""Questions to Slurm: the queue, the accounting, the limits; and a table of every state that it knows.

A question that fails raises :class:`Unanswered`: its caller says "unknown", never "gone".
"""

import os
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from study.slurm.cluster import minutes

PENDING, RUNNING, ENDED, STOPPED, UNKNOWN = "pending", "running", "ended", "stopped", "unknown"
"""What a state means for a point: it waits, it runs, it is over by itself, it was ended from outside, nobody knows."""

STATES = {
    # live
    "PENDING": PENDING,
    "CONFIGURING": PENDING,  # nodes are booted for it
    "POWER_UP_NODE": PENDING,
    "REQUEUED": PENDING,
    "REQUEUE_FED": PENDING,
    "REQUEUE_HOLD": PENDING,  # held after a requeue, until released
    "SPECIAL_EXIT": PENDING,  # the same, for a certain exit status
    "RESV_DEL_HOLD": PENDING,  # held, its reservation is gone
    "RUNNING": RUNNING,
    "COMPLETING": RUNNING,
    "EXPEDITING": RUNNING,
    "RESIZING": RUNNING,
    "SIGNALING": RUNNING,
    "STAGE_OUT": RUNNING,
    "STOPPED": RUNNING,  # by SIGSTOP: it holds its cores
    "SUSPENDED": RUNNING,
    "UPDATE_DB": RUNNING,
    # over
    "COMPLETED": ENDED,
    "FAILED": ENDED,
    "BOOT_FAIL": ENDED,
    "DEADLINE": ENDED,
    "LAUNCH_FAILED": ENDED,
    "OUT_OF_MEMORY": ENDED,
    "RECONFIG_FAIL": ENDED,
    "TIMEOUT": ENDED,
    "CANCELLED": STOPPED,
    "NODE_FAIL": STOPPED,
    "PREEMPTED": STOPPED,
    "REVOKED": STOPPED,  # another cluster of the federation has it
}

ASK_TIMEOUT_S = 60.0
PER_QUERY = 500
"""Most job names on one command line; more are asked for by the user's name."""


class Unanswered(Exception):  # noqa: N818 — not an error of ours: Slurm did not say
    """A question to Slurm failed; the message is the last line of what it said."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an array as Slurm sees it."""

    array: str
    index: int
    state: str
    """Slurm's word."""
    reason: str

    @property
    def id(self) -> str:
        return f"{self.array}_{self.index}"

    @property
    def means(self) -> str:
        return STATES.get(self.state, UNKNOWN)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cluster allows; None where it does not say."""

    max_array_size: int
    """One more than the largest index of an array."""
    max_submit_jobs: int | None
    partitions: dict[str, int | None]
    """Name → minutes that a job may take."""
    default_partition: str | None

    def __str__(self) -> str:
        names = [
            f"{name} ({'default, ' * (name == self.default_partition)}"
            f"{'no time limit' if most is None else f'at most {most:,} minutes'})"
            for name, most in self.partitions.items()
        ]
        jobs = "any number of" if self.max_submit_jobs is None else f"{self.max_submit_jobs:,}"
        return f"arrays of {self.max_array_size:,} points, {jobs} jobs at once; partitions: {', '.join(names)}"


def ask(command: Sequence[str]) -> str:
    """Standard output of one of Slurm's programs.

    Raises:
        Unanswered: it is not installed, fails, or does not answer within ``ASK_TIMEOUT_S``.
    """
    env = os.environ | {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise Unanswered(f"{command[0]}: not on the PATH") from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{command[0]}: no answer after {ASK_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise Unanswered(last_line(done.stderr) or f"{command[0]}: exit status {done.returncode}")
    return done.stdout


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def queue(names: Collection[str]) -> dict[tuple[str, int], Task]:
    """All tasks of the named jobs that the controller remembers, ended ones too, by one query.

    The controller keeps an ended job for MinJobAge (300 s by default), so this needs no accounting and says what
    ``scontrol show job`` would.

    Returns:
        (job name, index) → task.

    Raises:
        Unanswered: the controller did not answer.
    """
    chosen = [f"--name={','.join(sorted(names))}"] if len(names) <= PER_QUERY else ["--me"]
    lines = ask(["squeue", "--noheader", "--states=all", "--format=%j|%F|%K|%T|%r", *chosen]).splitlines()
    tasks: dict[tuple[str, int], Task] = {}
    for line in lines:
        name, array, indices, state, reason = (line.split("|") + [""] * 5)[:5]
        if name in names:
            for index in expand(indices):
                tasks[name, index] = Task(array, index, state, reason)
    return tasks


def accounting(names: Collection[str], since: float) -> dict[tuple[str, int], Task]:
    """All tasks of the named jobs that the accounting remembers, by one query.

    Args:
        names: job names.
        since: Unix seconds before which none of them was submitted.

    Returns:
        (job name, index) → task.

    Raises:
        Unanswered: there is no accounting, or it did not answer.
    """
    start = datetime.fromtimestamp(since - 86400).strftime("%Y-%m-%dT%H:%M:%S")  # a day for clocks that differ
    chosen = [f"--name={','.join(sorted(names))}"] if len(names) <= PER_QUERY else []
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--starttime={start}", *chosen]
    tasks: dict[tuple[str, int], Task] = {}
    for line in ask([*command, "--format=JobName,JobID,State,ExitCode"]).splitlines():
        name, job, state, status = (line.split("|") + [""] * 4)[:4]
        array, _, indices = job.partition("_")
        if name in names:
            word = state.partition(" ")[0]  # "CANCELLED by 1000"
            for index in expand(indices.strip("[]")):
                tasks[name, index] = Task(array, index, word, "" if status == "0:0" else f"exit status {status}")
    return tasks


def expand(indices: str) -> Iterator[int]:
    """The indices of ``3``, ``0-4,7``, ``0-8:2`` or ``3-4%1``; none of what is no number, as ``N/A`` or ``...``."""
    for part in indices.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match:
            first, last, step = match.groups()
            yield from range(int(first), int(last or first) + 1, int(step or 1))


def compress(indices: Collection[int]) -> str:
    """``0-4,7`` of [0, 1, 2, 3, 4, 7]: what ``sbatch --array`` and ``scancel`` read."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def limits() -> Limits:
    """Ask Slurm what it allows.

    Raises:
        Unanswered: the controller did not answer.
    """
    lines = ask(["scontrol", "show", "config"]).splitlines()
    config = {key.strip(): value.strip() for key, equals, value in (line.partition("=") for line in lines) if equals}
    size = int(config.get("MaxArraySize", "1001"))
    if match := re.search(r"\bmax_array_tasks=(\d+)", config.get("SchedulerParameters", "")):
        size = min(size, int(match[1]))
    partitions: dict[str, int | None] = {}
    default = None
    for line in ask(["scontrol", "--oneliner", "show", "partition"]).splitlines():
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if "PartitionName" in fields:
            longest = minutes(fields.get("MaxTime", "UNLIMITED"))
            partitions[fields["PartitionName"]] = longest if isinstance(longest, int) else None
            if fields.get("Default") == "YES":
                default = fields["PartitionName"]
    return Limits(size, _max_submit_jobs(), partitions, default)


def _max_submit_jobs() -> int | None:
    """The smallest MaxSubmitJobs of the user's associations; None without accounting or without a limit."""
    user = os.environ.get("USER") or str(os.getuid())
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={user}", "format=MaxSubmitJobs"]
    try:
        numbers = [int(word) for word in ask(command).split() if word.isdigit()]
    except Unanswered:
        return None
    return min(numbers, default=None)
