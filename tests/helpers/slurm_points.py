"""A small sweep, and a package whose trainer is a stand-in, for the tests of the launcher."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from study.slurm import snapshot
from study.sweep import grid
from study.sweep.grid import Sweep

HERE = Path(__file__).parent


def sweep(folder: Path, count: int, *, probes: int = 0, name: str = "try") -> Sweep:
    """Pre-trainings of ``count`` seeds; with ``probes``, each is followed by as many with settings of their own."""
    axes = {"probe.epochs": [n + 1 for n in range(probes)]} if probes else {"m": [0.999]}
    (folder / "scales").mkdir(parents=True, exist_ok=True)
    (folder / "scales" / "smoke.yaml").write_text("{}")
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"name": name, "title": name, "axes": axes, "seeds": list(range(count))}))
    return grid.load(path, "smoke")


def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package with the stand-in trainer, for the snapshots to be taken from."""
    copy = tmp_path / "code" / "study"
    shutil.copytree(snapshot.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "fake_trainer" / "single.py", copy / "launch" / "single.py")
    monkeypatch.setattr(snapshot, "PACKAGE", copy)
    return copy


def behave(runs_dir: Path, behaviour: Mapping[str, Mapping[str, Any]]) -> None:
    """What the stand-in does with each point; three steps by default."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    (runs_dir / "behaviour.json").write_text(json.dumps(behaviour))


def steps(runs_dir: Path, signature: str) -> list[int]:
    """The steps that the stand-in took, over all attempts."""
    return [int(line) for line in (runs_dir / signature / "steps.txt").read_text().split()]
