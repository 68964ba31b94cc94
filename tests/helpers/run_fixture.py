"""What the tests of a run's folder share: a small file system, and processes that are killed."""

import multiprocessing
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

MEGABYTE = 2**20


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes at ``folder``."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Use up all room; removing the file returned gives it back."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    """A process of its own that runs ``target(report, *arguments)``; what it sends to ``report`` is received here."""
    context = multiprocessing.get_context("fork")  # imports are paid once, so that dozens of kills take seconds
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(there, *arguments))
    process.start()
    there.close()
    return process, here


class Fuse:
    """A child's end of the reports; the first one lights the fuse.

    The kernel ends the process as ``kill -9`` does, since nothing handles its SIGALRM. Its own timer, not one of the
    parent: while a busy machine lets the child wait, it gets no further.
    """

    def __init__(self, report: Connection, seconds: float) -> None:
        self.report, self.seconds = report, max(seconds, 1e-6)

    def send(self, what: Any) -> None:
        self.report.send(what)
        if self.seconds:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's handler came with the fork
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
            self.seconds = 0.0

    def close(self) -> None:
        self.report.close()


def with_fuse(report: Connection, seconds: float, target: Callable[..., None], *arguments: object) -> None:
    target(Fuse(report, seconds), *arguments)


def kill_after(seconds: float, target: Callable[..., None], *arguments: object) -> list[Any]:
    """Run ``target`` as above and end it, unasked, so many seconds after its first report; all that it reported."""
    process, report = start(with_fuse, seconds, target, *arguments)
    reports = []
    try:
        while True:
            reports.append(report.recv())
    except (OSError, EOFError):  # whole, or in the middle of a report
        process.join()
        assert process.exitcode in {0, -signal.SIGALRM}
        return reports


def run_through(target: Callable[..., None], *arguments: object) -> None:
    """Run ``target`` as above to its end."""
    process, report = start(target, *arguments)
    process.join()
    assert process.exitcode == 0
    report.close()
