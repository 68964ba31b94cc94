"""One process at a run: a lock that a dead process cannot keep and two starters cannot both take.

``lock/`` holds one file a generation, ``lock/000003``, whose content says who took it. A file is made whole beside its
place and linked there, so each generation is taken by one process, on any shared file system; who finds the newest
generation free or dead takes the next one. Nothing is ever renamed over or deleted by anyone but the newest holder, so
a slow process cannot take away what it judged long ago. An empty file is a lock given back.

The holder keeps a ``flock`` on its file, which dies with it: on the same machine that is the whole answer. From
another machine, where a flock may not be seen, the age of the heartbeat (the file's mtime, compared with that of a
file made just now, so that the clocks of the machines do not matter) decides.
"""

import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from study.errors import UserError
from study.run import files
from study.run.provenance import job_id
from study.run.status import STALE_S


@dataclass(frozen=True)
class Holder:
    """Who has a run; ``started`` in Unix seconds, ``kernel`` tells machines (and their boots) apart."""

    host: str
    pid: int
    started: float
    job_id: str | None
    kernel: str

    def __str__(self) -> str:
        job = f", job {self.job_id}" if self.job_id else ""
        return f"process {self.pid} on {self.host}{job}, since {time.strftime('%F %T', time.localtime(self.started))}"


class RunRemoved(files.StorageError):
    """Somebody removed the folder of a run that goes on."""


class RunLocked(UserError):  # noqa: N818  # no error: the work is being done
    """Another live process has the run; there is nothing to do, so the exit code is 0."""

    exit_code = 0

    def __init__(self, folder: Path, holder: Holder | None) -> None:
        self.holder = holder
        super().__init__(f"{folder}: run already held by {holder or 'another process'}")


class Lock:
    """A run's lock, held from construction to ``release``.

    Args:
        folder: the run's folder.

    Raises:
        RunLocked: a live process holds it.
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.run, self.folder = folder, folder / "lock"
        with files.storage(self.folder):
            self.folder.mkdir(exist_ok=True)
            self._path = self._take()
            self._clean()
        _held.add(self)

    def beat(self) -> None:
        """Show that the holder lives.

        Raises:
            RunLocked: this process was silent for so long (suspended, cut off) that another has taken over.
            RunRemoved: the run's folder is gone.
            OSError: the file system fails.
        """
        newer = self._at(int(self._path.name) + 1)
        if newer.exists() or not self._path.exists():
            if (other := holder(self.run)) or newer.exists():
                raise RunLocked(self.run, other)
            # No lock at all: the folder is gone, or half of it, since a removal begins with what is in it.
            raise RunRemoved(f"{self.run}: has been removed while it ran; the same command begins it anew")
        os.utime(self._descriptor)

    def release(self) -> None:
        """Give it back; the next generation can be taken at once."""
        _held.discard(self)
        with suppress(OSError):  # dead is as good as free
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _clean(self) -> None:
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another starter's, who has given up
                passed = path.name.isdigit() and int(path.name) < int(self._path.name)
                if passed or (path.match(files.TEMPORARY) and self._age(path.stat()) > STALE_S):
                    path.unlink()

    def _age(self, stat: os.stat_result) -> float:
        """Seconds since a file of this folder was touched, by the clock of its file system."""
        os.utime(self._descriptor)
        return os.fstat(self._descriptor).st_mtime - stat.st_mtime

    def _take(self) -> Path:
        generation = max(self._generations(), default=0)
        temp = files.temporary(self.folder / "lock")
        holder = Holder(socket.gethostname(), os.getpid(), time.time(), job_id(), _kernel())
        self._descriptor = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(self._descriptor, json.dumps(asdict(holder)).encode())
            os.fsync(self._descriptor)
            with suppress(OSError):  # a file system without flock: the heartbeat alone decides
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            while True:
                current, wanted = self._at(generation), self._at(generation + 1)
                if self._alive(current):
                    raise RunLocked(self.run, _holder(current))
                try:
                    wanted.hardlink_to(temp)
                except FileExistsError:
                    if os.fstat(self._descriptor).st_nlink == 1:  # not an answer of NFS to a repeated request
                        generation += 1
                        continue
                newest = max(self._generations(), default=0)
                if newest == generation + 1:
                    return wanted
                wanted.unlink(missing_ok=True)  # this process slept while others came and went
                generation = newest
        except BaseException:
            os.close(self._descriptor)
            raise
        finally:
            temp.unlink(missing_ok=True)

    def _alive(self, path: Path) -> bool:
        """Whether a live process holds the generation at ``path``."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            try:
                # shared: two that look at once do not see each other
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                visible = True
            except BlockingIOError:
                return True
            except OSError:
                visible = False
            holder = _parse(os.read(descriptor, 65536))
            if holder is None or (visible and holder.kernel == _kernel()):
                return False
            return self._age(os.fstat(descriptor)) <= STALE_S
        finally:
            os.close(descriptor)

    def _at(self, generation: int) -> Path:
        return self.folder / f"{generation:06d}"

    def _generations(self) -> Iterator[int]:
        return (int(path.name) for path in self.folder.iterdir() if path.name.isdigit())


def holder(folder: Path) -> Holder | None:
    """Who took the run in ``folder`` last and has not given it back, dead or alive."""
    try:
        newest = max((folder / "lock").glob("[0-9]*"), key=lambda path: int(path.name), default=None)
    except (OSError, ValueError):
        return None
    return None if newest is None else _holder(newest)


def _holder(path: Path) -> Holder | None:
    try:
        return _parse(path.read_bytes())
    except OSError:
        return None


def _parse(content: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _kernel() -> str:
    """The same for all that share a kernel, containers included, until it boots again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _drop_in_child() -> None:
    """A forked worker that outlives its killed parent must not keep the lock: a flock lives while any copy is open."""
    for lock in _held:
        os.close(lock._descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)
