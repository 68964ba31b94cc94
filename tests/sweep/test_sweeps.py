"""Every sweep at every scale loads, plans and dry-runs; arms are equal where they must be; the headers are true."""

import argparse
from pathlib import Path

import pytest

from study.cli import sweep as commands
from study.config.reading import read_yaml
from study.launch import plan
from study.sweep.grid import Sweep, load, scale_names

FOLDER = Path(__file__).parents[2] / "sweeps"
PATHS = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "claims")
SCALES = ("smoke", "quick", "cpu", "gpu", "imagenet")
EACH = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
CORES, PAPER_TABLES_S = 2, 1000


@pytest.fixture(scope="module")
def grids() -> dict[tuple[str, str], Sweep]:
    return {(path.stem, scale): load(path, scale) for path in PATHS for scale in SCALES}


def test_the_sweeps_of_the_study_are_there() -> None:
    wanted = {"momentum", "mechanisms", "batch", "shuffle", "dictionary-momentum", "eviction", "age"}
    assert wanted <= {path.stem for path in PATHS}
    assert set(scale_names()) == set(SCALES)


@EACH
@pytest.mark.parametrize("scale", SCALES)
def test_it_dry_runs_and_makes_nothing(
    path: Path, scale: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = argparse.ArgumentParser()
    commands.register(parser.add_subparsers())
    runs = tmp_path / "runs"
    words = ["sweep", "submit", str(path), "--scale", scale, "--dry-run", "--runs-dir", str(runs)]
    arguments = parser.parse_args(words)
    assert arguments.func(arguments) == 0
    said = capsys.readouterr().out
    assert "would run" in said
    assert max(map(len, said.partition("would run")[0].splitlines())) <= 80
    assert not runs.exists()


@EACH
def test_arms_are_equal_in_images_seen_and_in_augmentation(path: Path, grids: dict[tuple[str, str], Sweep]) -> None:
    for scale in SCALES:
        arms = [point.config for point in grids[path.stem, scale].points if point.floor is None]
        assert len({(config.optimiser.epochs, config.data, config.views, config.precision) for config in arms}) == 1
        if path.stem not in ("batch", "mechanisms"):  # there the batch is the dictionary
            assert len({config.optimiser for config in arms}) == 1


@EACH
def test_floors_stand_beside_the_arms_with_the_same_images(path: Path, grids: dict[tuple[str, str], Sweep]) -> None:
    for scale in SCALES:
        points = grids[path.stem, scale].points
        assert {point.floor for point in points} == {None, "random init", "raw pixels"}
        assert len({point.config.data for point in points}) == 1


@EACH
def test_the_papers_rows_are_arms_at_its_own_scale(path: Path, grids: dict[tuple[str, str], Sweep]) -> None:
    sweep = grids[path.stem, "imagenet"]
    arms = [point.labels for point in sweep.points if point.floor is None]
    for row in sweep.paper:
        assert row["mark"] in ("T", "F", "R")
        labels = {key: value for key, value in row.items() if key not in ("value", "mark")}
        assert labels.keys() == set(sweep.axes)
        assert labels in arms or labels.get("m") == 0.99, labels  # the best m there is 0.999
    assert all(set(point.labels) == set(sweep.axes) for point in sweep.points if point.floor is None)


@EACH
def test_the_header_states_cost_claims_and_expectation(path: Path, grids: dict[tuple[str, str], Sweep]) -> None:
    known = {name for name, claim in read_yaml(FOLDER / "claims.yaml").items() if claim["sweep"] == path.stem}
    text = path.read_text()
    for scale in SCALES:
        sweep = grids[path.stem, scale]
        assert sweep.cost is not None
        assert sweep.cost.unit == ("GPU" if scale in ("gpu", "imagenet") else "core")
        assert set(sweep.claims) == known
    assert grids[path.stem, "quick"].expected
    header = text[: text.index("\nname:")]
    for word in ("Claims", "Run", "Cost", "Expected", *grids[path.stem, "quick"].claims):
        assert word in header


def test_the_papers_three_tables_take_a_quarter_of_an_hour_at_quick(
    tmp_path: Path, grids: dict[tuple[str, str], Sweep]
) -> None:
    plans = [plan.make(grids[name, "quick"], tmp_path) for name in ("momentum", "mechanisms", "batch")]
    walls = [made.wall(CORES) for made in plans]
    assert None not in walls
    assert sum(wall or 0 for wall in walls) <= PAPER_TABLES_S
    assert (walls[0] or 0) <= 300  # momentum, with the floors' evaluation, in 6 minutes


def test_age_matched_arms_have_a_dictionary_of_whole_batches_near_n(grids: dict[tuple[str, str], Sweep]) -> None:
    for scale in SCALES:
        for point in grids["age", scale].points:
            config = point.config
            if point.labels.get("dictionary") in ("queue-n", "bank-n", "queue-n m=0"):
                n = config.data.train_images or {"cifar10": 50_000, "cifar10-jpeg": 50_000}[config.data.name]
                assert n - config.optimiser.batch < config.K <= n
                assert config.K % config.optimiser.batch == 0


def test_a_banks_last_batch_can_be_split(grids: dict[tuple[str, str], Sweep]) -> None:
    for (name, scale), sweep in grids.items():
        for point in sweep.points:
            config = point.config
            if config.dictionary.kind == "bank":
                n = config.data.train_images or {"cifar10": 50_000, "cifar10-jpeg": 50_000}[config.data.name]
                rest = n % config.optimiser.batch
                assert rest % config.encoder.bn_splits == 0, (name, scale)
                assert rest == 0 or rest // config.encoder.bn_splits >= 2, (name, scale)


def test_an_in_batch_arm_has_the_k_of_its_label(grids: dict[tuple[str, str], Sweep]) -> None:
    for scale in SCALES:
        for point in grids["mechanisms", scale].points:
            if point.floor is None:
                exact = point.config.K + (point.labels["mechanism"] == "in-batch")
                assert exact == point.labels["K"]
