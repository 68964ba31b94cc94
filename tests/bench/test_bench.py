"""The bench: sides that take turns, the real trainer as one of them, rows that say what was measured."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from study import bench
from study.bench import commands, measure, results, sides, stored, trainer
from study.bench.measure import Bench, take_turns, workplace
from study.errors import UserError
from study.run import export, journal
from study.slurm import state
from study.sweep import grid

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "data__size": 8,
    "encoder__width": 4,
    "encoder__bn_splits": 2,
    "dictionary__K": 64,
    "optimiser__batch": 16,
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "TRAIN", 64)
    monkeypatch.setattr(measure, "TEST", 32)
    with workplace(tmp_path):
        return tmp_path


def row(group: str, name: str, **more: Any) -> dict[str, Any]:
    made = Bench(group, Path(), CPU, 1)
    made.add(name, [1.0, 3.0, 2.0], "s", at_most=2.0, **more)
    return made.rows[0]


def test_sides_take_turns_after_one_that_does_not_count() -> None:
    calls: list[str] = []

    def side(name: str) -> Any:
        def turn() -> float:
            calls.append(name)
            return float(len(calls))

        return turn

    seconds = take_turns({"a": side("a"), "b": side("b")}, 3)
    assert calls == ["a", "b"] * 4
    assert {name: list(found) for name, found in seconds.items()} == {"a": [3, 5, 7], "b": [4, 6, 8]}


def test_a_row_is_the_median_with_its_spread_and_its_goal() -> None:
    found = row("trainer", "x")
    assert (found["value"], found["spread"], found["n"]) == (2.0, [1.0, 3.0], 3)
    assert (found["goal"], found["met"], found["unit"]) == ("≤ 2", True, "s")
    made = Bench("trainer", Path(), CPU, 1)
    made.add("x", [0.8], "", at_least=0.9)
    made.add("y", [0.8], "")
    assert [(found["goal"], found["met"]) for found in made.rows] == [("≥ 0.9", False), (None, None)]


def test_groups_are_written_in_order_and_replace_their_own_rows_only(tmp_path: Path) -> None:
    results.write(tmp_path, "pool", [row("pool", "old"), row("pool", "older")])
    results.write(tmp_path, "trainer", [row("trainer", "a")])
    results.write(tmp_path, "pool", [row("pool", "new")])
    rows = json.loads((tmp_path / "bench.json").read_text())
    assert [found["name"] for found in rows] == ["a", "new"]
    assert {"name", "value", "unit", "goal", "met", "n", "spread", "machine"} <= rows[0].keys()


def test_the_table_shows_goal_and_measured_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.write(tmp_path, "trainer", [row("trainer", "some figure", note="why")])
    results.print_table(tmp_path, ["trainer"])
    shown = capsys.readouterr().out
    assert "some figure" in shown and "≤ 2 s" in shown and "met" in shown and "some figure: why" in shown


def test_an_unknown_group_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="GROUP = nothing: allowed is trainer, "):
        bench.run(["nothing"], 1, tmp_path, False)
    with pytest.raises(UserError, match="--repeats = 0"):
        bench.run([], 0, tmp_path, False)


def test_the_trainers_side_is_the_real_run(place: Path) -> None:
    """What is timed journals, fills the queue and moves both encoders, as `study train` does."""
    with workplace(place):
        config = sides.config_of(sides.TINY, **SMALL)
        with sides.trainer(config, place / "runs", CPU) as (take, run):
            before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
            take(trainer.READ_EVERY)
            after = run.model.state_dict()
    assert int(after["dictionary.pointer"]) == trainer.READ_EVERY * 16 % 64
    assert all(not torch.equal(before[f"{f}.head.0.weight"], after[f"{f}.head.0.weight"]) for f in ("f_q", "f_k"))
    readings = journal.read(place / "runs" / config.signature / "metrics.jsonl")
    assert {found.step for found in readings if found.name == "train/loss"} == set(range(1, trainer.READ_EVERY + 1))


def test_the_encoder_alone_runs_backward_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = sides.config_of(sides.TINY, **SMALL)
    calls: list[str] = []
    forward, backward = sides.encoder.Encoder.forward, torch.Tensor.backward

    def counted_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append("forward" if torch.is_grad_enabled() else "forward without gradient")
        return forward(self, x)

    def counted_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append("backward")
        backward(self, *args, **kwargs)

    monkeypatch.setattr(sides.encoder.Encoder, "forward", counted_forward)
    monkeypatch.setattr(torch.Tensor, "backward", counted_backward)
    sides.encoder_alone(config, CPU)(2)
    assert calls == ["forward", "forward without gradient", "backward"] * 2


def test_a_whole_group_goes_to_file_and_screen(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = sides.config_of
    monkeypatch.setattr(trainer, "config_of", lambda tree, **changes: small(tree, **{**SMALL, **changes}))
    monkeypatch.setattr(trainer, "LINES", 10)
    assert bench.run(["overhead"], 2, place / "out", True) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown == results.read(place / "out")
    assert shown[0]["n"] == 2 and shown[0]["unit"] == "%" and "consistency" in shown[0]["note"]


def test_stored_runs_read_as_exported_ones(tmp_path: Path) -> None:
    sweep = grid.load(stored.sweeps(tmp_path / "sweeps", 10), "cpu")
    stored.export(tmp_path / "runs", sweep, 5)
    runs, metrics = export.load(tmp_path / "runs")
    assert len(runs) == len(sweep.points) >= 10
    assert len(metrics) == len(runs) * len(stored.METRICS) * 5
    assert metrics.groupby(["signature", "name"]).step.apply(list).map(lambda steps: steps == [1, 2, 3, 4, 5]).all()


def test_a_command_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = measure.command("--version")
    assert done.stdout.startswith("study ") and done.seconds > 0 and done.peak_bytes > 2**22
    with pytest.raises(RuntimeError, match="exit code 2"):
        measure.command("report", "--runs", str(tmp_path))


def test_the_stand_in_for_slurm_takes_and_shows_every_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "POINTS", 30)
    made = Bench("slurm", tmp_path, CPU, 1)
    taken: list[int] = []

    def kept(path: Path) -> None:
        taken.append(len((path / "queue").read_text().splitlines()))

    monkeypatch.setattr(commands.shutil, "rmtree", kept)
    commands.slurm(made)
    assert [found["unit"] for found in made.rows] == ["s", "s", ""]
    assert made.rows[2]["value"] == 1
    assert taken == [len(grid.load(tmp_path / "slurm" / "sweeps" / "momentum.yaml", "cpu").points)]
    monkeypatch.setenv("PATH", f"{tmp_path / 'slurm' / '0' / 'bin'}:/usr/bin:/bin")
    assert state.limits().max_array_size == 1001


def test_the_figure_of_cost_is_drawn_and_equal_again(tmp_path: Path) -> None:
    made = Bench("cost", tmp_path, CPU, 1)
    for axis, x in (("batch", 64), ("batch", 256), ("K", 4096), ("K", 65536)):
        for side in ("trainer", "encoder"):
            made.add(f"{side}, {axis} {x}", np.array([x, x + 1.0]), "ms/image", side=side, axis=axis, x=x)
    for folder in ("a", "b"):
        results.write(tmp_path / folder, "cost", made.rows)
    for kind in ("svg", "png"):
        assert (tmp_path / "a" / f"cost.{kind}").read_bytes() == (tmp_path / "b" / f"cost.{kind}").read_bytes()


def test_the_peer_trains(place: Path) -> None:
    pytest.importorskip("lightly")
    from study.bench.peer import Loop

    with workplace(place):
        loop = Loop(sides.config_of(sides.TINY, **SMALL), 0, CPU)
        before = [parameter.clone() for parameter in loop.model.parameters()]
        loop.take(3)
    assert all(not torch.equal(old, new) for old, new in zip(before, loop.model.parameters(), strict=True))
    assert int(loop.criterion.memory_bank.bank_ptr) == 48
