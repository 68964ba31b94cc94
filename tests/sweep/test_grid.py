"""A sweep's YAML becomes the points that it says, and a fault in it one line that names file and key."""

from pathlib import Path

import pytest
from sweep_files import sweep, write

from study.config.schema import Config
from study.errors import UserError
from study.sweep.grid import load, scale_overlay

M = "axes: {m: [0, 0.99]}\n"


def test_points_are_the_product_of_axes_and_seeds_seed_by_seed(tmp_path: Path) -> None:
    found = sweep(tmp_path, "axes: {m: [0, 0.99], K: [64, 128]}\nseeds: {tiny: [0, 1]}\n")
    assert [point.name for point in found.points] == [
        f"m={m} K={k} seed={seed}" for seed in (0, 1) for m in ("0", "0.99") for k in (64, 128)
    ]
    last = found.points[-1]
    assert last.labels == {"m": 0.99, "K": 128}
    assert (last.config.m, last.config.dictionary.K, last.config.seed) == (0.99, 128, 1)
    assert last.signature == last.config.signature
    assert found.id == "small-tiny"


def test_merge_order_is_scale_base_scales_command_line_axis_adjust_seed(tmp_path: Path) -> None:
    text = """\
    base: {T: 0.1, optimiser.epochs: 3, optimiser.lr: 0.1}
    scales: {tiny: {T: 0.2, optimiser: {weight_decay: 0.5}}}
    axes: {m: [0.5], kind: {a: {optimiser.momentum: 0.5}, b: {optimiser.momentum: 0.6}}}
    adjust: [{kind: b, set: {optimiser.momentum: 0.7}}]
    """
    a, b = sweep(tmp_path, text, optimiser={"lr": 0.2}).points
    assert (a.config.T, a.config.optimiser.epochs, a.config.optimiser.lr) == (0.2, 3, 0.2)
    assert a.config.optimiser.weight_decay == 0.5
    assert a.config.optimiser.batch == 64
    assert (a.config.optimiser.momentum, b.config.optimiser.momentum) == (0.5, 0.7)


def test_floors_have_no_labels_and_keep_their_epochs_whatever_the_command_line_says(tmp_path: Path) -> None:
    text = M + "floors: {random init: {optimiser.epochs: 0}, raw pixels: {optimiser.epochs: 0, encoder.arch: pixels}}\n"
    found = sweep(tmp_path, text, optimiser={"epochs": 7})
    arms = [point for point in found.points if point.floor is None]
    floors = {point.floor: point for point in found.points if point.floor is not None}
    assert [point.config.optimiser.epochs for point in arms] == [7, 7]
    assert floors["random init"].config.optimiser.epochs == 0
    assert floors["raw pixels"].config.encoder.arch == "pixels"
    assert floors["raw pixels"].labels == {}
    assert floors["raw pixels"].name == "raw pixels seed=0"


def test_a_floor_that_no_seed_changes_is_one_point(tmp_path: Path) -> None:
    floors = "floors: {random init: {optimiser.epochs: 0}, raw pixels: {optimiser.epochs: 0, encoder.arch: pixels}}\n"
    text = M + "seeds: [3, 1, 2]\n" + floors
    names = [point.name for point in sweep(tmp_path, text).points if point.floor]
    assert names == ["random init seed=3", "raw pixels seed=3", "random init seed=1", "random init seed=2"]
    probed = sweep(tmp_path, text + "base: {probe: {epochs: 2}}\n").points
    names = [point.name for point in probed if point.floor == "raw pixels" and point.after]
    assert names == [f"raw pixels seed={seed} probe" for seed in (3, 1, 2)], "a probe is trained, seed by seed"


def test_a_name_shows_only_what_differs(tmp_path: Path) -> None:
    found = sweep(tmp_path, "axes: {m: [0.99], K: [64, 128]}\n")
    assert [point.name for point in found.points] == ["K=64 seed=0", "K=128 seed=0"]


def test_exclude_drops_arms_at_the_scales_that_it_names(tmp_path: Path) -> None:
    text = "axes: {m: [0, 0.99], K: [64, 128]}\nexclude: [{m: 0, K: [64, 128]}, {scale: other, m: 0.99}]\n"
    (tmp_path / "scales").mkdir()
    (tmp_path / "scales" / "other.yaml").write_text("{}")
    assert [point.labels["m"] for point in sweep(tmp_path, text).points] == [0.99, 0.99]


def test_probes_share_their_pretraining(tmp_path: Path) -> None:
    text = M + "  \nbase: {probe: {epochs: 2}}\n"
    text = text.replace("[0, 0.99]}", "[0, 0.99], probe.lr: [10.0, 30.0]}")
    found = sweep(tmp_path, text)
    bare = [point for point in found.points if point.after is None]
    probes = [point for point in found.points if point.after is not None]
    assert [point.labels for point in bare] == [{"m": 0}, {"m": 0.99}]
    assert [point.name for point in bare] == ["m=0 seed=0", "m=0.99 seed=0"]
    assert len(probes) == 4
    assert {point.after for point in probes} == {point.signature for point in bare}
    for probe in probes:
        assert probe.after == probe.config.pretraining.signature
        order = [point.signature for point in found.points]
        assert order.index(str(probe.after)) < order.index(probe.signature)


def test_a_seed_on_the_command_line_is_the_only_one(tmp_path: Path) -> None:
    assert {point.seed for point in sweep(tmp_path, M + "seeds: [0, 1]\n", seed=5).points} == {5}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (M + "axis: {}\n", "axis = {}: unknown key; allowed is name, title"),
        ("base: {}\n", "axes is missing: allowed is a mapping of names"),
        ("axes: {}\n", "axes = {}: allowed is 1 or more"),
        ("axes: {m: []}\n", "axes.m = []: allowed is one value or more"),
        ("axes: {m: {}}\n", "axes.m = {}: allowed is one value or more"),
        ("axes: {momentums: [1]}\n", "axes.momentums = [1]: not a key of the config"),
        ("axes: {m: [0.5, 0.5]}\n", "axes.m = [0.5, 0.5]: a value stands twice"),
        ("axes: {m: [2.0]}\n", "m = 2.0: allowed is less than or equal to 1"),
        ("axes: {m: 0.5}\n", "axes.m = 0.5: allowed is a list or a mapping of names to values"),
        ("axes: {m: [null]}\n", "axes.m.0 = null: allowed is a valid string or a valid integer or"),
        ("axes: {kind: {a: 3}}\n", "axes.kind.a = 3: allowed is a mapping of names to values"),
        ("axes: [m]\n", "axes = [\"m\"]: allowed is"),
        ("axes: {kind: {a: {m: 0.5}, b: {m: 0.5}}}\n", "kind=a seed=0 and kind=b seed=0 are the same run"),
        (M + "base: {optimiser: {lrr: 1}}\n", "optimiser.lrr = 1: unknown key; allowed is lr, lr_rule"),
        (M + "exclude: [{m: 0.5}]\n", "exclude: m = 0.5: allowed is 0, 0.99"),
        (M + "exclude: [{mm: 0}]\n", "exclude: mm = [0]: no axis; allowed is m"),
        (M + "exclude: [{m: 0}, {m: 0}]\n", "matches no arm"),
        (M + "exclude: [{m: [0, 0.99]}]\n", "leave no point at scale tiny"),
        (M + "exclude: [{m: 0, scale: large}]\n", "exclude: scale = \"large\": allowed is tiny"),
        (M + "exclude: [{m: 0, set: {T: 1.0}}]\n", "exclude: set"),
        (M + "adjust: [{m: 0}]\n", "adjust: set = null: allowed is the overrides"),
        (M + "seeds: {large: [0]}\n", "seeds: scale = \"large\": allowed is tiny"),
        (M + "scales: {large: {}}\n", "scales: scale = \"large\": allowed is tiny"),
        (M + "cost: {tiny: {seconds: 3, source: x}}\n", "cost.tiny.seconds = 3: unknown key; allowed is core_seconds"),
        (M + "cost: {tiny: {core_seconds: 3}}\n", "cost.tiny.source is missing: allowed is text"),
        (M + "cost: {tiny: 5}\n", "cost.tiny = 5: allowed is a mapping with core_seconds, gpu_seconds, source"),
        (M + "cost: {tiny: {source: x}}\n", "allowed is either core_seconds or gpu_seconds"),
        (M + "name: other\n", "name"),
        (M + "paper: [{m: 0, value: 50.0}, {m: 0.9, value: 55.2}]\n", "paper: m = 0.9: allowed is 0, 0.99"),
        (M + "paper: [{m: [0], value: 50.0}]\n", "paper: m = [0]: allowed is 0, 0.99"),
        (M + "paper: [{mm: 0, value: 50.0}]\n", "paper: mm = 0: no axis; allowed is m, value, mark"),
        (M + "paper: [{m: 0, mark: T}]\n", "allowed is the labels of an arm, value and mark"),
        (M + "paper: [{value: 50.0}]\n", "allowed is the labels of an arm, value and mark"),
        (M + "metric: {tiny: kn}\n", "metric = kn: allowed is knn, knn_output, linear, probe/top1"),
        (M + "expected: {tiny: {m=0.9: 0.5}}\n", "expected.tiny.m=0.9 = 0.5: no arm; allowed is m=0, m=0.99"),
        (M + "claims: [slow-winss]\n", "claims = slow-winss: allowed is a claim of"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_the_file_and_the_key(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load(path, "tiny")
    assert str(path) in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_scale_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'scale = "huge": allowed is tiny$'):
        load(write(tmp_path, M), "huge")


def test_a_fault_in_a_scale_names_the_scales_file(tmp_path: Path) -> None:
    path = write(tmp_path, M, scale="optimiser: {batsch: 3}\n")
    with pytest.raises(UserError, match=r"scales/tiny\.yaml: optimiser\.batsch = 3: unknown key"):
        load(path, "tiny")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"m": 0.5}, "command line: m = 0.5: the axis m of small sets it"),
        ({"optimiser": {"lrr": 1}}, "command line .*: optimiser.lrr = 1: unknown key"),
        ({"optimiser": {"epochs": "x"}}, 'command line .*: optimiser.epochs = "x": allowed is a valid integer'),
    ],
)
def test_a_fault_on_the_command_line_says_so(tmp_path: Path, overrides: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(write(tmp_path, M), "tiny", overrides)


def test_a_lone_run_can_take_a_scale(tmp_path: Path) -> None:
    write(tmp_path, M)
    assert Config.model_validate(scale_overlay("tiny", tmp_path / "scales")).encoder.width == 8


def test_ten_thousand_points_are_ten_thousand_runs(tmp_path: Path) -> None:
    values = [round(0.001 * i, 3) for i in range(1, 101)]
    path = write(tmp_path, f"axes: {{m: {values}, T: {values}}}\n")
    assert len({point.signature for point in load(path, "tiny").points}) == 10_000
