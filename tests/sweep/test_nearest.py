"""A config named by what it changes of its scale."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study.config.reading import flatten, merge, parse_overrides, resolve
from study.sweep.grid import scale_names, scale_overlay
from study.sweep.nearest import difference


def params(scale: str, *overrides: str) -> dict[str, Any]:
    tree = merge(scale_overlay(scale), parse_overrides(overrides))
    return flatten(resolve(tree, "test").model_dump(mode="json"))


@pytest.mark.parametrize(
    ("scale", "overrides", "name"),
    [
        ("smoke", [], "smoke"),
        ("smoke", ["seed=7"], "smoke"),
        ("smoke", ["optimiser.lr=30"], "smoke lr=30"),
        ("smoke", ["optimiser.lr=1e5"], "smoke lr=100000"),
        ("quick", ["m=0.9999", "symmetric=true"], "quick m=0.9999 symmetric=true"),
        ("quick", ["dictionary.kind=bank", "encoder.bn=split"], "quick bn=split kind=bank"),
        ("cpu", ["optimiser.epochs=0", "encoder.arch=pixels"], "cpu arch=pixels epochs=0"),
        ("cpu", ["probe.lr=30"], "cpu probe.lr=30"),
        ("cpu", ["data.name=cifar10"], "cpu name=cifar10"),
    ],
)
def test_a_name_is_the_scale_and_what_was_changed_of_it(scale: str, overrides: list[str], name: str) -> None:
    assert difference(params(scale, *overrides)).name == name


CHANGES = st.dictionaries(
    st.sampled_from(["m", "T", "optimiser.lr", "optimiser.momentum"]), st.floats(0.001, 0.999), max_size=4
)


@given(st.sampled_from(scale_names()), CHANGES)
def test_scale_and_keys_make_the_config_again(scale: str, changes: dict[str, float]) -> None:
    made = params(scale, *(f"{key}={value!r}" for key, value in changes.items()))
    found = difference(made, scale)
    again = merge(scale_overlay(scale), found.keys)
    assert flatten(resolve(again, "test").model_dump(mode="json")) == made
    assert found.keys == {key: value for key, value in changes.items() if params(scale)[key] != value}


def test_a_config_of_another_schema_or_far_from_every_scale_is_named_all_the_same() -> None:
    assert difference({"m": 0.5, "gone": 1}).keys == {"m": 0.5, "gone": 1}
    far = params("smoke", *(f"{key}=0.123" for key in ("m", "T", "optimiser.lr", "optimiser.momentum")))
    far |= {f"key{i}": i for i in range(7)}
    assert difference(far).name.startswith("smoke m=0.123 T=0.123") and difference(far).name.endswith(" and 3 more")
