"""What was submitted: one line before each ``sbatch`` and one after it, on disk before anything else happens.

``<runs_dir>/sweeps/<sweep>-<scale>.jobs.jsonl``. The line before carries the job's name, which no other job has: if the
line after is missing, because sbatch's answer was lost or its caller died, the job is looked for by that name. So a
point is never submitted twice and never forgotten.
"""

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from study.errors import UserError
from study.run.files import storage


@dataclass(frozen=True, slots=True)
class Array:
    """One array that was, or was about to be, submitted."""

    ledger: Path
    token: str
    tasks: dict[int, str]
    """Index → signature of the point."""
    time: float
    """Unix seconds at which sbatch was about to be called."""
    name: str
    """The job's name: the sweep first, since ``squeue`` shows eight letters of it, then the token."""
    job: str | None = None
    """Slurm's number of the array, once it has answered."""
    gone: bool = False
    """sbatch refused, or Slurm never heard of it: its points were not submitted."""
    cancelled: frozenset[int] = frozenset()
    """Indices that `study sweep cancel` took back; Slurm forgets at once those that had not started."""

    @property
    def folder(self) -> Path:
        """Script, configs and logs of the array."""
        return self.ledger.with_suffix("") / self.token


Known = dict[str, tuple[Array, int]]
"""Signature → the array that it was last submitted in, and its index there."""

SUFFIX = ".jobs.jsonl"
_UNSAFE = re.compile(r"[^\w.-]", re.ASCII)
"""What a list of names for squeue, or a line of its answer, would be cut at."""

ANSWER_S = 15.0
"""How long a job may take to show up in the queue after its sbatch is gone."""


def path_of(runs_dir: Path, sweep_id: str) -> Path:
    return runs_dir.absolute() / "sweeps" / f"{sweep_id}{SUFFIX}"


def arrays(runs_dir: Path) -> list[Array]:
    """Every array of every sweep in the folder of runs, oldest first: sweeps share points.

    Raises:
        UserError: a line in the middle of a ledger is damaged; a torn last one is dropped.
    """
    found: list[Array] = []
    for path in sorted((runs_dir.absolute() / "sweeps").glob(f"*{SUFFIX}")):
        found += _read(path).values()
    return sorted(found, key=lambda array: array.time)


def latest(known: list[Array]) -> Known:
    """The newest submission of every point, without those that were cancelled."""
    newest = {point: (array, i) for array in known if not array.gone for i, point in array.tasks.items()}
    return {point: (array, i) for point, (array, i) in newest.items() if i not in array.cancelled}


def new(path: Path, tasks: Mapping[int, str]) -> Array:
    """An array with a token of its own, of which nothing is written down yet."""
    token = secrets.token_hex(6)
    sweep = _UNSAFE.sub("-", path.name.removesuffix(SUFFIX))
    return Array(path, token, dict(tasks), time.time(), f"{sweep}.{token}")


def intend(array: Array) -> None:
    """Write down that an array is about to be submitted.

    Raises:
        StorageError: it cannot be written.
    """
    event = {"event": "intent", "token": array.token, "name": array.name, "time": array.time, "tasks": array.tasks}
    _append(array.ledger, event)


def answer(array: Array, job: str) -> Array:
    """Write down Slurm's number of an array."""
    _append(array.ledger, {"event": "answer", "token": array.token, "job": job})
    return replace(array, job=job)


def drop(array: Array, reason: str) -> None:
    """Write down that an array was not submitted, and why."""
    _append(array.ledger, {"event": "gone", "token": array.token, "reason": reason})


def cancel(array: Array, indices: Collection[int]) -> None:
    """Write down that some tasks of an array were cancelled."""
    _append(array.ledger, {"event": "cancelled", "token": array.token, "indices": sorted(indices)})


@contextmanager
def lock(runs_dir: Path) -> Iterator[int]:
    """One submission at a time in a folder of runs. Gives the descriptor: a child that inherits it holds the lock
    until it ends too, so that nobody looks for a job while an orphaned sbatch may still submit it.
    """
    path = runs_dir / "sweeps" / "submit.lock"
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _append(path: Path, event: dict[str, Any]) -> None:
    with storage(path), path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # torn by a crash: the next line starts afresh
                file.write(b"\n")
        file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            event = json.loads(line)
        except ValueError:  # torn: what it was about to say did not happen yet
            continue
        try:
            token = event["token"]
            if event["event"] == "intent":
                tasks = {int(index): point for index, point in event["tasks"].items()}
                name = event.get("name", f"study-{token}")  # as all were called once
                found[token] = Array(path, token, tasks, event["time"], name)
            elif event["event"] == "answer":
                found[token] = replace(found[token], job=event["job"])
            elif event["event"] == "cancelled":
                found[token] = replace(found[token], cancelled=found[token].cancelled | set(event["indices"]))
            else:
                found[token] = replace(found[token], gone=True)
        except (KeyError, TypeError, AttributeError):
            raise UserError(
                f"{path}:{number}: no line of a ledger; allowed is what `study sweep submit` writes"
            ) from None
    return found
