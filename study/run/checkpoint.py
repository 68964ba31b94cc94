"""Checkpoints that are whole or absent, written off the training thread.

A file is named ``<step>-<hash of its bytes>.pt``, so that its name, given by one rename, vouches for its content. The
newest two are kept; the one before goes only when the new one has been read back from the disk.
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch

from study.errors import UserError
from study.run import files

KEPT = 2
_NAME = re.compile(r"^(\d{9,})-([0-9a-f]{32})\.pt$")

State = dict[str, Any]
"""Nested plain values and tensors: what ``torch.load(weights_only=True)`` accepts."""


class DamagedError(Exception):
    """A checkpoint's bytes are not those that were written."""


def latest(folder: Path, signature: str, warn: Callable[[str], None]) -> tuple[int, State] | None:
    """The newest whole checkpoint in a run's ``checkpoints`` folder, as (step, state on the CPU); None without one.

    Args:
        folder: where to look; it need not exist, and is not changed.
        signature: the run that it must belong to.
        warn: told in one line of each damaged file that was passed over.

    Raises:
        UserError: a file there belongs to another run, or holds weights only.
    """
    found = _newest(folder, signature, warn)
    return None if found is None else found[1:]


def _newest(folder: Path, signature: str, warn: Callable[[str], None]) -> tuple[Path, int, State] | None:
    ours = _ours(folder)
    others = sorted({*folder.glob("*.pt"), *folder.glob("*.pth"), *folder.glob("*.pth.tar")} - set(ours))
    for path in [*reversed(ours), *others]:
        try:
            return path, *load(path, signature)
        except FileNotFoundError:  # its run has just replaced it
            continue
        except DamagedError:
            warn(f"{path}: damaged; going back to the one before it, or to the start")
    return None


def _ours(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(
        (path for path in folder.glob("*.pt") if _NAME.match(path.name)), key=lambda path: int(path.name.split("-")[0])
    )


def read(path: Path) -> Any:
    """What a file of tensors and plain values holds, on the CPU, whoever wrote it.

    Raises:
        UserError: it holds something else.
        OSError: it cannot be opened.
        DamagedError: it is one of ours, and its bytes changed since it was written.
    """
    name = _NAME.match(path.name)
    with path.open("rb") as file:
        if name and _digest(file) != name[2]:
            raise DamagedError(path)
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever the bytes lead it to
            raise UserError(
                f"{path}: cannot be read as tensors and plain values; "
                "allowed is a whole file of torch.save that holds no code"
            ) from error


def load(path: Path, signature: str) -> tuple[int, State]:
    """Read one checkpoint as (step, state on the CPU).

    Raises:
        UserError: it belongs to another run, holds weights only, or something else altogether.
        DamagedError: its bytes changed since it was written.
    """
    content = read(path)
    if not (isinstance(content, dict) and content.keys() == {"signature", "step", "state"}):
        raise UserError(
            f"{path}: holds weights only, and a run continues from optimiser, dictionary and step as well; "
            "these weights are good for `study encoder probe` and `study encoder export`"
        )
    if content["signature"] != signature:
        raise UserError(f"{path}: checkpoint of run {content['signature']}: allowed is one of run {signature}")
    return content["step"], content["state"]


def clone(value: Any, memo: dict[tuple[Any, ...], torch.Tensor] | None = None) -> Any:
    """A copy that later steps do not change; a tensor that stands in two places (f_k is f_q) is copied once."""
    memo = {} if memo is None else memo
    if isinstance(value, torch.Tensor):
        key = (value.device, value.dtype, value.data_ptr(), value.shape, value.stride())
        if key not in memo:
            memo[key] = value.detach().clone()
        return memo[key]
    if isinstance(value, dict):
        return {key: clone(entry, memo) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(clone(entry, memo) for entry in value)
    return value


class Checkpoints:
    """The one writer of a run's checkpoints.

    Memory: a state being written and one that waits; a third replaces the one that waits, so a slow disk gets fewer
    checkpoints, never a queue of them.

    Args:
        folder: where they go; it exists.
        signature: the run's.
        warn: told in one line of a damaged file.
        before: called on the writer's thread before each write; flushes the journal, and raises if the run's lock
            has gone to another process.
    """

    def __init__(
        self, folder: Path, signature: str, warn: Callable[[str], None], before: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self.signature = folder, signature
        self._warn, self._before = warn, before
        self._kept = _ours(folder)[-KEPT:]
        self._waiting: tuple[int, State] | None = None
        self._busy = self._closing = False
        self._error: Exception | None = None
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._write_loop, name="checkpoint", daemon=True)
        self._thread.start()

    def latest(self) -> tuple[int, State] | None:
        """As the function; what it finds stays until the next is verified, what it passed over does not."""
        found = _newest(self.folder, self.signature, self._warn)
        if found is None:
            return None
        self._kept = [*(path for path in self._kept if path.name < found[0].name), found[0]][-KEPT:]
        return found[1:]

    def save(self, step: int, state: State) -> None:
        """Clone the tensors now, write them later.

        Args:
            step: optimiser steps done.
            state: nested dictionaries and lists of tensors and plain values.

        Raises:
            StorageError: an earlier checkpoint could not be written.
        """
        self.check()
        copy = clone(state)
        with self._wake:
            self._waiting = (step, copy)
            self._wake.notify_all()

    def check(self) -> None:
        """Raise what the writer met."""
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Wait until everything saved is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        with self._wake:
            self._wake.wait_for(lambda: not (self._waiting or self._busy) or self._error is not None)
        self.check()

    def close(self) -> None:
        """Drain, and stop the thread."""
        try:
            self.drain()
        finally:
            with self._wake:
                self._closing = True
                self._wake.notify_all()
            self._thread.join()

    def _write_loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                (step, state), self._waiting, self._busy = self._waiting, None, True
            try:
                self._before()
                self._write(step, state)
            except Exception as error:  # whatever it was, the training thread raises it
                self._error = error
            del state
            with self._wake:
                self._busy = False
                self._wake.notify_all()
            if self._error is not None:
                return

    def _write(self, step: int, state: State) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # the clones were made on the training thread's stream
        temp = files.temporary(self.folder / f"{step:09d}.pt")
        with files.storage(self.folder):
            self._prune()
            try:
                with temp.open("xb") as file:
                    hashing = _Hashing(file)
                    torch.save({"signature": self.signature, "step": step, "state": state}, cast(IO[bytes], hashing))
                    file.flush()
                    os.fsync(file.fileno())
                digest = hashing.hash.hexdigest()
                with temp.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
                    if _digest(file) != digest:
                        raise OSError("what was read back is not what was written")
                torch.load(temp, map_location="cpu", weights_only=True, mmap=True)  # fails here, not on continuing
                path = self.folder / f"{step:09d}-{digest}.pt"
                temp.replace(path)
            except BaseException:
                temp.unlink(missing_ok=True)
                raise
            files.sync_folder(self.folder)
            self._kept = [*(kept for kept in self._kept if kept != path), path][-KEPT:]
            self._prune()

    def _prune(self) -> None:
        for path in _ours(self.folder):
            if path not in self._kept:
                path.unlink(missing_ok=True)


class _Hashing:
    """Hashes what ``torch.save`` writes on its way to the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = _new_hash()

    def write(self, content: bytes) -> int:
        self.hash.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


def _new_hash() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


def _digest(file: IO[bytes]) -> str:
    return hashlib.file_digest(file, _new_hash).hexdigest()  # type: ignore[arg-type]  # typeshed wants BytesIO
