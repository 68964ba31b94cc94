"""Real runs, what befalls them, and what they must show afterwards: for tests/torture.py and its tests."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from study.config.reading import merge, parse_overrides, resolve
from study.config.schema import Config
from study.run import checkpoint, facts, journal, status
from study.sweep.grid import scale_overlay
from study.tracking import store, ui

ROOT = Path(__file__).parents[2]
STUDY = (sys.executable, "-m", "study")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != store.VARIABLE} | {
    "STUDY_HEARTBEAT_S": "0.05",
    "OMP_NUM_THREADS": "1",
}
MECHANISMS = {
    "queue": ("dictionary.K=96",),  # a batch of 64 does not divide it
    "bank": ("dictionary.kind=bank", "encoder.bn=split"),
    "in-batch": ("dictionary.kind=in-batch", "dictionary.K=null"),
}

LONG = ("optimiser.epochs=12", "evaluation.every_epochs=4", "consistency.every_steps=16")
"""96 steps, two evaluations on the way and one at the end."""


@dataclass(frozen=True)
class Trainee:
    """A point at scale smoke, and the `study train` of it."""

    runs_dir: Path
    overrides: tuple[str, ...]

    @cached_property
    def config(self) -> Config:
        return resolve(merge(scale_overlay("smoke"), parse_overrides(self.overrides)), "torture")

    @property
    def folder(self) -> Path:
        return self.runs_dir / self.config.signature

    def start(self, program: Sequence[str] = STUDY) -> "subprocess.Popen[str]":
        """A new attempt; it saves a checkpoint ten times a second."""
        options = ("--runs-dir", str(self.runs_dir), "--threads", "1", "--checkpoint-every", "0.1")
        command = (*program, "train", "--scale", "smoke", *self.overrides, *options)
        return subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def finish(self, program: Sequence[str] = STUDY) -> str:
        """An attempt that is left alone; what it said."""
        process = self.start(program)
        said = process.communicate()[1]
        assert process.returncode == 0, said
        return said

    def reached(self, process: "subprocess.Popen[str]", step: float) -> bool:
        """Wait until this attempt has done so many steps; False if it ended before."""
        while process.poll() is None:
            known = status.read(self.folder)
            if known is not None and known.pid == process.pid and known.phase is not None and known.step >= step:
                return True
            time.sleep(0.005)
        return False

    def bits(self) -> dict[str, Any]:
        """All that the run ended with, leaf by leaf: weights, dictionary, optimiser, journal and evaluations."""

        def warn(line: str) -> None:
            raise AssertionError(line)

        saved, known = checkpoint.latest(self.folder / "checkpoints", self.folder.name, warn), status.read(self.folder)
        assert saved is not None and known is not None and known.state == "finished"
        found: dict[str, Any] = {"step": saved[0], **{f"final {name}": repr(x) for name, x in known.final.items()}}
        found |= {f"{r.name} at {r.step}": repr(r.value) for r in journal.read(self.folder / "metrics.jsonl")}

        def walk(name: str, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = value.dtype, value.shape, hashlib.sha256(content).hexdigest()
            elif isinstance(value, dict | list | tuple):
                for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                    walk(f"{name}.{key}", entry)
            else:
                found[name] = repr(value)

        walk("state", saved[1])
        return found

    def differs(self, other: "Trainee") -> list[str]:
        """What the two runs do not have in common to the bit."""
        here, there = self.bits(), other.bits()
        return sorted(name for name in {*here, *there} if here.get(name) != there.get(name))


def tracked_points(uri: str, runs_dir: Path) -> dict[str, int]:
    """What a store has of a folder of runs: each value of each metric exactly once, with its step and time?"""
    from mlflow import MlflowClient

    client = MlflowClient(uri, uri)
    wanted: Counter[tuple[Any, ...]] = Counter()
    again = 0  # what a journal itself holds twice
    for folder in facts.folders(runs_dir):
        readings = journal.read(folder / "metrics.jsonl")
        again += len(journal.tail(folder / "metrics.jsonl")[0]) - len(readings)
        known = facts.read(folder, facts.params(folder))
        wanted.update((folder.name, *point.key) for point in facts.points(known, readings))
    held: Counter[tuple[Any, ...]] = Counter()
    runs: list[tuple[str, str]] = []
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], max_results=1000):
            runs.append((experiment.name, run.info.status))
            for name in run.data.metrics:
                for point in client.get_metric_history(run.info.run_id, name):
                    key = facts.Point(name, point.step, point.value, point.timestamp).key
                    held[run.data.tags["study.signature"], *key] += 1
    return {
        "runs": len(runs),
        "in Default": sum(experiment == "Default" for experiment, _ in runs),
        "not FINISHED": sum(state != "FINISHED" for _, state in runs),
        "points": wanted.total(),
        "lost": (wanted - held).total(),
        "doubled": (held - wanted).total() + again,
    }


class Server:
    """A real `mlflow server` of a sqlite store on loopback."""

    def __init__(self, kept: store.Store) -> None:
        with socket.socket() as probe:  # a port that nobody counts up to, since it is free while the server is down
            probe.bind((ui.HOST, 0))
            port = probe.getsockname()[1]
        self.uri = f"http://{ui.HOST}:{port}"
        self.command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        self.command += ["--host", ui.HOST, "--port", str(port), "--backend-store-uri", kept.uri]
        self.command += ["--artifacts-destination", str(kept.artifacts)]
        self.log = kept.runs_dir / "server.log"
        kept.runs_dir.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        environment = ENVIRONMENT | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        while self.process.poll() is None:
            with suppress(OSError), ui.DIRECT.open(f"{self.uri}/health", timeout=10):
                return
            time.sleep(0.1)
        raise RuntimeError(self.log.read_text())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Watcher:
    """`study runs sync --watch` beside the runs; it may be killed and started again."""

    def __init__(self, runs_dir: Path, uri: str) -> None:
        self.command = [*STUDY, "runs", "sync", "--watch", "--interval", "0.5", "--json"]
        self.command += ["--runs-dir", str(runs_dir), "--uri", uri]
        runs_dir.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """End it with its last complete pass."""
        self.process.send_signal(signal.SIGINT)
        said = self.process.communicate()[1]
        assert self.process.returncode == 0, said

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


@dataclass
class Pace:
    """Training of one run between two looks at it: steps, seconds, and seconds in which it waited for a free core."""

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0


@contextmanager
def paces(runs_dir: Path) -> Iterator[dict[str, Pace]]:
    """The pace of each run that trains meanwhile, by signature.

    Waiting for a core that other processes keep busy says nothing of the trainer, so Linux's own count of it is kept.
    """
    found: dict[str, Pace] = {}
    first: dict[str, tuple[int, float, float]] = {}
    left = threading.Event()

    def look() -> None:
        while not left.wait(0.05):
            for path in runs_dir.glob("*/status.json"):
                known = status.read(path.parent)
                if known is None or known.phase != "train" or known.state != "running" or known.step < 1:
                    continue
                with suppress(OSError):
                    waited = int(Path(f"/proc/{known.pid}/schedstat").read_text().split()[1]) / 1e9
                    now = known.step, known.heartbeat, waited
                    since = first.setdefault(path.parent.name, now)
                    found[path.parent.name] = Pace(*(new - old for new, old in zip(now, since, strict=True)))

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield found
    finally:
        left.set()
        watch.join()
