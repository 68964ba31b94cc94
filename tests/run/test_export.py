"""Exported runs: the same bytes for the same runs, nothing private in them, and a store filled from them is equal."""

import io
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tracking_fixture import START_S, fresh_store, held, line, make, same, set_status, sweep

from study.cli import main as cli
from study.errors import UserError
from study.run import export, listing
from study.tracking import imports
from study.tracking.mirror import Mirror
from study.tracking.reconcile import reconcile


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs: finished, failed, and diverged with readings that are not finite."""
    folder = tmp_path / "runs"
    folders = [
        make(folder, 0),
        make(folder, 1, state="failed", error="OSError: /secret/path", final={}),
        make(folder, 2, final={"knn": float("nan")}),
    ]
    with (folders[2] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "time_ms": 5, "metrics": {"train/loss": NaN, "train/lr": -Infinity}}\n')
    sweep(folder, folders)
    return folder


def test_the_same_runs_give_the_same_bytes_wherever_they_lie(runs: Path, tmp_path: Path) -> None:
    first = [path.read_bytes() for path in export.export(runs, tmp_path / "a")]
    shutil.copytree(runs, tmp_path / "elsewhere" / "runs")
    (tmp_path / "elsewhere" / "runs" / next(runs.glob("*/config.yaml")).parent.name / "mirror.json").write_text(
        "{}"
    )  # mirrored
    second = [path.read_bytes() for path in export.export(tmp_path / "elsewhere" / "runs", tmp_path / "b")]
    assert first == second and len(first) == 2


def test_an_unchanged_file_is_left_alone_and_a_changed_one_is_not(runs: Path, tmp_path: Path) -> None:
    paths = export.export(runs, tmp_path / "out")
    before = [path.stat().st_mtime_ns for path in paths]
    assert [path.stat().st_mtime_ns for path in export.export(runs, tmp_path / "out")] == before
    with next(runs.glob("*/metrics.jsonl")).open("a") as file:
        file.write(line(30, {"train/loss": 1.0}))
    after = [path.stat().st_mtime_ns for path in export.export(runs, tmp_path / "out")]
    assert after[0] == before[0] and after[1] != before[1]


def test_rows_are_sorted_complete_and_name_no_machine(runs: Path, tmp_path: Path) -> None:
    for path in export.export(runs, tmp_path / "out"):
        content = str(pq.read_table(path).to_pydict())
        assert not any(secret in content for secret in ("secret", "node1", "7_0", str(tmp_path)))
    rows, metrics = export.load(tmp_path / "out")
    assert list(rows.signature) == sorted(rows.signature) and len(rows) == 3
    keys = list(zip(metrics.signature, metrics.name, metrics.step, strict=True))
    assert keys == sorted(keys) and len(keys) == 3 * 40 + 2
    finished = rows[rows.state == "finished"].iloc[0]
    assert (finished.sweep, finished.scale, finished.metric, finished.steps) == ("momentum", "smoke", "knn", 20)
    assert json.loads(finished.params)["dictionary.K"] == 512 and json.loads(finished.labels) == {"m": 0.99}
    assert finished.started_ms == round(START_S * 1000)
    exact = metrics[(metrics.name == "train/loss") & (metrics.signature == finished.signature)]
    assert 8.0 / 3 + finished.seed in set(exact.value)


def test_a_run_of_two_sweeps_is_loaded_once_for_each_with_one_history(runs: Path, tmp_path: Path) -> None:
    folders = sorted(path.parent for path in runs.glob("*/config.yaml"))
    sweep(runs, folders[:1], name="mechanisms")
    paths = export.export(runs, tmp_path / "out")
    assert [path.name for path in paths[::2]] == ["mechanisms-smoke.runs.parquet", "momentum-smoke.runs.parquet"]
    rows, metrics = export.load(tmp_path / "out")
    assert len(rows) == 4 and not metrics.duplicated(["signature", "name", "step"]).any()


def test_lone_runs_are_exported_when_asked(runs: Path, tmp_path: Path) -> None:
    make(runs, 9)
    assert len(export.export(runs, tmp_path / "out")) == 2
    (path, _) = export.export(runs, tmp_path / "out", ["train"])
    assert path.name == "train.runs.parquet" and pq.read_table(path).num_rows == 1
    with pytest.raises(UserError, match=r"sweep = nope: allowed is momentum-smoke, train"):
        export.export(runs, tmp_path / "out", ["nope"])


def test_a_store_filled_from_files_equals_one_synced_from_folders(runs: Path, tmp_path: Path) -> None:
    export.export(runs, tmp_path / "out")
    from_folders, from_files = fresh_store(tmp_path / "one"), fresh_store(tmp_path / "two")
    assert Mirror(runs, from_folders.uri).sync().complete
    report = imports.fill(tmp_path / "out", from_files)
    assert report.complete and report.created == 3
    synced, imported = (held(one.uri, private=False) for one in (from_folders, from_files))
    assert same(synced, imported)
    again = imports.fill(tmp_path / "out", from_files)
    assert (again.created, again.updated, again.points, again.removed) == (0, 0, 0, 0)
    assert held(from_files.uri, private=False) == imported


def test_an_interrupted_import_is_completed_and_a_changed_run_replaced(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from study.tracking.tracker import Tracker, Unreachable

    export.export(runs, tmp_path / "out")
    target = fresh_store(tmp_path / "store")
    log, count = Tracker.log, 0

    def cut(self: Tracker, run_id: str, points: list) -> None:
        nonlocal count
        count += 1
        log(self, run_id, points[:5] if count == 2 else points)
        if count == 2:
            raise Unreachable("cut")

    monkeypatch.setattr(Tracker, "log", cut)
    assert "cut" in str(imports.fill(tmp_path / "out", target).error)
    assert imports.fill(tmp_path / "out", target).complete
    found = held(target.uri)
    assert sorted(len(run["points"]) for run in found.values()) == [40, 40, 41]
    folder = next(path for path in runs.glob("*") if (path / "status.json").exists() and "NaN" not in str(path))
    (folder / "metrics.jsonl").write_text(line(1, {"train/loss": 77.0}))
    export.export(runs, tmp_path / "out")
    report = imports.fill(tmp_path / "out", target)
    assert report.complete and (report.created, report.removed) == (1, 1)
    assert len(held(target.uri)) == 3


def test_a_run_that_has_a_folder_here_is_not_taken_from_a_file(runs: Path, tmp_path: Path) -> None:
    export.export(runs, tmp_path / "out")
    target = fresh_store(tmp_path / "store")
    folder = next(path.parent for path in sorted(runs.glob("*/status.json")))
    set_status(folder, state="killed", attempt=5)
    assert Mirror(runs, target.uri).sync().complete
    before = held(target.uri)
    report = imports.fill(tmp_path / "out", target)
    assert (report.created, report.updated) == (0, 0) and held(target.uri) == before


def test_an_exported_run_shows_instead_of_a_point_that_waits_here(runs: Path, tmp_path: Path) -> None:
    export.export(runs, tmp_path / "out")
    for path in list(runs.glob("*/config.yaml")):
        shutil.rmtree(path.parent)
    target = fresh_store(runs)
    assert Mirror(runs).sync().created == 3
    assert {run["status"] for run in held(target.uri).values()} == {"SCHEDULED"}
    assert imports.fill(tmp_path / "out", target).complete
    found = held(target.uri)
    assert sorted(run["status"] for run in found.values()) == ["FAILED", "FINISHED", "FINISHED"]
    assert Mirror(runs).sync().created == 0 and held(target.uri) == found


@pytest.mark.parametrize("damage", ["missing", "torn", "foreign"])
def test_a_damaged_file_is_named(runs: Path, tmp_path: Path, damage: str) -> None:
    paths = export.export(runs, tmp_path / "out")
    if damage == "missing":
        paths[1].unlink()
    elif damage == "torn":
        paths[1].write_bytes(paths[1].read_bytes()[:-20])
    else:
        shutil.copy(paths[0], paths[1])
    with pytest.raises(UserError, match=r"metrics\.parquet: cannot be read .*study runs export"):
        export.load(tmp_path / "out")
    with pytest.raises(UserError, match=r"holds no \*\.runs\.parquet"):
        export.load(tmp_path)


def test_runs_are_listed_from_folders_and_else_from_files(runs: Path, tmp_path: Path) -> None:
    export.export(runs, tmp_path / "out")
    here, exported = listing.runs(runs, tmp_path / "none"), listing.runs(tmp_path / "none", tmp_path / "out")
    hidden = {"source"}
    assert [{k: repr(v) for k, v in run.items() if k not in hidden} for run in here] == [
        {k: repr(v) for k, v in run.items() if k not in hidden} for run in exported
    ]
    assert [run["state"] for run in here] == ["finished", "failed", "finished"] and here[2]["diverged"]
    shown = listing.one(here[0]["signature"][:6], runs, tmp_path / "none")
    assert shown["history"]["train/loss"]["points"] == 20 and shown["params"]["dictionary.K"] == 512
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(listing.table(here, 80), listing.page(shown, 80))
    assert "m=0.99 seed=0" in console.export_text() and "diverged" not in str(shown["error"])
    with pytest.raises(UserError, match="RUN = nope: no such run"):
        listing.one("nope", runs, tmp_path / "out")


def _states(out: Path) -> dict[str, str]:
    rows, _ = export.load(out)
    return dict(zip(rows.signature, rows.state, strict=True))


def test_a_partial_export_keeps_what_the_file_knows_better(runs: Path, tmp_path: Path) -> None:
    folders = [make(runs, seed) for seed in range(4)]
    sweep(runs, folders)
    out = tmp_path / "out"
    whole = [path.read_bytes() for path in export.export(runs, out)]
    for folder in folders:  # a clone: one finished, one failed, one made but not begun, one never made
        shutil.rmtree(folder)
    make(runs, 0)
    make(runs, 1, state="failed", final={})
    (make(runs, 2) / "status.json").unlink()
    said: list[str] = []
    for _ in range(2):
        assert [path.read_bytes() for path in export.export(runs, out, say=said.append)] == whole
    assert len(said) == 2 and "3 of its 4 runs kept" in said[0]


def test_a_better_run_replaces_and_a_point_that_went_goes(runs: Path, tmp_path: Path) -> None:
    folders = [make(runs, 0), make(runs, 1, state="failed", final={}), make(runs, 2)]
    sweep(runs, folders)
    out = tmp_path / "out"
    export.export(runs, out)
    make(runs, 0, final={"knn": 0.9})
    make(runs, 1, final={"knn": 0.8})
    shutil.rmtree(folders[2])
    sweep(runs, folders[:2])
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match=r"momentum-smoke.*: 1 finished run is no point of .* allowed is --drop"):
        export.export(runs, out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    said: list[str] = []
    export.export(runs, out, drop=True, say=said.append)
    rows, metrics = export.load(out)
    found = {row.signature: json.loads(row.final) for row in rows.itertuples()}
    assert found == {folders[0].name: {"knn": 0.9}, folders[1].name: {"knn": 0.8}}
    assert set(metrics.signature) == set(found) and "1 left out" in said[0]
    shutil.rmtree(folders[1])
    export.export(runs, out)
    assert _states(out)[folders[1].name] == "finished"


def test_a_point_that_has_not_begun_is_no_row(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    folders = [make(runs, 0), make(runs, 1), make(runs, 2)]
    sweep(runs, folders)
    (folders[1] / "status.json").unlink()
    shutil.rmtree(folders[2])
    export.export(runs, out)
    assert _states(out) == {folders[0].name: "finished"}


def test_lone_runs_of_the_file_stay_until_a_sweep_has_them(runs: Path, tmp_path: Path) -> None:
    lone = [make(runs, 8), make(runs, 9)]
    export.export(runs, tmp_path / "out", ["train"])
    shutil.rmtree(lone[0])
    export.export(runs, tmp_path / "out", ["train"])
    assert set(_states(tmp_path / "out")) == {folder.name for folder in lone}
    sweep(runs, lone[:1], name="batch")
    export.export(runs, tmp_path / "out", ["train"])
    assert set(_states(tmp_path / "out")) == {lone[1].name}


def test_an_imported_run_that_a_person_deleted_stays_so_until_it_is_asked_for(runs: Path, tmp_path: Path) -> None:
    export.export(runs, tmp_path / "out")
    target = fresh_store(tmp_path / "store")
    assert imports.fill(tmp_path / "out", target).complete
    from mlflow import MlflowClient

    whole = held(target.uri)
    MlflowClient(target.uri, target.uri).delete_run(next(iter(whole.values()))["id"])
    notes = [imports.fill(tmp_path / "out", target).notes for _ in range(2)]
    assert "`study runs import --restore`" in notes[0][0] and notes[1] == []
    assert len(held(target.uri)) == len(whole) - 1
    assert imports.fill(tmp_path / "out", target, restore=True).complete and held(target.uri) == whole


def test_reconcile_counts_only_what_it_changed(runs: Path) -> None:
    target = fresh_store(runs)
    assert Mirror(runs).sync().created == 3
    report = reconcile(Mirror(runs))
    assert report.complete and (report.runs, report.updated, report.points) == (3, 0, 0)
    from mlflow import MlflowClient

    finished = next(run["id"] for run in held(target.uri).values() if run["status"] == "FINISHED")
    MlflowClient(target.uri, target.uri).update_run(finished, status="RUNNING")
    assert reconcile(Mirror(runs)).updated == 1


def test_a_run_is_found_by_its_folder_and_a_state_must_exist(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = next(runs.glob("*/config.yaml")).parent
    assert listing.one(f"{folder}/", runs, tmp_path)["signature"] == folder.name
    (tmp_path / "README.md").write_text("")
    for arguments, message in (
        (["show", ""], "study: command line: RUN = : allowed is a signature"),
        (["list", "--state", "nope"], "study: command line: --state = nope: allowed is pending, running, finished"),
        (["list", "--runs-dir", str(tmp_path / "README.md")], "README.md: is a file; allowed is a folder of runs"),
    ):
        assert cli.main(["runs", *arguments[:1], *(["--runs-dir", str(runs)]), *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_piped_table_is_not_cut_and_one_of_80_columns_fits(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = sorted(path.parent for path in runs.glob("*/config.yaml"))
    path = runs / "sweeps" / "momentum-smoke.json"
    path.write_text(path.read_text().replace("m=0.99 seed=1", "a name that is long " * 8 + "seed=1"))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.main(["runs", "list", "--runs-dir", str(runs)]) == 0
    lines = capsys.readouterr().out
    assert all(folder.name in lines for folder in folders) and "a name that is long " * 8 + "seed=1" in lines
    assert "finished" in lines and "knn 0.5" in lines and max(map(len, lines.splitlines())) < 500
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["runs", "list", "--runs-dir", str(runs)]) == 0
    lines = capsys.readouterr().out
    assert max(map(len, lines.splitlines())) <= 80 and "…" in lines and "finished" in lines
