"""What is written for programs is JSON: each of them reads it, whatever became of a run."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweep_files import sweep

from study import strict
from study.cli.main import main


def read(text: str) -> Any:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_what_is_not_finite_is_null_wherever_it_stands() -> None:
    tree = {"a": [1.5, math.nan, (math.inf, {"b": -math.inf})], "c": None, "d": True, "e": 3}
    assert read(strict.dumps(tree)) == {"a": [1.5, None, [None, {"b": None}]], "c": None, "d": True, "e": 3}
    assert math.isnan(strict.number(None)) and strict.number(2) == 2.0


def test_every_command_that_a_program_reads_gives_json_of_a_run_that_diverged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = sweep(tmp_path, "axes: {optimiser.lr: [1.0e30]}\n")
    (point,) = found.points
    runs = ("--runs-dir", str(tmp_path / "runs"))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(point.config.model_dump(mode="json")))

    def said(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words, *runs, "--json"]) == 0
        return read(capsys.readouterr().out)

    trained = said("train", str(config), "--threads", "1")
    assert trained["diverged"] >= 1 and trained["final"]["knn"] is None
    (listed,) = said("runs", "list", "--state", "diverged")
    assert said("runs", "list", "--state", "finished") == []
    shown = said("runs", "show", point.signature)
    assert listed["diverged"] == shown["diverged"] == trained["diverged"]
    assert listed["result"] is None and shown["history"]["train/loss"]["last"] is None
    for verb in ("plan", "status"):
        (row,) = said("sweep", verb, str(tmp_path / "small.yaml"), "--scale", "tiny")["points"]
        assert (row["state"], row["diverged"], row["final"]["knn"]) == ("diverged", trained["diverged"], None)
    folder = tmp_path / "runs" / point.signature
    read((folder / "status.json").read_text())
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        read(line)
