"""The mirror against a real sqlite store and a real `mlflow server`: nothing lost, nothing twice, the status true."""

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from tracking_fixture import START_S, Proxy, fresh_store, held, line, make, same, set_status, sweep

from study.cli import main as cli
from study.errors import UserError
from study.launch import local
from study.run.facts import lone, param
from study.tracking import store, tracker, ui
from study.tracking.mirror import Beside, Mirror, start_mirror
from study.tracking.reconcile import reconcile

FAULTS = ["lose", "drop", 500, 403, 429]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs with an empty store in it."""
    fresh_store(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with ui.server(fresh_store(tmp_path_factory.mktemp("server")), 5600) as address:
        proxy = Proxy(int(address.rpartition(":")[2]))
        yield proxy
        proxy.close()


@pytest.fixture
def proxy(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.setattr(tracker, "PAUSES", (0.0,))
    server.fault, server.requests, server.host, server.body = lambda method, path: None, [], None, b"no"
    return server


def uri(runs: Path) -> str:
    return f"sqlite:///{runs / 'mlflow.db'}"


def artifacts(runs: Path, run_id: str) -> set[str]:
    return {item.path for item in MlflowClient(uri(runs), uri(runs)).list_artifacts(run_id)}


def synced(runs: Path) -> dict:
    report = Mirror(runs).sync()
    assert report.complete, report
    return held(uri(runs))


def test_a_run_is_shown_with_all_that_its_folder_says(runs: Path) -> None:
    folder = make(runs, attempts=2)
    sweep(runs, [folder])
    ((key, run),) = synced(runs).items()
    assert key == ("momentum-smoke", folder.name)
    assert (run["name"], run["status"]) == ("m=0.99 seed=0", "FINISHED")
    assert (run["start"], run["end"]) == (round(START_S * 1000), round(START_S * 1000) + 100_000)
    assert run["params"]["m"] == "0.99" and run["params"]["data.train_images"] == "1000"
    assert run["params"]["probe"] == "null" and run["params"]["optimiser.lr_rule"] == "true"
    expected = {
        "study.signature": folder.name,
        "study.sweep": "momentum",
        "study.scale": "smoke",
        "study.seed": "0",
        "study.attempt": "2",
        "study.hosts": "node1, node2",
        "study.jobs": "7_0, 7_1",
        "arm.m": "0.99",
        "mlflow.source.git.commit": "0123456789abcdef",
        "mlflow.source.git.branch": "main",
        "study.dirty": "true",
    }
    assert expected.items() <= run["tags"].items() and "diverged" not in run["tags"]
    assert run["data"] == [("fashion-mnist", "first-1000")]
    points = {(name, step): (value, stamp) for name, step, value, stamp in run["points"]}
    assert len(points) == 2 * 20 + 1
    assert points["train/loss", 4] == ("2.0", round(START_S * 1000) + 40)
    assert points["knn", 20] == ("0.5", run["end"])
    client = MlflowClient(uri(runs), uri(runs))
    artifacts = {item.path for item in client.list_artifacts(run["id"])}
    assert {"config.yaml", "provenance.json", "provenance.diff"} <= artifacts
    experiment = client.get_experiment_by_name("momentum-smoke")
    assert "moving average" in experiment.tags["mlflow.note.content"]


def test_params_have_one_spelling() -> None:
    values = [None, True, 1e-3, 0.001, 1.0, 10, [0.6, 0.8], "off", "x" * 900]
    texts = ["null", "true", "0.001", "0.001", "1.0", "10", "[0.6, 0.8]", "off", "x" * 500]
    assert [param(value) for value in values] == texts


def test_syncing_again_changes_nothing_even_without_notes(runs: Path) -> None:
    folders = [make(runs, seed) for seed in range(2)]
    sweep(runs, folders)
    first = synced(runs)
    again = Mirror(runs)
    for _ in range(2):
        report = again.sync()
        assert (report.created, report.updated, report.points) == (0, 0, 0)
    for folder in folders:
        (folder / "mirror.json").unlink()
    report = Mirror(runs).sync()
    assert (report.created, report.points) == (0, 0)
    assert held(uri(runs)) == first  # the very same tracked runs


def test_a_growing_journal_is_sent_once_and_a_torn_line_when_it_is_whole(runs: Path) -> None:
    folder = make(runs, steps=3, state="running")
    mirror = Mirror(runs)
    assert mirror.sync().points == 6
    whole = line(4, {"train/loss": 4.0})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(whole[:20])
        file.flush()
        assert mirror.sync().points == 0
        file.write(whole[20:])
    assert mirror.sync().points == 1
    ((_, run),) = held(uri(runs)).items()
    assert run["status"] == "RUNNING" and len(run["points"]) == 7


@pytest.mark.parametrize("step", [4, 5], ids=["an earlier step", "the step last sent"])
def test_a_superseded_value_is_replaced_by_the_newest(runs: Path, step: int) -> None:
    folder = make(runs, steps=5, state="running")
    mirror = Mirror(runs)
    mirror.sync()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(step, {"train/loss": -4.0}, 1_790_000_100_000) + line(6, {"train/loss": 6.0}))
    assert mirror.sync().complete
    ((_, run),) = held(uri(runs)).items()  # which fails on two values of a step
    assert ("train/loss", step, "-4.0", 1_790_000_100_000) in run["points"]
    assert len(run["points"]) == 11


def test_a_step_that_comes_twice_in_what_is_new_is_sent_once(runs: Path) -> None:
    folder = make(runs, steps=5, state="running")
    mirror = Mirror(runs)
    mirror.sync()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(6, {"train/loss": 1.0}) + line(6, {"train/loss": 2.0}, 1_790_000_100_000))
    assert mirror.sync().complete
    ((_, run),) = held(uri(runs)).items()
    assert ("train/loss", 6, "2.0", 1_790_000_100_000) in run["points"] and len(run["points"]) == 11


def test_a_value_that_a_second_attempt_lost_is_taken_back(runs: Path) -> None:
    folder = make(runs, steps=5, state="running")
    mirror = Mirror(runs)
    mirror.sync()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(5, {"train/loss": float("nan")}, 1_790_000_100_000))
    assert mirror.sync().complete
    ((_, run),) = held(uri(runs)).items()
    assert [point[:2] for point in run["points"] if point[1] == 5] == [("train/lr", 5)]


def test_a_journal_that_lost_lines_in_a_power_cut_is_followed(runs: Path) -> None:
    folder = make(runs, steps=5, state="running")
    mirror = Mirror(runs)
    mirror.sync()
    journal = folder / "metrics.jsonl"
    kept = journal.read_text().splitlines(keepends=True)[:3]
    later = [line(step, {"train/loss": 8.0 / step, "train/lr": 0.03}, 1_790_000_200_000) for step in (4, 5)]
    journal.write_text("".join(kept + later))  # the same values, measured later; as many bytes as before
    assert mirror.sync().complete
    ((_, run),) = held(uri(runs)).items()
    assert len(run["points"]) == 10 and ("train/loss", 5, "1.6", 1_790_000_200_000) in run["points"]


@pytest.mark.parametrize(
    ("state", "over", "shown", "end_s"),
    [
        ("finished", {}, "FINISHED", START_S + 100),
        ("failed", {"error": "ValueError: no"}, "FAILED", START_S + 100),
        ("killed", {}, "KILLED", START_S + 100),
        ("scheduled", {}, "SCHEDULED", 0),
        ("running", {}, "RUNNING", 0),
        ("running", {"heartbeat": START_S + 50, "host": "elsewhere"}, "KILLED", START_S + 50),
        ("running", {"pid": 2**22 + 1}, "KILLED", None),
    ],
)
def test_status_is_the_truth(runs: Path, state: str, over: dict, shown: str, end_s: float | None) -> None:
    folder = make(runs, steps=2, state=state)
    set_status(folder, **over)
    ((_, run),) = synced(runs).items()
    assert run["status"] == shown
    assert end_s is None or run["end"] == round(end_s * 1000)


def test_a_continued_run_stays_one_run_and_loses_its_end(runs: Path) -> None:
    folder = make(runs, steps=3, state="failed")
    (folder / "traceback.txt").write_text("Traceback: no\n")
    mirror = Mirror(runs)
    assert mirror.sync().complete
    ((_, failed),) = held(uri(runs)).items()
    client = MlflowClient(uri(runs), uri(runs))
    assert "traceback.txt" in {item.path for item in client.list_artifacts(failed["id"])}
    set_status(folder, state="running", attempt=2)
    assert mirror.sync().complete
    ((_, running),) = held(uri(runs)).items()
    assert (running["id"], running["status"], running["end"]) == (failed["id"], "RUNNING", 0)
    assert running["tags"]["study.attempt"] == "2"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(4, {"train/loss": 2.0}))
    set_status(folder, state="finished", final={"knn": 0.7}, ended=START_S + 300)
    assert mirror.sync().complete
    ((_, finished),) = held(uri(runs)).items()
    assert (finished["id"], finished["status"]) == (failed["id"], "FINISHED")
    assert finished["end"] == round(START_S * 1000) + 300_000 and len(finished["points"]) == 8


@pytest.mark.parametrize("noted", [True, False])
def test_the_traceback_of_an_earlier_attempt_goes_when_the_run_goes_on(runs: Path, noted: bool) -> None:
    folder = make(runs, steps=3, state="failed")
    (folder / "traceback.txt").write_text("Traceback: no\n")
    ((_, failed),) = synced(runs).items()
    (folder / "traceback.txt").unlink()  # as a new attempt does
    if not noted:
        (folder / "mirror.json").unlink()
    set_status(folder, state="finished", attempt=2)
    synced(runs)
    assert artifacts(runs, failed["id"]) == {"config.yaml", "provenance.json", "provenance.diff"}


def test_a_run_that_ended_has_a_figure_which_is_drawn_once(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from study.tracking import curves

    drawn, draw = [], curves.draw
    monkeypatch.setattr(curves, "draw", lambda readings, title: drawn.append(title) or draw(readings, title))
    folder = make(runs, steps=1, state="running")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(2, {"train/excess_loss": -1.0, "knn": float("inf")}))
    mirror = Mirror(runs)
    mirror.sync()
    ((_, run),) = held(uri(runs)).items()
    assert "figures" not in artifacts(runs, run["id"]) and drawn == []
    set_status(folder, state="killed")
    for one in (mirror, mirror, Mirror(runs)):
        assert one.sync().complete
    (folder / "log.txt").write_text("more\n")
    set_status(folder, attempt=2)
    assert mirror.sync().updated == 1
    assert len(drawn) == 1
    client = MlflowClient(uri(runs), uri(runs))
    first = Path(client.download_artifacts(run["id"], "figures/training.png")).read_bytes()
    assert first.startswith(b"\x89PNG") and b"matplotlib" not in first.lower()  # no version, so always the same
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(3, {"train/excess_loss": -2.0}))
    set_status(folder, state="finished", final={})
    assert mirror.sync().complete
    second = Path(client.download_artifacts(run["id"], "figures/training.png")).read_bytes()
    assert len(drawn) == 2 and second != first


def test_files_that_find_no_place_stop_no_numbers_and_are_sent_later(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "PAUSES", ())
    folders = [make(runs, seed, steps=2) for seed in range(2)]
    (runs / "mlflow-artifacts").write_text("")  # no folder can be made there
    mirror = Mirror(runs)
    for _ in range(2):
        report = mirror.sync()
        assert report.error is None and len(report.problems) == 1 and report.problems[0].startswith("artifacts: ")
        found = held(uri(runs)).values()
        assert [(run["status"], len(run["points"])) for run in found] == [("FINISHED", 5)] * len(folders)
    (runs / "mlflow-artifacts").unlink()
    assert mirror.sync().complete
    assert all("config.yaml" in artifacts(runs, run["id"]) for run in held(uri(runs)).values())


def test_one_file_that_fails_stops_neither_the_numbers_nor_the_other_files(runs: Path) -> None:
    folder = make(runs, steps=2)
    (folder / "log.txt").mkdir()
    (folder / "provenance.json").rename(folder / "kept")
    (folder / "provenance.json").mkdir()
    report = Mirror(runs).sync()
    assert len(report.problems) == 2 and all(str(folder) in problem for problem in report.problems)
    ((_, run),) = held(uri(runs)).items()
    assert run["status"] == "FINISHED" and len(run["points"]) == 5
    assert {"config.yaml", "provenance.diff"} <= artifacts(runs, run["id"])


def test_a_label_that_is_no_formula_is_drawn_as_it_is(runs: Path) -> None:
    folder = make(runs, steps=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(2, {"train/excess_loss": -1.0}))
    sweep(runs, [folder])
    record = runs / "sweeps" / "momentum-smoke.json"
    record.write_text(record.read_text().replace("m=0.99", r"$\\bad{$"))
    ((_, run),) = synced(runs).items()
    assert run["name"] == r"$\bad{$ seed=0" and "figures" in artifacts(runs, run["id"])


def test_without_matplotlib_there_is_no_figure_and_no_fault(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else name)
    folder = make(runs, steps=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(2, {"train/excess_loss": -1.0}))
    ((_, run),) = synced(runs).items()
    assert run["status"] == "FINISHED" and "figures" not in artifacts(runs, run["id"])


def test_a_point_that_waits_is_scheduled_and_stays_the_same_run_when_it_starts(runs: Path) -> None:
    folders = [make(runs, seed, steps=2, state="running") for seed in range(3)]
    sweep(runs, folders)
    os.utime(runs / "sweeps" / "momentum-smoke.json", (START_S - 500, START_S - 500))
    key = "momentum-smoke", folders[1].name
    for folder in folders[1:]:
        folder.rename(runs.parent / folder.name)  # two wait
    mirror = Mirror(runs)
    assert mirror.sync().created == 3
    waiting = held(uri(runs))
    assert sorted(run["status"] for run in waiting.values()) == ["RUNNING", "SCHEDULED", "SCHEDULED"]
    assert (waiting[key]["name"], waiting[key]["tags"]["arm.m"]) == ("m=0.99 seed=1", "0.99")
    assert waiting[key]["start"] == round((START_S - 500) * 1000) and not waiting[key]["points"]
    folders[1].mkdir()
    shutil.copy(runs.parent / folders[1].name / "config.yaml", folders[1])  # the pool has begun to start it
    assert mirror.sync().created == Mirror(runs).sync().created == reconcile(Mirror(runs)).created == 0
    assert held(uri(runs)) == waiting
    shutil.rmtree(folders[1])
    (runs.parent / folders[1].name).rename(folders[1])
    assert mirror.sync().complete
    started = held(uri(runs))
    assert (started[key]["id"], started[key]["status"]) == (waiting[key]["id"], "RUNNING")
    assert started[key]["start"] == round(START_S * 1000) and started[key]["params"]["m"] == "0.99"
    assert len(started[key]["points"]) == 4 and started[key]["data"] == [("fashion-mnist", "first-1000")]
    (runs / "mlflow.db").unlink()
    fresh_store(runs)
    assert Mirror(runs).sync().complete
    assert same(started, held(uri(runs)))


def test_a_point_that_left_its_sweep_no_longer_waits_but_keeps_its_run(runs: Path) -> None:
    folders = [make(runs, seed, steps=2) for seed in range(3)]
    sweep(runs, folders)
    shutil.rmtree(folders[2])
    mirror = Mirror(runs)
    mirror.sync()
    record = runs / "sweeps" / "momentum-smoke.json"
    tree = json.loads(record.read_text())
    record.write_text(json.dumps({**tree, "points": tree["points"][:1], "removed": tree["points"][1:]}))
    assert mirror.sync().complete
    found = held(uri(runs))
    assert {signature for _, signature in found} == {folder.name for folder in folders[:2]}
    assert found["momentum-smoke", folders[1].name]["tags"]["study.removed"] == "true"


def test_a_diverged_run_shows_its_curves_up_to_the_step_where_it_says_that_it_did(runs: Path) -> None:
    folder = make(runs, steps=1, state="running")
    mirror = Mirror(runs)
    mirror.sync()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(2, {"train/loss": 3.0}))
        file.write('{"step": 3, "time_ms": 5, "metrics": {"train/loss": Infinity, "train/lr": NaN}}\n')
        file.write('{"step": 4, "time_ms": 5, "metrics": {"train/loss": NaN}}\n')
    set_status(folder, state="finished", final={"knn": float("nan"), "train/loss": float("nan")})
    assert mirror.sync().complete
    ((_, run),) = held(uri(runs)).items()
    assert run["tags"]["diverged"] == "3" and "Diverged at step 3" in run["tags"]["mlflow.note.content"]
    assert {point[:2] for point in run["points"]} == {("train/loss", 1), ("train/loss", 2), ("train/lr", 1)}
    for name in ("train/loss", "knn"):  # as they were sent before, and as another program may
        MlflowClient(uri(runs), uri(runs)).log_metric(run["id"], name, float("nan"), 5, 4)
    report = reconcile(Mirror(runs))
    assert report.complete and report.removed == 1
    assert same({0: run}, {0: next(iter(held(uri(runs)).values()))})
    report = Mirror(runs).sync(deep=True)
    assert (report.points, report.removed) == (0, 0)


def test_a_probe_of_a_diverged_pretraining_has_diverged_where_it_stands(runs: Path) -> None:
    make(runs, steps=0, final={"probe/top1": float("nan")}, step=0)
    ((_, run),) = synced(runs).items()
    assert run["tags"]["diverged"] == "0" and run["points"] == []


def test_a_run_that_is_named_anew_keeps_its_tracked_run(runs: Path) -> None:
    folder = make(runs)
    sweep(runs, [folder])
    ((_, first),) = synced(runs).items()
    record = runs / "sweeps" / "momentum-smoke.json"
    record.write_text(record.read_text().replace("m=0.99 seed=0", "slow seed=0"))
    ((_, again),) = synced(runs).items()
    assert (again["id"], again["name"]) == (first["id"], "slow seed=0")


def test_a_run_of_two_sweeps_stands_in_both_and_a_lone_one_in_neither(runs: Path) -> None:
    shared, alone = make(runs, 0), make(runs, 1)
    sweep(runs, [shared])
    sweep(runs, [shared], name="mechanisms")
    found = synced(runs)
    assert set(found) == {
        ("momentum-smoke", shared.name),
        ("mechanisms-smoke", shared.name),
        ("train", alone.name),
    }


def test_a_replaced_store_is_rebuilt_the_same_by_the_same_mirror(runs: Path) -> None:
    folders = [make(runs, seed) for seed in range(2)]
    sweep(runs, folders)
    mirror = Mirror(runs)
    mirror.sync()
    first = held(uri(runs))
    (runs / "mlflow.db").unlink()
    shutil.rmtree(runs / "mlflow-artifacts")
    fresh_store(runs)
    report = mirror.sync(deep=True)
    assert report.complete and report.created == 2
    assert same(first, held(uri(runs)))


def test_a_run_deleted_in_the_ui_stays_so_until_it_is_asked_for(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deleted, other = make(runs, 0, state="running"), make(runs, 1)
    mirror = Mirror(runs)
    mirror.sync()
    before = held(uri(runs))
    MlflowClient(uri(runs), uri(runs)).delete_run(before["train", deleted.name]["id"])
    with (deleted / "metrics.jsonl").open("a") as file:
        file.write(line(21, {"train/loss": 0.1}))
    assert not mirror.sync().complete  # it trusted its notes, and says what was refused
    (note,) = mirror.sync().notes
    assert note.startswith(f"train: left deleted, as in MLflow: {deleted.name}; `study runs sync --restore` brings")
    words = ["runs", "sync", "--runs-dir", str(runs)]
    for one in (mirror, mirror, Mirror(runs)):  # whether it trusts its notes or not
        report = one.sync()
        assert report.complete and not report.notes, "it was said"
        assert set(held(uri(runs))) == {("train", other.name)}
    assert reconcile(Mirror(runs)).complete and cli.main(words) == 0
    assert set(held(uri(runs))) == {("train", other.name)} and capsys.readouterr().err == ""
    assert cli.main([*words, "--restore"]) == 0
    again = held(uri(runs))["train", deleted.name]
    assert again["id"] == before["train", deleted.name]["id"] and len(again["points"]) == 41
    MlflowClient(uri(runs), uri(runs)).delete_run(again["id"])
    assert len(Mirror(runs).sync().notes) == 1, "another wish"


def test_what_the_mirror_itself_deletes_is_no_wish_of_a_person(runs: Path) -> None:
    folders = [make(runs, seed, steps=2) for seed in range(2)]
    sweep(runs, folders)
    shutil.rmtree(folders[1])
    record = runs / "sweeps" / "momentum-smoke.json"
    whole = record.read_text()
    tree = json.loads(whole)
    synced(runs)
    record.write_text(json.dumps({**tree, "points": tree["points"][:1], "removed": tree["points"][1:]}))
    assert len(synced(runs)) == 1
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write(line(1, {"train/loss": -4.0}, 1_790_000_100_000))
    synced(runs)  # made anew
    record.write_text(whole)
    report = Mirror(runs).sync()
    assert report.created == 1 and not report.notes and len(held(uri(runs))) == 2


def test_a_waiting_point_and_an_experiment_that_a_person_deleted_stay_so(runs: Path) -> None:
    folders = [make(runs, seed, steps=2) for seed in range(2)]
    sweep(runs, folders)
    folders[1].rename(runs.parent / "later")
    ((_, first), (key, waiting)) = sorted(synced(runs).items(), key=lambda item: item[1]["status"])
    client = MlflowClient(uri(runs), uri(runs))
    client.delete_run(waiting["id"])
    assert Mirror(runs).sync().created == 0
    (runs.parent / "later").rename(folders[1])
    assert [run["id"] for run in synced(runs).values()] == [first["id"]]
    client.delete_experiment(client.get_experiment_by_name("momentum-smoke").experiment_id)
    report = Mirror(runs).sync()
    assert report.complete and "left deleted, as in MLflow: the experiment" in report.notes[0]
    assert synced(runs) == {} and Mirror(runs).sync().notes == []
    assert Mirror(runs).sync(restore=True).complete
    assert held(uri(runs))[key]["id"] == waiting["id"] and held(uri(runs))[key]["status"] == "FINISHED"


def test_one_damaged_folder_does_not_hide_the_others(runs: Path) -> None:
    make(runs, 0)
    (make(runs, 1) / "config.yaml").write_text("a: [")
    set_status(make(runs, 2), started="yesterday")
    report = Mirror(runs).sync()
    assert len(report.problems) == 2 and report.error is None
    assert len(held(uri(runs))) == 1


def test_a_read_only_folder_is_mirrored_into_another_store(runs: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    sweep(archive, [make(archive, seed) for seed in range(2)])
    for _ in range(2):
        assert Mirror(archive, into=runs).sync().complete
    assert len(held(uri(runs))) == 2 and not (archive / "mlflow.db").exists()


def _sync_in_process(runs: Path, index: int, results: "multiprocessing.Queue[str]") -> None:
    make(runs, 100 + index)
    results.put(Mirror(runs).sync().json())


def test_processes_that_finish_at_once_into_a_fresh_store_all_succeed(tmp_path: Path) -> None:
    runs, count = tmp_path / "runs", 4
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=_sync_in_process, args=(runs, i, results)) for i in range(count)]
    for worker in workers:
        worker.start()
    reports = [json.loads(results.get(timeout=120)) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(report["error"] is None and not report["problems"] for report in reports)
    assert sum(report["created"] for report in reports) == count
    found = held(uri(runs))
    assert {experiment for experiment, _ in found} == {"train"} and len(found) == count
    assert all(len(run["points"]) == 41 for run in found.values())


def test_doubles_are_merged_and_imported_runs_give_way_to_the_folder(runs: Path) -> None:
    folder = make(runs)
    first = synced(runs)
    client = MlflowClient(uri(runs), uri(runs))
    experiment = client.get_experiment_by_name("train").experiment_id
    for origin in ("mirror", "import"):
        tags = {"study.signature": folder.name, "study.origin": origin}
        client.create_run(experiment, round(START_S * 1000), tags, "double")
    report = Mirror(runs).sync()
    assert report.complete and report.removed == 2
    assert held(uri(runs)) == first
    with store.opened(store.resolve(runs)) as tracked_runs:
        other = make(runs, 1)
        known = tracked_runs.create(
            tracked_runs.experiment(lone(other.name, {}).place), other.name, "x", round(START_S * 1000), "import", "me"
        )
    assert synced(runs)["train", other.name]["id"] != known


def test_of_doubles_the_most_complete_stays_where_no_note_says_which_is_ours(runs: Path) -> None:
    folder = make(runs)
    ((_, first),) = synced(runs).items()
    client = MlflowClient(uri(runs), uri(runs))
    tags = {"study.signature": folder.name, "study.origin": "mirror", "study.started_ms": str(round(START_S * 1000))}
    for start in (-1000, 1000):  # one is older, one is newer
        client.create_run(
            client.get_experiment_by_name("train").experiment_id, round(START_S * 1000) + start, tags, "double"
        )
    (folder / "mirror.json").unlink()
    report = Mirror(runs).sync()
    assert (report.removed, report.points) == (2, 0)
    ((_, kept),) = held(uri(runs)).items()
    assert kept["id"] == first["id"]


def test_the_log_of_a_run_is_sent_when_it_has_ended(runs: Path) -> None:
    folder = make(runs, steps=2, state="running")
    (folder / "log.txt").write_text("begun\n")
    ((_, run),) = synced(runs).items()
    assert "log.txt" not in artifacts(runs, run["id"])  # it grows with every look
    set_status(folder, state="killed")
    synced(runs)
    assert "log.txt" in artifacts(runs, run["id"])


def test_reconcile_mends_a_store_after_accidents(runs: Path) -> None:
    sweep(runs, [make(runs, seed) for seed in range(2)])
    first = synced(runs)
    (id_0, id_1) = (run["id"] for run in first.values())
    client = MlflowClient(uri(runs), uri(runs))
    client.update_run(id_0, status="RUNNING")
    experiment = client.get_experiment_by_name("momentum-smoke").experiment_id
    dead = client.create_run(experiment, 1_700_000_000_000, {"study.signature": "f00"}, "dead").info.run_id
    client.log_metric(dead, "train/loss", 1.0, 1_700_000_005_000, 1)
    alive = client.create_run(experiment, round(time.time() * 1000), {"study.signature": "f01"}, "alive").info.run_id
    with sqlite3.connect(runs / "mlflow.db") as database:
        database.execute("DELETE FROM metrics WHERE run_uuid = ? AND step > 7", (id_1,))
    report = reconcile(Mirror(runs))
    assert report.complete and report.points == 27
    mended = held(uri(runs))
    lost = mended.pop(("momentum-smoke", "f00"))
    assert (lost["id"], lost["status"], lost["end"]) == (dead, "KILLED", 1_700_000_005_000)
    assert mended.pop(("momentum-smoke", "f01"))["id"] == alive
    assert client.get_run(alive).info.status == "RUNNING"
    assert mended == first


# ------------------------------------------------------------------------------------------------- over the network


def test_a_dead_server_is_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "PAUSES", (0.0,))
    make(runs)
    report = Mirror(runs, "http://127.0.0.1:9").sync()
    assert report.error == (
        "--uri = http://127.0.0.1:9: no server answers there (connection refused); start `mlflow server`"
    )


def test_preflight_asks_whether_the_server_takes_our_host_header(tmp_path: Path, proxy: Proxy) -> None:
    store.preflight(store.resolve(tmp_path, proxy.uri))
    proxy.host = "tracker.example.org:5000"
    with pytest.raises(UserError, match="--allowed-hosts") as caught:
        store.preflight(store.resolve(tmp_path, proxy.uri))
    assert "\n" not in str(caught.value)


def test_a_refusal_is_told_as_what_answered_said_it(runs: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    proxy.fault, proxy.body = lambda method, path: 403, b"<html><h1>Access denied</h1> by gate.lab</html>"
    with pytest.raises(UserError) as caught:
        store.preflight(store.resolve(runs, proxy.uri))
    assert str(caught.value).endswith(": the server, or a proxy before it, refuses (403): Access denied by gate.lab")
    monkeypatch.setenv("http_proxy", proxy.uri)
    with pytest.raises(UserError, match="no_proxy with the server's host goes past it"):
        store.preflight(store.resolve(runs, "http://tracker.lab:5000"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_server_loses_and_doubles_nothing(
    runs: Path, proxy: Proxy, fault: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "BATCH", 20)
    folder = make(runs, seed=FAULTS.index(fault), steps=25)
    mirror = Mirror(runs, proxy.uri)
    for path in ("runs/create", "runs/log-batch", "runs/update"):
        count = 0

        def fail(method: str, at: str, path: str = path) -> str | int | None:
            nonlocal count
            count += at.endswith(path)
            return fault if at.endswith(path) and count > 2 * (path == "runs/log-batch") else None

        proxy.fault = fail
        assert mirror.sync().error is not None
    proxy.fault = lambda method, path: None
    assert mirror.sync().complete
    run = held(proxy.uri)["train", folder.name]
    assert run["status"] == "FINISHED" and len(run["points"]) == 51
    assert sum(path.endswith("runs/create") for _, path in proxy.requests) <= (3 if fault != "lose" else 1)
    report = Mirror(runs, proxy.uri).sync(deep=True)
    assert report.complete and (report.points, report.removed) == (0, 0)


def test_values_survive_the_network(runs: Path, proxy: Proxy) -> None:
    folder = make(runs, seed=5000, steps=1, final={"knn": 1 / 3, "linear": float("nan")})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "time_ms": 5, "metrics": {"train/loss": -Infinity, "train/lr": NaN, "x": 1e-310}}\n')
    assert Mirror(runs, proxy.uri).sync().complete
    shutil.copytree(runs, runs.parent / "other")
    assert Mirror(runs).sync().complete
    key = "train", folder.name
    assert [point[:3] for point in held(uri(runs))[key]["points"] if point[0] == "x"] == [("x", 2, "1e-310")]
    over_network, direct = held(proxy.uri)[key], held(uri(runs))[key]
    assert {**over_network, "id": 0} == {**direct, "id": 0}


def test_a_waiting_point_starts_as_the_same_run_over_the_network(runs: Path, proxy: Proxy) -> None:
    folder = make(runs, seed=7000, steps=2, state="running")
    sweep(runs, [folder])
    folder.rename(runs.parent / "later")
    mirror = Mirror(runs, proxy.uri)
    mirror.sync()
    key = "momentum-smoke", folder.name
    waiting = held(proxy.uri)[key]
    assert waiting["status"] == "SCHEDULED"
    (runs.parent / "later").rename(folder)
    for one in (mirror, mirror, Mirror(runs, proxy.uri)):
        assert one.sync().complete
    started = held(proxy.uri)[key]
    assert (started["id"], started["status"]) == (waiting["id"], "RUNNING")
    assert started["tags"]["study.started_ms"] == str(round(START_S * 1000)) and len(started["points"]) == 4


def test_the_background_mirror_ends_complete_when_asked_or_orphaned(runs: Path) -> None:
    folder = make(runs, steps=5, state="running")
    mirror = start_mirror(runs, interval=0.2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line(6, {"train/loss": 1.0}))
    set_status(folder, state="finished", final={"knn": 0.7})
    report = mirror.stop()
    assert report.complete
    ((_, run),) = held(uri(runs)).items()
    assert run["status"] == "FINISHED" and len(run["points"]) == 12
    assert mirror.stop() is report
    program = f"import os; from pathlib import Path; from study.tracking.mirror import start_mirror; \
        mirror = start_mirror(Path({str(runs)!r})); print(mirror.pid, flush=True); os.kill(os.getpid(), 9)"
    make(runs, 1)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "", "the report has no reader any more, which is nothing to tell"
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(held(uri(runs))) == 2


def test_watching_goes_on_through_failures_and_ends_with_a_complete_pass(runs: Path, proxy: Proxy) -> None:
    folder = make(runs, seed=6000, steps=5)
    proxy.fault = lambda method, path: 500
    stop, reports = threading.Event(), []
    watcher = threading.Thread(
        target=lambda: reports.append(Mirror(runs, proxy.uri).watch(stop, 0.05)),
    )
    watcher.start()
    deadline = time.monotonic() + 30
    while len(proxy.requests) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    proxy.fault = lambda method, path: None
    stop.set()
    watcher.join(60)
    assert reports[0].complete and len(held(proxy.uri)["train", folder.name]["points"]) == 11


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_mirror_that_is_killed_is_told_of_and_replaced_while_the_sweep_goes_on(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(runs, steps=2)
    monkeypatch.setattr(local, "LOOK_S", 0.05)
    started: list[Beside] = []

    def start(folder: Path) -> Beside:
        started.append(start_mirror(folder))
        return started[-1]

    monkeypatch.setattr("study.tracking.mirror.start_mirror", start)
    said: list[str] = []
    with local.mirrored(runs, said.append):
        os.kill(started[0].pid, signal.SIGKILL)
        until(lambda: len(started) == 2)
        assert said == ["MLflow: the mirror ended early; another one goes on"]
    assert said[1:] == ["bringing MLflow up to date"]
    assert len(held(uri(runs))) == 1
