"""The journal of a run: every metric once, with the time at which it was first measured.

One JSON line a step, ``{"step": 12, "time_ms": 1790000000123, "metrics": {"train/loss": 8.3}}``, appended by a thread
of its own, so that training never waits for the disk. A line counts once its newline is there: a torn one is dropped
on reading and cut off before the next is appended. A continued run measures the steps since its checkpoint again;
equal values are not written twice, and where a value differs the newest one counts. What is not finite is null, read
as NaN, and its line says ``"diverged": true``; older journals, with a bare NaN or Infinity, are read too.
"""

import json
import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from study import strict
from study.run import files

WRITE_S = 0.5
"""Seconds between two writes. A kill loses that much at most, and the steps since the checkpoint are run again."""


class Reading(NamedTuple):
    """One value of one metric."""

    step: int
    name: str
    value: float
    time_ms: int


def read(path: Path) -> list[Reading]:
    """All readings of a journal, one for each (step, name), sorted by both; none if there is no such file."""
    newest = {(reading.step, reading.name): reading for reading in tail(path)[0]}
    return [newest[key] for key in sorted(newest)]


def tail(path: Path, offset: int = 0) -> tuple[list[Reading], int]:
    """The readings in the whole lines after ``offset``, as written, and the offset to go on from.

    An offset that is no longer the start of a line (a power cut took lines back) starts from the beginning.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(offset - 1, 0))
            content = file.read()
    except FileNotFoundError:
        return [], 0
    if offset:
        if content[:1] != b"\n":
            return tail(path)
        content = content[1:]
    whole = content[: content.rfind(b"\n") + 1]
    return list(_parse(whole.splitlines(), path)), offset + len(whole)


def _parse(lines: Iterable[bytes], path: Path) -> Iterator[Reading]:
    damaged = 0
    for line in lines:
        try:
            record = json.loads(line)
            step, time_ms, metrics = record["step"], record["time_ms"], record["metrics"]
            yield from [Reading(step, name, strict.number(value), time_ms) for name, value in metrics.items()]
        except (ValueError, KeyError, TypeError, AttributeError):
            damaged += 1
    if damaged:
        warnings.warn(f"{path}: {damaged} damaged line(s) dropped", stacklevel=2)


class Journal:
    """The one writer of a journal.

    Attributes:
        first: the step that this attempt continues from. What the file holds from there on may come again; it is
            compared with, and must fit in memory. Set it before the first ``log``.

    Times never run backwards: they advance by the monotonic clock from the wall time at opening, or from the last
    time in the file if the wall clock has been set back behind it.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.first = path, 0
        with files.storage(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            last_ms = self._mend()
            files.sync_folder(path.parent)
        self._start_ms = max(time.time() * 1000, last_ms) - time.monotonic() * 1000
        self._pending: deque[tuple[int, int, dict[str, float]]] = deque()
        self._known: dict[tuple[int, str], str] | None = None
        self._error: Exception | None = None
        self._wake = threading.Condition()
        self._asked = self._flushed = 0
        self._closing = False
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note metrics of a step; returns at once.

        Raises:
            StorageError: an earlier write failed.
        """
        if self._error is not None:
            raise self._error
        time_ms = int(self._start_ms + time.monotonic() * 1000)
        numbers = {name: float(value) if math.isfinite(value) else math.nan for name, value in metrics.items()}
        self._pending.append((step, time_ms, numbers))

    def flush(self) -> None:
        """Wait until all that was logged is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        with self._wake:
            self._asked += 1
            ticket = self._asked
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._flushed >= ticket or self._error is not None)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Flush, and stop the thread.

        Raises:
            StorageError: the last lines could not be written.
        """
        try:
            self.flush()
        finally:
            with self._wake:
                self._closing = True
                self._wake.notify_all()
            self._thread.join()
            os.close(self._descriptor)

    def _mend(self) -> int:
        """Cut a torn last line off; the time of the last whole one."""
        end, block, last_ms = os.fstat(self._descriptor).st_size, b"", 0
        start = end
        while start > 0 and block.count(b"\n") < 2:
            start = max(0, start - 65536)
            block = os.pread(self._descriptor, end - start, start)
        whole = block[: block.rfind(b"\n") + 1]
        if len(whole) < len(block):
            os.ftruncate(self._descriptor, start + len(whole))
        for reading in _parse(whole.splitlines()[-1:], self.path):
            last_ms = reading.time_ms
        return last_ms

    def _write_loop(self) -> None:
        while not self._closing:
            with self._wake:
                self._wake.wait_for(lambda: self._asked > self._flushed or self._closing, WRITE_S)
                ticket = self._asked
            try:
                with files.storage(self.path):
                    self._write_pending()
                    if ticket > self._flushed:
                        os.fsync(self._descriptor)
            except Exception as error:  # whatever it was, the training thread raises it
                self._error = error
            with self._wake:
                self._flushed = ticket
                self._wake.notify_all()
            if self._error is not None:
                return

    def _write_pending(self) -> None:
        lines = []
        while self._pending:
            step, time_ms, metrics = self._pending.popleft()
            if self._known is None:
                self._known = self._replayed()
            new = {name: value for name, value in metrics.items() if self._known.pop((step, name), "") != repr(value)}
            if new:
                line: dict[str, Any] = {"step": step, "time_ms": time_ms, "metrics": new}
                if not all(map(math.isfinite, new.values())):
                    line["diverged"] = True
                lines.append(strict.dumps(line, separators=(",", ":")))
        content = memoryview("".join(f"{line}\n" for line in lines).encode())
        while content:
            content = content[os.write(self._descriptor, content) :]

    def _replayed(self) -> dict[tuple[int, str], str]:
        """What the file already holds of the steps that this attempt runs again."""
        with self.path.open("rb") as file:
            return {
                (reading.step, reading.name): repr(reading.value)
                for reading in _parse(file, self.path)
                if reading.step >= self.first
            }
