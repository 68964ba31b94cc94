"""From the images to the report through the command line: a sweep, its MLflow store, the exported runs, the pages."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from study.run import export, journal
from study.sweep import grid

ROOT = Path(__file__).parents[1]
SWEEP = "sweeps/momentum.yaml"


def study(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "study", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The momentum ablation at scale smoke, trained, exported and reported."""
    folder = tmp_path_factory.mktemp("sweep")
    runs = ("--runs-dir", str(folder / "runs"))
    study("sweep", "submit", SWEEP, "--scale", "smoke", "--cluster", "local", "--wait", *runs)
    study("runs", "export", "--out", str(folder / "exported"), *runs)
    study("report", "--runs", str(folder / "exported"), "--out", str(folder / "results"))
    return folder


def test_every_point_is_one_finished_run_in_mlflow(swept: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{swept}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("momentum-smoke")
    assert experiment is not None
    assert client.search_runs(["0"]) == [], "a run has landed in Default"
    runs = {run.data.tags["study.signature"]: run for run in client.search_runs([experiment.experiment_id])}
    points = grid.load(ROOT / SWEEP, "smoke").points
    assert sorted(runs) == sorted(point.signature for point in points)
    for point in points:
        run = runs[point.signature]
        assert run.info.status == "FINISHED" and run.info.run_name == point.name
        assert run.data.tags["study.attempt"] == "1" and run.data.tags["mlflow.source.git.commit"]
        assert run.data.params["optimiser.batch"] == str(point.config.optimiser.batch)
        assert run.inputs.dataset_inputs[0].dataset.name == "fashion-mnist"
        kept = journal.read(swept / "runs" / point.signature / "metrics.jsonl")
        for name in {reading.name for reading in kept}:
            history = client.get_metric_history(run.info.run_id, name)
            assert sorted((m.step, m.value, m.timestamp) for m in history) == [
                (reading.step, reading.value, reading.time_ms) for reading in kept if reading.name == name
            ]


def test_the_report_holds_what_was_measured(swept: Path) -> None:
    runs, metrics = export.load(swept / "exported")
    points = grid.load(ROOT / SWEEP, "smoke").points
    assert sorted(runs["signature"]) == sorted(point.signature for point in points)
    assert len(metrics[metrics["name"] == "train/loss"]) == sum(map(int, runs["steps"]))
    with (swept / "results/smoke/tables/momentum.csv").open() as file:
        rows = {row["m"]: row for row in csv.DictReader(file)}
    finals = {run.name: json.loads(run.final) for run in runs.itertuples()}
    assert [rows[m]["paper"] for m in ("0", "0.9", "0.99", "0.999")] == ["fails", "55.2", "57.8", "59.0"]
    assert float(rows["0.99"]["knn"]) == pytest.approx(finals["m=0.99 seed=0"]["knn"], abs=5e-5)
    assert float(rows["raw pixels"]["knn"]) == pytest.approx(finals["raw pixels seed=0"]["knn"], abs=5e-5)
    claims = json.loads((swept / "results/smoke/claims.json").read_text())
    assert "holds" not in json.dumps(claims), "a scale of seconds decides nothing"


def test_a_second_submission_trains_nothing(swept: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in swept.glob("runs/*/metrics.jsonl")}
    runs = ("--runs-dir", str(swept / "runs"))
    study("sweep", "submit", SWEEP, "--scale", "smoke", "--cluster", "local", "--wait", *runs)
    assert before == {path: path.stat().st_mtime_ns for path in swept.glob("runs/*/metrics.jsonl")}
    plan = json.loads(study("sweep", "plan", SWEEP, "--scale", "smoke", "--json", *runs))
    assert {point["state"] for point in plan["points"]} == {"done"}


def test_the_report_is_made_again_to_the_byte(swept: Path) -> None:
    study("report", "--runs", str(swept / "exported"), "--out", str(swept / "again"))
    first, second = (
        {path.relative_to(swept / out): path.read_bytes() for path in (swept / out).rglob("*") if path.is_file()}
        for out in ("results", "again")
    )
    assert first == second and len(first) > 6


def test_help_is_quick_and_every_command_teaches() -> None:
    """`study --help` imports none of the heavy packages; the time itself is in `make bench`."""
    code = (
        "import sys\nfrom study.cli.main import parser\nparser().format_help()\n"
        "print(sorted({'torch', 'mlflow', 'pandas', 'numpy', 'pydantic', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    rooms = ("train", "report", "data get", "encoder export", "encoder probe", "bench", "runs list")
    for command in (*rooms, "sweep plan", "sweep submit", "sweep status"):
        assert "study" in study(*command.split(), "--help")


def test_the_notebook_runs_on_the_committed_runs() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    cells = json.loads((ROOT / "notebooks/runs.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    names: dict[str, object] = {}
    exec(compile(code, "runs.ipynb", "exec"), names)
    assert len(names["table"]) >= 5  # type: ignore[arg-type]


@pytest.mark.parametrize("command", [["report", "--out", "{}"], ["sweep", "plan", SWEEP, "--scale", "cpu"], ["--help"]])
def test_no_command_fails_over_a_character_that_the_terminal_lacks(command: list[str], tmp_path: Path) -> None:
    """Old clusters: ``LC_ALL=C`` and no UTF-8 mode; × and θ and ± become ?."""
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [word.format(tmp_path) for word in command]
    done = subprocess.run([sys.executable, "-m", "study", *words], cwd=ROOT, env=ascii_only, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr and done.stdout.isascii()
