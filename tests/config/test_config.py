"""The config: one tree, one signature, and bad input in one line that names file, key, value and what is allowed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.config import schema
from study.config.reading import flatten, merge, parse_overrides, parse_yaml, read_yaml, resolve
from study.config.schema import Config
from study.errors import UserError

BANK = {"dictionary": {"kind": "bank"}, "encoder": {"bn": "plain", "bn_splits": 1}}


def test_the_defaults_are_the_papers_setting() -> None:
    c = resolve({}, "defaults")
    assert (c.m, c.K, c.T, c.encoder.dim, c.encoder.arch) == (0.999, 65536, 0.07, 128, "resnet50")
    o = c.optimiser
    assert (o.lr, o.batch, o.epochs, o.momentum, o.weight_decay) == (0.03, 256, 200, 0.9, 1e-4)
    assert [round(share * o.epochs) for share in o.milestones] == [120, 160]
    assert (c.views.recipe, c.views.crop_min, c.data.size, c.data.eval_crop) == ("v1", 0.2, 224, 224 / 256)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"m": 1.5}, "m = 1.5: allowed is less than or equal to 1"),
        ({"m": True}, "m = true: allowed is a valid number"),
        ({"m": float("nan")}, "m = nan: allowed is a finite number"),
        ({"seed": 1.5}, "seed = 1.5: allowed is a valid integer"),
        ({"seed": "1"}, 'seed = "1": allowed is a valid integer'),
        ({"symmetric": "off"}, 'symmetric = "off": allowed is a valid boolean'),
        ({"momentum": 0.9}, "momentum = 0.9: unknown key; allowed is seed, m, T"),
        ({"optimiser": {"lr_": 1}}, "optimiser.lr_ = 1: unknown key; allowed is lr, lr_rule"),
        ({"optimizer": {"lr": 1}}, 'optimizer = {"lr": 1}: unknown key; allowed is seed'),
        ({"optimiser": None}, "optimiser = null: allowed is a mapping"),
        ({"optimiser": {"milestones": [0.8, 0.6]}}, "optimiser.milestones = [0.8, 0.6]: allowed is shares"),
        ({"encoder": {"arch": "vgg"}}, "encoder.arch = \"vgg\": allowed is 'pixels'"),
        ({"data": {"name": "../x"}}, 'data.name = "../x": allowed is text such as fashion-mnist'),
        ({"data": {"train_images": 100}}, "data.train_images = 100: allowed is at least optimiser.batch = 256"),
        ({"optimiser": {"accumulate": 3}}, "optimiser.accumulate = 3: allowed is a divisor of optimiser.batch = 256"),
        ({"encoder": {"bn_splits": 7}}, "encoder.bn_splits = 7: allowed is a divisor of the 256 images"),
        ({"encoder": {"bn_splits": 256}}, "encoder.bn_splits = 256: allowed is a divisor of the 256 images"),
        ({"encoder": {"bn": "plain"}}, "encoder.bn_splits = 8: allowed is 1 with encoder.bn = plain"),
        (
            {"dictionary": {"kind": "in-batch", "K": 9}},
            "dictionary.K = 9: allowed is null with dictionary.kind = in-batch",
        ),
        (merge(BANK, {"m": 0.9}), "m = 0.9: allowed is null with dictionary.kind = bank"),
        (merge(BANK, {"symmetric": True}), "symmetric = true: allowed is false with dictionary.kind = bank"),
        (
            {"dictionary": {"kind": "bank"}},
            'encoder.bn = "shuffle": allowed is plain or split with dictionary.kind = bank',
        ),
        ({"encoder": {"arch": "pixels"}}, "optimiser.epochs = 200: allowed is 0 with encoder.arch = pixels"),
    ],
)
def test_a_bad_value_is_one_line_with_file_key_value_and_what_is_allowed(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(tree, "my.yaml")
    assert str(caught.value).startswith(f"my.yaml: {message}")
    assert "\n" not in str(caught.value)


def test_yaml_reads_numbers_and_words_as_people_write_them() -> None:
    text = (
        "a: 1e-3\nb: off\nc: no\nd: 0.07\ne: 1\nf: true\ng: null\nh: 2020-01-01\ni: 1E5\nj: .5\nk: 010\nl: [1e-4, yes]"
    )
    assert parse_yaml(text, "t") == {
        "a": 1e-3, "b": "off", "c": "no", "d": 0.07, "e": 1, "f": True, "g": None, "h": "2020-01-01",
        "i": 1e5, "j": 0.5, "k": "010", "l": [1e-4, "yes"],
    }  # fmt: skip
    assert resolve(parse_overrides(["optimiser.lr=1e-3"]), "t").optimiser.lr == 0.001


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m: 0.9\nT: 0.1\nm: 0.99\n", ":3: key 'm' stands twice; allowed is once"),
        ("a:\n  b: 1\n  b: 2\n", ":3: key 'b' stands twice"),
        ("m: [1\n", ": expected ',' or ']'"),
        ("- 1\n", ": holds a list; allowed is a mapping"),
        ("a: !!python/object/apply:os.system [id]\n", ": could not determine a constructor"),
        ("? [a]\n: 1\n", ": a key must be a plain value"),
        ("1: 2\n", ": holds a key that is no word; allowed is a mapping of names"),
        ("a: &a [*a]\n", ": not YAML: more than 1,000,000 values, with aliases followed"),
        (f"m: {'[' * 3000}\n", ": nested too deep; allowed is what a config needs"),
    ],
)
def test_a_bad_file_is_one_line_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, tmp_path / "b.yaml"):
        with pytest.raises(UserError, match="cannot be read"):
            read_yaml(path)


@pytest.mark.parametrize("argument", ["m", "=1", "a..b=1", ".m=1"])
def test_an_override_is_key_equals_value(argument: str) -> None:
    with pytest.raises(UserError, match="allowed is key=value"):
        parse_overrides([argument])


def test_an_override_that_stands_twice_is_refused() -> None:
    with pytest.raises(UserError, match="m stands twice"):
        parse_overrides(["m=1", "m=0.9"])


def test_a_slip_is_put_right() -> None:
    with pytest.raises(UserError, match="did you mean optimiser\\?"):
        resolve({"optimizer": {"lr": 1}}, "t")


@pytest.mark.parametrize("argument", ["m=", "m= "])
def test_an_empty_override_is_no_null(argument: str) -> None:
    """`m=$M` with an unset variable would train the default."""
    with pytest.raises(UserError, match="m = nothing: allowed is a value; m=null"):
        parse_overrides([argument])


def test_the_signature_is_of_the_whole_config_and_not_of_its_spelling() -> None:
    signature = Config().signature
    assert signature == resolve({"m": 0.999, "dictionary": {"kind": "queue", "K": 65536}}, "t").signature
    assert resolve({"m": 1}, "t").signature == resolve({"m": 1.0}, "t").signature
    assert resolve({"m": 0}, "t").signature != signature
    bank = resolve(BANK, "t")
    assert (
        bank.m is None
        and bank.signature == resolve(merge(BANK, {"m": None, "dictionary.bank_momentum": 0.5}), "t").signature
    )


def test_a_new_schema_makes_new_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Config().signature
    monkeypatch.setattr(schema, "SCHEMA", schema.SCHEMA + 1)
    assert Config().signature != before


@pytest.mark.parametrize(
    "change", [{"dictionary.K": 4096}, {"m": 0.99}, {"T": 0.1}, {"seed": 1}, {"optimiser.epochs": 100}]
)
def test_an_arm_that_differs_in_one_key_is_another_run(change: dict[str, Any]) -> None:
    """solo-learn's resumer takes up the checkpoint of another arm; here its folder has another name."""
    assert resolve(merge({}, change), "t").signature != Config().signature


def test_a_probe_knows_the_pretraining_it_reads() -> None:
    probe = resolve({"m": 0.99, "probe": {"lr": 10}}, "t")
    assert probe.pretraining.signature == resolve({"m": 0.99}, "t").signature != probe.signature


def test_the_learning_rate_follows_the_global_batch_alone() -> None:
    """moco#98: whatever the number of devices, 256 images a step have lr 0.03."""
    assert resolve({"optimiser": {"batch": 256}}, "t").lr == 0.03
    assert resolve({"optimiser": {"batch": 1024}}, "t").lr == pytest.approx(0.12)
    assert resolve({"optimiser": {"batch": 1024, "lr_rule": False}}, "t").lr == 0.03
    assert resolve({"optimiser": {"batch": 256, "accumulate": 8}, "encoder": {"bn_splits": 2}}, "t").lr == 0.03


def test_in_batch_negatives_are_one_less_than_the_batch() -> None:
    c = resolve({"dictionary": {"kind": "in-batch"}, "optimiser": {"batch": 512}}, "t")
    assert (c.K, c.m) == (511, None)


names = st.text("abcdef", min_size=1, max_size=3)
trees = st.recursive(
    st.integers() | st.booleans() | st.none(), lambda t: st.dictionaries(names, t, min_size=1, max_size=3)
)
mappings = st.dictionaries(names, trees, max_size=4)


@given(mappings, mappings)
def test_merging_keeps_every_leaf_of_the_overlay(base: dict[str, Any], over: dict[str, Any]) -> None:
    merged = flatten(merge(base, over))
    assert flatten(over).items() <= merged.items()
    assert merge(merge(base, over), over) == merge(base, over)


@given(mappings)
def test_dotted_keys_are_the_nested_tree(tree: dict[str, Any]) -> None:
    assert merge({}, flatten(tree)) == tree


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda t: st.lists(t) | st.dictionaries(st.text(), t)
    )
)
def test_whatever_a_tree_holds_it_is_a_config_or_one_clear_line(tree: Any) -> None:
    for candidate in (
        {"m": tree},
        {"optimiser": tree},
        {"dictionary": {"kind": tree}},
        {"optimiser": {"milestones": tree}},
    ):
        try:
            resolve(candidate, "t")
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "m=2"], "study: command line: m = 2: allowed is less than or equal to 1"),
        (["train", "absent.yaml"], "study: command line: absent.yaml: no such file; allowed is a config file"),
        (["train", "a.yaml", "b.yaml"], "study: command line: 'b.yaml': allowed is one config file"),
        (["train", "--threads", "0"], "study: command line: --threads = 0: allowed is a positive number"),
        (
            ["train", "--checkpoint-every", "nan"],
            "study: command line: --checkpoint-every = nan: allowed is a positive",
        ),
        (["train", "--device", "tpu"], "study: command line: --device = tpu: allowed is auto, cpu, cuda or cuda:N"),
        (["train", "data.name=absent"], "study: data.name = absent: not in data; `study data pack"),
    ],
)
def test_bad_input_exits_with_2_and_makes_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, "-m", "study", *arguments], cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and message in last, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_overrides_may_stand_after_options(tmp_path: Path) -> None:
    """argparse by itself drops the last one."""
    command = [sys.executable, "-m", "study", "train", "m=0.5", "--threads", "1", "T=0.2", "--list", "seed=7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    expected = resolve({"m": 0.5, "T": 0.2, "seed": 7}, "t").signature
    assert f"signature {expected}" in done.stdout
