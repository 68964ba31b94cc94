"""What a signature's numbers are is part of the code: whoever changes them says so, by raising NUMERICS."""

import json
from pathlib import Path

import golden
import pytest

from study.config.schema import NUMERICS

RENEW = "numbers have changed; if that is meant, raise NUMERICS in study/config/schema.py and run `make golden`"


def test_the_golden_runs_are_of_this_numerics() -> None:
    assert golden.kept()["numerics"] == NUMERICS, "NUMERICS was raised: `make golden` writes the runs that belong to it"
    assert golden.kept()["runs"].keys() == golden.MECHANISMS.keys()


@pytest.mark.parametrize("mechanism", golden.MECHANISMS)
def test_a_golden_run_comes_to_the_numbers_that_it_came_to(mechanism: str) -> None:
    changed = list(golden.differences(golden.kept()["runs"][mechanism], golden.made(mechanism)))
    assert not changed, "\n".join([RENEW, *changed])


def test_golden_runs_are_renewed_with_a_raised_numerics_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = golden.kept()
    file = tmp_path / "golden.json"
    monkeypatch.setattr(golden, "FILE", file)
    monkeypatch.setattr(golden, "NUMERICS", kept["numerics"])
    monkeypatch.setattr(golden, "made", lambda mechanism: kept["runs"][mechanism])
    other = json.loads(json.dumps(kept))
    other["runs"]["queue"]["loss"]["train/loss"][2] += 0.01
    file.write_text(json.dumps(kept))
    assert golden.renew() == 0 and golden.kept() == kept, "nothing has changed"
    file.write_text(json.dumps(other))
    assert golden.renew() == 1 and golden.kept() == other, "a change without a word"
    file.write_text(json.dumps(other | {"numerics": kept["numerics"] - 1}))
    assert golden.renew() == 0 and golden.kept() == kept


def test_a_number_that_is_missing_or_none_is_a_difference() -> None:
    values = {"loss": {"a": [1.0, 2.0]}, "weights": {}, "final": {"knn": [0.5]}}
    assert list(golden.differences(values, values)) == []
    for found in (
        values | {"loss": {"a": [1.0]}},
        values | {"final": {}},
        values | {"final": {"knn": [float("nan")]}},
        values | {"weights": {"b": [1.0]}},
    ):
        assert len(list(golden.differences(values, found))) == 1
