"""What a run is doing: ``status.json``, rewritten by its heartbeat, and what it means once the heart has stopped."""

import json
import math
import os
import socket
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from study import strict
from study.errors import UserError
from study.run import files, journal

STALE_S = 60.0
"""A running run whose heartbeat is older than this many seconds is dead."""

LONGEST_BEAT_S = STALE_S / 3
FILE = "status.json"


@dataclass
class Status:
    """The state of a run; times are Unix seconds.

    ``state``: running, finished, failed, killed (stopped, and continues when asked) or scheduled (stopped by its
    scheduler, which starts it again). ``train_seconds`` adds up over attempts, what was run twice included.
    ``numerics``: each that an attempt was made by; [1] of a status from before they were kept.
    ``diverged``: the step whose reading was the first that is no number, of a run that ended without one; its ``final``
    then holds NaN, null in the file.
    """

    signature: str
    state: str
    attempt: int
    phase: str | None = None
    step: int = 0
    steps: int | None = None
    images_per_s: float | None = None
    host: str = ""
    pid: int = 0
    job_id: str | None = None
    heartbeat: float = 0.0
    started: float = 0.0
    ended: float | None = None
    train_seconds: float = 0.0
    threads: int | None = None
    numerics: list[int] = field(default_factory=lambda: [1])
    error: str | None = None
    diverged: int | None = None
    final: dict[str, float] = field(default_factory=dict)


def read(folder: Path) -> Status | None:
    """The status of the run in ``folder`` as written; None if there is none, or none that can be read."""
    try:
        tree = json.loads((folder / FILE).read_bytes())
        known = Status(**{entry.name: tree[entry.name] for entry in fields(Status) if entry.name in tree})
        known.final = {name: strict.number(value) for name, value in known.final.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    if known.diverged is None and not all(map(math.isfinite, known.final.values())):
        known.diverged = _first_without_number(folder, known.step)
    return known


def _first_without_number(folder: Path, step: int) -> int:
    """Where a run diverged whose status is older than ``diverged``: by its journal, else the ``step`` it is at."""
    readings = journal.read(folder / "metrics.jsonl")
    return min((reading.step for reading in readings if not math.isfinite(reading.value)), default=step)


def write(folder: Path, status: Status, *, durable: bool) -> None:
    """Replace ``status.json``.

    Raises:
        StorageError: it could not be written.
    """
    files.write_atomic(folder / FILE, strict.dumps(asdict(status), indent=1) + "\n", durable=durable)


def effective(folder: Path, now: float | None = None) -> str:
    """The state of a run seen from outside: ``pending`` without a status, ``killed`` if it says that it runs but its
    heartbeat is older than ``STALE_S`` or its process on this host is gone.

    Args:
        folder: the run's folder.
        now: Unix seconds; the present by default.
    """
    status = read(folder)
    return "pending" if status is None else seen(status, now)


def seen(status: Status, now: float | None = None) -> str:
    """``effective`` for a status that was read already."""
    if status.state != "running":
        return status.state
    stale = (time.time() if now is None else now) - status.heartbeat > STALE_S
    gone = status.host == socket.gethostname() and not _exists(status.pid)
    return "killed" if stale or gone else "running"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def heartbeat_seconds() -> float:
    """Seconds between two heartbeats: ``STUDY_HEARTBEAT_S``, or 2.

    Raises:
        UserError: it is no number, or so long that a live run would pass for dead.
    """
    text = os.environ.get("STUDY_HEARTBEAT_S", "2")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_BEAT_S:
        raise UserError(f"environment: STUDY_HEARTBEAT_S = {text}: allowed is above 0, at most {LONGEST_BEAT_S:g} s")
    return seconds
