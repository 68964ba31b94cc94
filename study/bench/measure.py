"""Measuring: sides that take turns, rows that say what came out."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from study.data import images
from study.run import provenance
from study.train.device import pick_device

TRAIN, TEST = 50_000, 10_000
"""Images of the bench's own data set: random ones, 32×32, three colours, ten classes that differ by their mean."""
DATA = "bench"
PIECE = 10_000
"""Images that are made at once."""


@dataclass
class Bench:
    """What a group measures with, and the rows that it has made."""

    group: str
    folder: Path
    device: torch.device
    repeats: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        name: str,
        samples: Sequence[float] | np.ndarray,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        note: str = "",
        **more: Any,
    ) -> None:
        """Add a row.

        Args:
            name: of the figure.
            samples: one value a repeat; the row holds their median, and the smallest and the largest as spread.
            unit: of the value; ``""`` for a ratio.
            at_least, at_most: the goal, if there is one.
            note: what the figure cannot say itself.
            more: further keys of the row.
        """
        value = float(np.median(samples))
        goal = f"≥ {at_least:g}" if at_least is not None else f"≤ {at_most:g}" if at_most is not None else None
        met = None if goal is None else value >= at_least if at_least is not None else value <= (at_most or 0.0)
        self.rows.append(
            {
                "group": self.group,
                "name": name,
                "value": _digits(value),
                "unit": unit,
                "goal": goal,
                "met": met,
                "n": len(samples),
                "spread": [_digits(float(np.min(samples))), _digits(float(np.max(samples)))],
                "machine": machine(self.device),
                "load": round(os.getloadavg()[0], 1),
                "note": note,
                **more,
            }
        )


def _digits(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def machine(device: torch.device) -> str:
    """What the figures were measured on."""
    cores = len(os.sched_getaffinity(0))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    return f"{name}, {cores} cores, torch {metadata.version('torch')}"


@cache
def _cpu() -> str:
    return str(provenance.collect([])["cpu"])


def take_turns(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, np.ndarray]:
    """Seconds (repeats,) of each side, A B A B …, after one turn of each that is not counted."""
    for side in sides.values():
        side()
    turns = [[side() for side in sides.values()] for _ in range(repeats)]
    return dict(zip(sides, np.array(turns).T, strict=True))


def timed(work: Callable[[], object], device: torch.device | None = None) -> Callable[[], float]:
    """A side that does ``work`` and says how many seconds that took, a GPU's included."""

    def side() -> float:
        began = time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return side


WEIGH = """
import os, sys
child = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[2:]], os.environ)
_, code, usage = os.wait4(child, 0)
os.write(int(sys.argv[1]), str(usage.ru_maxrss).encode())
sys.exit(os.waitstatus_to_exitcode(code) % 256)
"""
"""A small process between the bench and the command: Linux counts what the parent held at the fork as the child's peak,
and the bench holds torch."""


@dataclass(frozen=True)
class Done:
    """A command that has run."""

    seconds: float
    peak_bytes: int
    stdout: str


def command(*arguments: str, cwd: Path | None = None, path: Path | None = None) -> Done:
    """Run ``study`` with these arguments as a person would, in a process of its own.

    Args:
        arguments: of the command line.
        cwd: working directory.
        path: a folder to look for programs in first.

    Raises:
        RuntimeError: it failed.
    """
    environment = dict(os.environ)
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    began = time.perf_counter()
    reading, writing = os.pipe()
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", WEIGH, str(writing), "-m", "study", *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=[writing],
    )
    seconds = time.perf_counter() - began
    os.close(writing)
    with os.fdopen(reading) as peak:
        kilobytes = int(peak.read())
    if process.returncode:
        raise RuntimeError(f"study {' '.join(arguments)}: exit code {process.returncode}\n{process.stdout}")
    return Done(seconds, kilobytes * 1024, process.stdout)


@contextmanager
def workplace(folder: Path) -> Iterator[torch.device]:
    """The bench's data set in ``folder``, made known to this process and its children; gives the device."""
    before = os.environ.get("STUDY_DATA")
    os.environ["STUDY_DATA"] = str(folder / "data")
    try:
        make_data(folder / "data")
        yield pick_device("auto")
    finally:
        if before is None:
            del os.environ["STUDY_DATA"]
        else:
            os.environ["STUDY_DATA"] = before


def make_data(root: Path) -> None:
    """Pack the bench's images: the same at each run, of no interest but their shape."""
    random = np.random.default_rng(0)
    means = random.integers(64, 192, (10, 3, 32, 32), dtype=np.uint8)

    def chunks(n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, n, PIECE):
            labels = np.arange(start, min(start + PIECE, n)) % 10
            noise = random.integers(0, 64, (len(labels), 3, 32, 32), dtype=np.uint8)
            yield means[labels] + noise, labels

    names = [str(label) for label in range(10)]
    with images.staging(DATA, root) as temporary:
        images.store(temporary, DATA, root, names, chunks(TRAIN), chunks(TEST), lambda n: None)
