"""A plan says what is there, what is not, and what the rest costs; it asks little and makes nothing."""

import argparse
import io
import json
import math
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.live import Live
from sweep_files import sweep, write

from study.cli import main as cli
from study.cli import sweep as commands
from study.config import schema
from study.errors import UserError
from study.launch import plan, pool, progress, record, table
from study.run import status
from study.sweep.grid import Point, load

M = "axes: {m: [0, 0.5, 0.9]}\n"


def note(runs_dir: Path, point: Point, state: str, **fields: Any) -> None:
    """What a run of this point would have left behind."""
    folder = runs_dir / point.signature
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(point.config.model_dump(mode="json")))
    here = {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": time.time()}
    status.write(folder, status.Status(point.signature, state, 1, **(here | fields)), durable=False)


def states(found: plan.Plan) -> list[str]:
    return [row.state for row in found.rows]


def text(found: plan.Plan, **options: Any) -> str:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(table.of_plan(found, 2, **options))
    return console.export_text()


def test_states_are_those_of_the_folders(tmp_path: Path) -> None:
    found = sweep(tmp_path, "axes: {m: [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}\n")
    runs = tmp_path / "runs"
    assert states(plan.make(found, runs)) == ["missing"] * 7
    assert not runs.exists()
    a, b, c, d, e, f, _ = found.points
    note(runs, a, "finished")
    note(runs, b, "running")
    note(runs, c, "failed", error="ValueError: no")
    note(runs, d, "killed", step=3, steps=16)
    note(runs, e, "running", heartbeat=time.time() - 3600)
    (runs / f.signature).mkdir()
    made = plan.make(found, runs)
    assert states(made) == ["done", "running", "failed", "missing", "missing", "missing", "missing"]
    assert [row.point for row in made.to_run] == list(found.points[2:])
    assert made.counts == {"done": 1, "running": 1, "missing": 4, "failed": 1}


def test_a_cluster_knows_more_of_what_has_no_folder_and_nothing_more_of_what_is_done(tmp_path: Path) -> None:
    found, runs = sweep(tmp_path, M), tmp_path / "runs"
    a, b, c = found.points
    note(runs, a, "finished")
    note(runs, b, "failed", error="ValueError: an earlier attempt")
    queue = {p.signature: ("pending", "Priority") for p in (a, b)} | {c.signature: ("failed", "job 3 left no status")}
    made = plan.make(found, runs, queue)
    assert states(made) == ["done", "pending", "failed"]
    assert made.rows[2].error == "job 3 left no status"
    assert [row.point for row in made.to_run] == [c]


def test_a_probe_is_blocked_by_a_failed_pretraining_and_sent_with_it(tmp_path: Path) -> None:
    found, runs = sweep(tmp_path, M + "base: {probe: {epochs: 1}}\n"), tmp_path / "runs"
    note(runs, found.points[0], "failed")
    made = plan.make(found, runs)
    assert states(made)[:4] == ["failed", "blocked", "missing", "missing"]
    assert {row.point.name for row in made.to_run} >= {"m=0 seed=0", "m=0 seed=0 probe"}


def test_points_that_left_the_grid_are_reported_with_their_state_and_stay_on_record(tmp_path: Path) -> None:
    before, runs = sweep(tmp_path, M), tmp_path / "runs"
    record.write(before, runs)
    note(runs, before.points[2], "finished")
    after = sweep(tmp_path, "axes: {m: [0, 0.5]}\n")
    for _ in range(2):
        made = plan.make(after, runs)
        assert [(gone.name, gone.state) for gone in made.removed] == [("m=0.9 seed=0", "done")]
        assert made.counts["removed"] == 1
        assert "m=0.9 seed=0" in text(made)
        record.write(after, runs)
    record.write(before, runs)
    assert plan.make(before, runs).removed == ()
    tree = json.loads(record.path_of(runs, "small-tiny").read_text())
    assert [point["name"] for point in tree["points"]] == [point.name for point in before.points]
    assert tree["removed"] == []


def test_a_record_gives_the_submitted_grid_back_overrides_included(tmp_path: Path) -> None:
    found, runs = sweep(tmp_path, M, optimiser={"epochs": 5}), tmp_path / "runs"
    record.write(found, runs)
    assert record.reload(runs, "small-tiny") == found
    assert record.ids(runs) == ["small-tiny"]


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    found, runs = sweep(tmp_path, M), tmp_path / "runs"
    record.write(found, runs).write_text('{"points": 3}')
    with pytest.raises(UserError, match=r"small-tiny\.json: is no record of a sweep"):
        plan.make(found, runs)


def test_cost_comes_from_finished_runs_of_the_same_shape_else_from_the_header(tmp_path: Path) -> None:
    text = M + "cost: {tiny: {core_seconds: 50, source: a guess}}\n"
    found, runs = sweep(tmp_path, text), tmp_path / "runs"
    made = plan.make(found, runs)
    assert made.seconds == 150
    assert made.sources == ("header: a guess",)
    assert [made.wall(workers) for workers in (1, 2, 8)] == [150, 100, 50]  # the third of two waits
    # 16 steps of 64 images in 20 s on 2 threads
    note(runs, found.points[0], "finished", step=16, steps=16, train_seconds=20.0, threads=2)
    note(runs, found.points[1], "killed", step=4, steps=16)
    made = plan.make(found, runs)
    assert [row.cost for row in made.rows] == [0, pytest.approx(30), pytest.approx(40)]
    assert made.sources == ("measured on 1 run of the same shape",)
    other = sweep(tmp_path, text, encoder={"width": 16})
    assert plan.make(other, runs).sources == ("header: a guess",)
    longer = sweep(tmp_path, text, optimiser={"epochs": 6})  # other runs, the same shape
    assert [row.cost for row in plan.make(longer, runs).rows] == [pytest.approx(120)] * 3


def test_a_point_without_any_measure_makes_the_cost_unknown_not_zero(tmp_path: Path) -> None:
    made = plan.make(sweep(tmp_path, M), tmp_path / "runs")
    assert made.seconds is None
    assert made.wall(2) is None
    assert "not known" in text(made)


def test_the_table_fits_80_columns_and_a_long_sweep_is_collapsed_with_failures_first(tmp_path: Path) -> None:
    values = [round(0.01 * i, 2) for i in range(1, 61)]
    found = load(write(tmp_path, f"axes: {{m: {values}}}\nseeds: [0, 1, 2]\n"), "tiny")
    runs = tmp_path / "runs"
    note(runs, found.points[59], "failed", error="ValueError: no " + "x" * 200)
    short = text(plan.make(found, runs))
    lines = short.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 60
    first = next(i for i, line in enumerate(lines) if line.strip().startswith("m="))
    assert lines[first].split()[:3] == ["m=0.6", "1", "failed,"]
    assert "ValueError: no" in short
    assert "180 points: 179 missing, 1 failed" in short
    assert (
        sum(line.strip().startswith("m=") for line in text(plan.make(found, runs), everything=True).splitlines()) > 180
    )


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands.register(parser.add_subparsers())
    return parser.parse_args(["sweep", *words])


def test_dry_run_shows_what_would_run_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, runs = write(tmp_path, M), tmp_path / "runs"
    arguments = command(
        "submit", str(path), "--scale", "tiny", "--dry-run", "--runs-dir", str(runs), "optimiser.epochs=3"
    )
    assert arguments.func(arguments) == 0
    said = capsys.readouterr().out
    for point in load(path, "tiny", {"optimiser": {"epochs": 3}}).points:
        assert str(runs / point.signature / "config.yaml") in said
    assert not runs.exists()


def test_a_tracking_store_that_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///tmp/mlruns")
    path, runs = write(tmp_path, M), tmp_path / "runs"
    arguments = command("submit", str(path), "--scale", "tiny", "--runs-dir", str(runs))
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI = file"):
        arguments.func(arguments)
    assert not runs.exists()


def test_plan_and_status_are_json_for_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, runs = write(tmp_path, M), tmp_path / "runs"
    found = load(path, "tiny")
    note(runs, found.points[0], "failed", error="ValueError: no")
    note(runs, found.points[1], "running", step=4, steps=16, images_per_s=64.0)
    for verb in ("plan", "status"):
        arguments = command(verb, str(path), "--scale", "tiny", "--runs-dir", str(runs), "--json")
        assert arguments.func(arguments) == 0
        tree = json.loads(capsys.readouterr().out)
        assert tree["counts"] == {"running": 1, "missing": 1, "failed": 1}
        assert tree["points"][0]["error"] == "ValueError: no"
        assert tree["points"][1]["images_per_s"] == 64.0
        assert [point["signature"] for point in tree["points"]] == [point.signature for point in found.points]


def test_a_point_that_diverged_says_where_is_counted_apart_and_costs_nothing_more(tmp_path: Path) -> None:
    found, runs = sweep(tmp_path, M), tmp_path / "runs"
    a, b, _ = found.points
    note(runs, a, "finished", final={"knn": 0.5}, step=16, steps=16)
    note(runs, b, "finished", final={"knn": math.nan}, step=1200, steps=1600, diverged=1200)
    plan_ = plan.make(found, runs)
    assert plan_.counts == {"done": 1, "diverged": 1, "missing": 1} and [row.point.labels for row in plan_.to_run] == [
        {"m": 0.9}
    ]
    note(runs, b, "finished", final={"knn": math.nan}, step=1200, steps=1600, diverged=1200, train_seconds=5.0)
    assert plan.make(found, runs).seconds is None, "a run that ended early is no measure of a whole one"
    shown = text(plan_)
    line = next(line for line in shown.splitlines() if "m=0.5" in line)
    assert line.split() == ["m=0.5", "seed=0", "diverged", "at", "step", "1,200"]
    assert "3 points: 1 done, 1 diverged, 1 missing" in shown and "nan" not in shown
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(table.of_status(plan_))
    assert "\x1b[91mdiverged" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_plan_says_when_its_arms_are_made_by_different_numerics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, runs = sweep(tmp_path, M), tmp_path / "runs"
    a, b, _ = found.points
    monkeypatch.setattr(schema, "NUMERICS", 1)
    note(runs, a, "finished", final={"knn": 0.5})
    note(runs, b, "killed", step=3, steps=16)
    assert "numerics" not in text(plan.make(found, runs))
    monkeypatch.setattr(schema, "NUMERICS", 2)
    said = " ".join(text(plan.make(found, runs)).split())
    assert (
        "different numerics, so not to be compared in every digit: 1 by 1, 1 by 1+2, 1 by 2 (what is left, by" in said
    )
    assert [row["numerics"] for row in plan.make(found, runs).as_json(1)["points"]] == ["1", "1+2", "2"]


def test_a_launcher_says_of_a_point_that_it_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = sweep(tmp_path, M).points[0]
    show = progress.Progress()
    for final, step in (({"knn": math.nan}, 12), ({"knn": 0.5}, None)):
        known = status.Status(point.signature, "finished", 1, final=final, diverged=step)
        show.ended(pool.done(point, known), 3.0)
    assert capsys.readouterr().err.splitlines() == [
        f"diverged {point.name} in 3 s: at step 12",
        f"done     {point.name} in 3 s: knn 0.5",
    ]


def test_status_shows_speed_and_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, runs = write(tmp_path, M), tmp_path / "runs"
    note(runs, load(path, "tiny").points[1], "running", phase="train", step=4, steps=16, images_per_s=32.0)
    arguments = command("status", str(path), "--scale", "tiny", "--runs-dir", str(runs))
    assert arguments.func(arguments) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "m=0.5" in line)
    assert line.split() == ["m=0.5", "seed=0", "running", "train", "4/16", "32", "24", "s"]


def test_logs_takes_a_signature_or_a_sweep_and_words_of_the_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, runs = write(tmp_path, "axes: {m: [0, 0.9, 0.99]}\n"), tmp_path / "runs"
    found = load(path, "tiny")
    record.write(found, runs)
    point = found.points[1]
    note(runs, point, "finished")
    (runs / point.signature / "log.txt").write_text("a line\n")
    where = ("--scale", "tiny", "--runs-dir", str(runs))
    for words in ([str(path), *where, "m=0.9"], [point.signature[:6], *where]):
        arguments = command("logs", *words)
        assert arguments.func(arguments) == 0
        assert capsys.readouterr().out == "a line\n"
    for words, says in (([str(path), *where], "3 points"), (["zzz", *where], "no such point")):
        arguments = command("logs", *words)
        with pytest.raises(UserError, match=says):
            arguments.func(arguments)


def test_cancel_stops_a_running_point_and_no_other_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, runs = write(tmp_path, M), tmp_path / "runs"
    record.write(load(path, "tiny"), runs)
    # running by its status, in this very process, but nobody holds the lock: the number may be another process's now
    note(runs, load(path, "tiny").points[0], "running")
    arguments = command("cancel", str(path), "--scale", "tiny", "--runs-dir", str(runs))
    assert arguments.func(arguments) == 0
    assert "asked 0 running points" in capsys.readouterr().out


def test_ten_thousand_points_are_planned(tmp_path: Path) -> None:
    values = [round(0.001 * i, 3) for i in range(1, 101)]
    path, runs = write(tmp_path, f"axes: {{m: {values}, T: {values}}}\n"), tmp_path / "runs"
    found = load(path, "tiny")
    for point in found.points[:2000]:
        (runs / point.signature).mkdir(parents=True)
        status.write(runs / point.signature, status.Status(point.signature, "finished", 1), durable=False)
    made: plan.Plan = plan.make(load(path, "tiny"), runs)
    assert made.counts == {"done": 2000, "missing": 8000}
    assert text(made)


def test_without_its_images_nothing_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, M)
    monkeypatch.setenv("STUDY_DATA", str(tmp_path / "empty"))
    runs = tmp_path / "runs"
    assert cli.main(["sweep", "submit", str(path), "--scale", "tiny", "--runs-dir", str(runs)]) == 2
    assert not runs.exists()


def test_on_a_terminal_the_time_left_is_whole_and_there_from_the_start(tmp_path: Path) -> None:
    (point,) = sweep(tmp_path, "axes: {m: [0.5]}\n").points
    pool = SimpleNamespace(
        children=[SimpleNamespace(point=point)],  # that has said nothing yet
        ends=[],
        waiting=[],
        total=1,
        runs_dir=tmp_path,
        costs={point.signature: 960.0},
        options=SimpleNamespace(workers=2),
    )
    shown = io.StringIO()
    seen = progress.Progress()
    seen.live = Live(console=Console(width=80, force_terminal=True, file=shown), auto_refresh=False)
    seen._drawn = -math.inf
    with seen:
        seen.tick(pool)  # type: ignore[arg-type]
    assert "\n0 of 1 points, 0 s gone, about 16 min left" in shown.getvalue().replace("\r", "")


CLAIM = """
claim:
  sweep: small
  statement: m = 0 fails.
  source: here
  test: at_floor
  arms: [{m: 0}]
  floors: [random init]
  control: {m: 0.5}
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("m = 0 fails", "m = 0 fails", ""),
        ("at_floor", "on_floor", 'claim.test = "on_floor": allowed is'),
        ("source:", "sauce:", "claim.source"),
        ("[{m: 0}]", "[{m: 0.9}]", "claim.arms: m = 0.9: allowed is 0, 0.5"),
        ("[{m: 0}]", "[{m: {default: 0, large: 0.9}}]", "claim.arms: m = 0.9: allowed is 0, 0.5"),
        ("[{m: 0}]", "[{optimiser.batch: 64}]", ""),
        ("[{m: 0}]", "[{mm: 0}]", "claim.arms: mm = 0: no axis; allowed is floor, m, or a key of the config"),
        ("{m: 0.5}", "{m: 0.6}", "claim.arms: m = 0.6: allowed is 0, 0.5"),
        ("random init", "random", 'claim.arms: floor = "random": allowed is "random init"'),
        ("sweep: small", "sweep: other", "claim.sweep = other: allowed is small"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_a_claim_that_cannot_be_judged_is_refused_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, old: str, new: str, says: str
) -> None:
    text = "axes: {m: [0, 0.5]}\nfloors: {random init: {optimiser.epochs: 0}}\nclaims: [claim]\n"
    path, runs = write(tmp_path, text), tmp_path / "runs"
    (tmp_path / "claims.yaml").write_text(CLAIM.replace(old, new))
    words = ["sweep", verb, str(path), "--scale", "tiny", "--runs-dir", str(runs)]
    assert cli.main(words + ["--dry-run"] * (verb == "submit")) == (2 if says else 0)
    out, error = capsys.readouterr()
    assert says in error
    assert not says or (
        out == "" and error.startswith(f"study: {tmp_path / 'claims.yaml'}: ") and error.count("\n") == 1
    )
    assert not runs.exists()
