"""Two runs side by side, and a list in which two runs that differ look different."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from tracking_fixture import make, set_status

from study.cli import main as cli
from study.config.reading import merge, resolve
from study.run import export, provenance
from study.sweep.grid import scale_overlay


def single(runs: Path, lr: float, knn: float, commit: str = "0123456789abcdef") -> Path:
    """A run of `study train --scale smoke optimiser.lr=…`."""
    config = resolve(merge(scale_overlay("smoke"), {"optimiser.lr": lr}), "test")
    folder = make(runs).rename(runs / config.signature)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    set_status(folder, signature=folder.name, final={"knn": knn, "linear": 0.5})
    provenance.write(folder, provenance.read(folder) | {"commit": commit})
    return folder


def test_runs_that_differ_look_different(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for lr in (30.0, 1000.0):
        single(tmp_path, lr, 0.5)
    assert cli.main(["runs", "list", "--runs-dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found] == ["smoke lr=1000 seed=0", "smoke lr=30 seed=0"]
    assert [(run["from_scale"], run["difference"]) for run in found] == [
        ("smoke", "optimiser.lr=1000"),
        ("smoke", "optimiser.lr=30"),
    ]
    for columns, seen in (("160", True), ("100", False)):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli.main(["runs", "list", "--runs-dir", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert ("smoke: optimiser.lr=30" in out) == seen and "smoke lr=30" in out


@pytest.mark.parametrize("exported", [False, True])
def test_a_diff_shows_keys_code_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str], exported: bool) -> None:
    runs, out = tmp_path / "runs", tmp_path / "results"
    one, other = single(runs, 30.0, 0.61), single(runs, 1000.0, 0.25, commit="fedcba")
    if exported:
        export.export(runs, out, ["train"])
        shutil.rmtree(runs)
    words = ["runs", "diff", one.name[:6], other.name, "--runs-dir", str(runs), "--files", str(out)]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [one.name, other.name] and found["params"] == {"optimiser.lr": [30.0, 1000.0]}
    assert found["code"] == {"study.commit": ["0123456789abcdef", "fedcba"], "study.dirty": ["true", "true"]}
    assert found["final"] == {"knn": [0.61, 0.25], "linear": [0.5, 0.5]}
    assert cli.main(words) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"optimiser.lr 30 1000", "commit 0123456789abcdef fedcba", "kNN (%) 61.0 25.0 -36.0 points"} <= set(shown)
    assert cli.main(["runs", "diff", one.name, "nope", "--runs-dir", str(runs), "--files", str(out)]) == 2
