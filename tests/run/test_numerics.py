"""A run keeps which numerics made it, and a table says where its runs differ in that."""

from pathlib import Path

import pytest
from rich.console import Console

from study.config import schema
from study.config.schema import Config
from study.run import listing, numerics, provenance, record, status

SIGNATURE = Config(seed=3).signature


def attempt(runs: Path, *, finish: bool = False, seed: int = 3) -> None:
    with record.start(runs, Config(seed=seed), command=["test"]) as run:
        if finish:
            run.finish({"knn": 0.5})


def test_each_attempt_keeps_its_numerics_and_the_signature_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, now = schema.NUMERICS, schema.NUMERICS + 1
    attempt(tmp_path)
    monkeypatch.setattr(schema, "NUMERICS", now)
    assert Config(seed=3).signature == SIGNATURE
    attempt(tmp_path, finish=True)
    origin, known = provenance.read(tmp_path / SIGNATURE), status.read(tmp_path / SIGNATURE)
    assert origin["numerics"] == now and [each["numerics"] for each in origin["attempts"]] == [first, now]
    assert known is not None and known.numerics == [first, now]
    assert listing.one(SIGNATURE, tmp_path, tmp_path)["tags"]["study.numerics"] == f"{first}+{now}"


def test_a_run_from_before_counts_as_the_first(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"signature": "a", "state": "finished", "attempt": 1}')
    known = status.read(tmp_path)
    assert known is not None and numerics.text(known.numerics) == numerics.FIRST == "1"


def test_one_numerics_is_not_spoken_of_and_more_are_counted() -> None:
    assert numerics.apart([]) == numerics.apart(["2", "2"]) == ""
    assert numerics.apart(["1", "2", "1", "1+2"]).endswith(": 2 by 1, 1 by 1+2, 1 by 2")


def test_the_list_of_runs_says_which_sweep_was_made_by_several(tmp_path: Path) -> None:
    one = {"sweep": "momentum", "scale": "quick", "name": "a", "signature": "0" * 12, "state": "finished", "step": 4}
    one |= {"steps": 4, "metric": "knn", "result": 0.5, "diverged": None, "numerics": "1", "from_scale": ""}
    one |= {"started_ms": None, "attempt": 1, "train_seconds": 1.0}

    def shown(*runs: dict[str, object]) -> str:
        console = Console(width=100, record=True)
        console.print(listing.table(list(runs), 80))
        return " ".join(console.export_text().split())

    said = "momentum-quick: made by different numerics, so not to be compared in every digit: 1 by 1, 1 by 2"
    assert said in shown(one, one | {"numerics": "2"})
    assert "numerics" not in shown(one, one)
    assert "numerics" not in shown(one, one | {"numerics": "2", "state": "failed"})
    assert "numerics" not in shown(one | {"sweep": "train"}, one | {"numerics": "2", "sweep": "train"})
