"""A claim is decided only by numbers that can decide it, and says which."""

import itertools
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixture import SWEEPS, write

from study.config.reading import read_yaml
from study.errors import UserError
from study.report import judge, load
from study.report.histories import Histories
from study.report.judge import Verdict
from study.report.load import Arm, Run, SweepRuns
from study.sweep import claims, grid
from study.sweep.claims import Claim


def sweep(
    arms: dict[str, list[float]],
    floors: dict[str, list[float]] | None = None,
    *,
    scale: str = "quick",
    planned: int = 3,
) -> SweepRuns:
    """A sweep over ``arm`` whose runs end with these values of kNN, in points; NaN is a run that diverged."""
    runs: list[Run] = []
    found: list[Arm] = []
    for name, values in [*arms.items(), *(floors or {}).items()]:
        floor = name if floors and name in floors else None
        labels = {} if floor else {"arm": name}
        mine = tuple(
            Run(f"{name}{seed}", name, labels, seed, floor, "finished", 10, {}, {}, {"knn": value / 100}, 1.0, 1)
            for seed, value in enumerate(values)
        )
        rows = tuple(range(len(runs), len(runs) + len(mine)))
        runs += mine
        found.append(Arm(labels, floor, planned, mine, rows))
    made = SweepRuns("s", scale, "S", "", ("arm",), "knn", tuple(found), (), tuple(runs), Path())
    made.__dict__["histories"] = Histories({}, {}, {}, {}, {})  # nothing but final values here
    return made


def claim(test: str, *arms: str, **more: object) -> Claim:
    return Claim.model_validate(
        {
            "sweep": "s",
            "statement": "S.",
            "source": "here",
            "test": test,
            "arms": [{"arm": arm} for arm in arms],
            **more,
        }
    )


def judged(one: Claim, runs: SweepRuns) -> Verdict:
    return judge.judge("id", one, runs)


@pytest.mark.parametrize(("value", "answer"), [(60.0, "holds"), (61.9, "holds"), (62.1, "fails")])
def test_failing_means_no_better_than_the_better_floor_and_a_margin(value: float, answer: str) -> None:
    runs = sweep({"zero": [value]}, {"random": [58.0], "pixels": [61.0]})
    verdict = judged(claim("at_floor", "zero", floors=["random", "pixels"], by=1.0), runs)
    assert verdict.answer == answer
    assert "pixels" in verdict.comparisons[0].what and {each.arm for each in verdict.numbers} == {
        "zero",
        "random",
        "pixels",
    }


def test_a_floor_that_other_arms_share_singles_nothing_out() -> None:
    """The verdict stays, and says which other arms pass the same test."""
    floors = {"random": [58.0], "pixels": [80.0]}
    runs = sweep({"zero": [60.0], "one": [70.0], "two": [float("nan")]}, floors)
    better = judged(claim("at_floor", "zero", floors=["random", "pixels"], by=1.0), runs)
    assert better.answer == "holds" and better.shared_by == ("one", "two")
    assert "so do one, two: at this scale this floor tells nothing apart" in better.reason
    assert "one 70.0" in better.evidence and better.as_json()["shared_by"] == ["one", "two"]
    some = judged(claim("at_floor", "zero", floors=["random"], by=3.0), runs)
    assert (
        some.shared_by == ("two",) and "so does two: at this scale this floor does not tell them apart" in some.reason
    )
    alone = judged(claim("at_floor", "zero", floors=["random"], by=3.0), sweep({"zero": [60.0], "one": [70.0]}, floors))
    assert alone.shared_by == () and "no other arm is at this floor" in alone.reason and "one 70" not in alone.evidence
    fails = judged(claim("at_floor", "one", floors=["random"], by=3.0), sweep({"zero": [60.0], "one": [70.0]}, floors))
    assert fails.answer == "fails" and fails.shared_by == ("zero",) and "so do" not in fails.reason
    diverged = judged(claim("at_floor", "two", floors=["random", "pixels"], by=1.0), runs)
    assert diverged.answer == "holds" and diverged.shared_by == ("zero", "one")


def test_an_arm_that_diverged_has_failed_but_decides_no_other_claim() -> None:
    runs = sweep({"zero": [float("nan")], "one": [70.0]}, {"random": [58.0]})
    failed = judged(claim("at_floor", "zero", floors=["random"]), runs)
    assert failed.answer == "holds" and "diverged" in failed.reason
    other = judged(claim("order", "zero", "one"), runs)
    assert other.answer == "undecided" and "diverged" in other.reason


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(60.0, 61.5, "holds"), (60.0, 60.5, "undecided"), (61.5, 60.0, "fails")]
)
def test_with_one_seed_the_registered_noise_decides(low: float, high: float, answer: str) -> None:
    verdict = judged(claim("order", "low", "high", noise=1.0), sweep({"low": [low], "high": [high]}))
    assert verdict.answer == answer and "registered noise" in verdict.reason


def test_with_several_seeds_the_interval_is_students_with_pooled_spread() -> None:
    arms = {"low": [60.0, 61.0, 62.0], "high": [64.0, 65.0, 66.0]}
    only = judged(claim("order", "low", "high", noise=99.0), sweep(arms)).comparisons[0]
    # two arms of three: SD 1 and 4 degrees of freedom, t = 2.776; √(1/3 + 1/3)
    assert only.estimate == pytest.approx(4.0)
    assert only.high - only.estimate == pytest.approx(2.7764451 * (2 / 3) ** 0.5, rel=1e-6)
    noisy = judged(claim("order", "low", "high"), sweep({**arms, "other": [50.0, 60.0, 70.0]}))
    assert noisy.answer == "undecided", "an arm that varies by ten points says that four may be chance"


def test_the_threshold_of_a_gap_is_part_of_the_claim() -> None:
    runs = sweep({"queue": [70.0], "bank": [67.0]})
    assert judged(claim("gap", "queue", "bank", by=1.0, noise=1.0), runs).answer == "holds"
    assert judged(claim("gap", "queue", "bank", by=2.5, noise=1.0), runs).answer == "undecided"
    assert judged(claim("gap", "queue", "bank", by=5.0, noise=1.0), runs).answer == "fails"
    at_scales = claim("gap", "queue", "bank", by={"default": 5.0, "quick": 1.0}, noise=1.0)
    assert judged(at_scales, runs).answer == "holds"


@pytest.mark.parametrize(("a", "answer"), [(60.5, "holds"), (61.5, "undecided"), (63.5, "fails"), (56.5, "fails")])
def test_equal_means_that_the_whole_interval_is_small(a: float, answer: str) -> None:
    assert judged(claim("close", "a", "b", by=2.0, noise=1.0), sweep({"a": [a], "b": [60.0]})).answer == answer


def test_an_order_holds_only_if_every_step_does() -> None:
    runs = sweep({"a": [60.0], "b": [65.0], "c": [64.0]})
    assert judged(claim("order", "a", "b"), runs).answer == "holds"
    verdict = judged(claim("order", "a", "b", "c"), runs)
    assert verdict.answer == "fails" and len(verdict.comparisons) == 2


def test_an_interaction_is_a_difference_of_differences() -> None:
    runs = sweep({"queue": [77.0], "queue 0": [65.0], "batch": [74.0], "batch 0": [73.0]})
    verdict = judged(claim("interaction", "queue", "queue 0", "batch", "batch 0", by=10.0), runs)
    assert verdict.comparisons[0].estimate == pytest.approx(11.0) and verdict.answer == "holds"


def test_what_is_missing_leaves_a_claim_undecided_and_is_named() -> None:
    runs = sweep({"a": [60.0], "b": []})
    unfinished = judged(claim("order", "a", "b"), runs)
    assert (unfinished.answer, unfinished.reason) == ("undecided", "arm = b: 3 not run")
    assert judged(claim("order", "a", "z"), runs).reason == "missing arm: arm = z"
    few = judged(claim("order", "a", "b", seeds=3), sweep({"a": [60.0] * 3, "b": [61.0] * 2}))
    assert (few.answer, few.reason) == ("undecided", "arm = b: n = 2; 3 seeds decide")
    assert [each.arm for each in few.numbers] == ["a", "b"], "the numbers are shown nevertheless"


def test_a_scale_that_cannot_decide_says_why() -> None:
    runs = sweep({"a": [60.0], "b": [65.0]})
    verdict = judged(claim("order", "a", "b", not_at={"quick": "too short"}), runs)
    assert (verdict.answer, verdict.reason) == ("undecided", "too short") and verdict.numbers
    smoke = sweep({"a": [float("nan")], "b": [65.0]}, {"f": [1.0]}, scale="smoke")
    assert judged(claim("order", "b", "b"), smoke).answer == "undecided"
    assert judged(claim("at_floor", "a", floors=["f"]), smoke).answer == "undecided"


values = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=4)


@given(values, values, st.floats(0, 3))
def test_a_claim_and_its_opposite_never_both_hold(a: list[float], b: list[float], noise: float) -> None:
    runs = sweep({"a": a, "b": b})
    answers = [judged(claim("gap", *pair, noise=noise), runs).answer for pair in (("a", "b"), ("b", "a"))]
    assert answers.count("holds") < 2
    assert (answers[0] == "holds") <= (answers[1] == "fails")


@given(values, values, st.floats(0, 3), st.floats(-20, 20))
def test_a_shift_of_all_arms_changes_no_verdict(a: list[float], b: list[float], noise: float, shift: float) -> None:
    one = claim("close", "a", "b", by=2.0, noise=noise)
    before, after = (judged(one, sweep({"a": [x + s for x in a], "b": [x + s for x in b]})) for s in (0, shift))
    margins = [abs(abs(bound) - 2.0) for each in before.comparisons for bound in (each.low, each.high)]
    assert before.answer == after.answer or min(margins) < 1e-6


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("test: order\narms: [{m: 0}]", "arms has 1: allowed is 2 or more with order"),
        ("test: gap\narms: [{m: 0}, {m: 1}]\nfloors: [x]", "allowed is none with gap"),
        ("test: at_floor\narms: [{m: 0}]", "allowed is one name or more"),
        ("test: bigger\narms: [{m: 0}]", 'x.test = "bigger"'),
        ("test: gap", "x.arms is missing: allowed is a list"),
        ("test: order\narms: [{m: 0}, {m: 1}]\nmargin: 1.0", "x.margin = 1.0: unknown key; allowed is sweep, "),
        ("test: order\narms: [{m: 0}, {m: 1}]\nnoisy: 1.0", "did you mean noise?"),
        ("test: order\narms: [{m: 0}, {m: 1}]\nby: {quick: 1.0}", "and a default"),
    ],
)
def test_a_fault_in_claims_yaml_is_one_line_with_the_key(tmp_path: Path, entry: str, words: str) -> None:
    file = tmp_path / "claims.yaml"
    file.write_text(f"x:\n  sweep: s\n  statement: S.\n  source: here\n{textwrap.indent(entry, '  ')}\n")
    with pytest.raises(UserError) as error:
        claims.read(file)
    assert words in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_claim_that_is_no_mapping_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_text("x:\n")
    with pytest.raises(UserError, match="x = null: allowed is a mapping with sweep, statement"):
        claims.read(tmp_path / "claims.yaml")


def test_the_registered_claims_are_those_that_the_sweeps_announce() -> None:
    registered = claims.read(SWEEPS / "claims.yaml")
    for file in SWEEPS.glob("*.yaml"):
        announced = read_yaml(file).get("claims", []) if file.stem != "claims" else []
        assert dict.fromkeys(announced, file.stem).items() <= {n: c.sweep for n, c in registered.items()}.items()
    for name, registered_claim in registered.items():
        assert (SWEEPS / f"{registered_claim.sweep}.yaml").is_file(), name


@pytest.mark.parametrize("scale", ["quick", "cpu", "gpu", "imagenet"])
def test_every_registered_claim_can_be_decided_at_every_scale(tmp_path: Path, scale: str) -> None:
    """All arms and floors that a claim names exist in its grid, and the metric is there: no typo waits for the runs."""
    registered = claims.read(SWEEPS / "claims.yaml")
    for name in dict.fromkeys(each.sweep for each in registered.values()):
        write(tmp_path, grid.load(SWEEPS / f"{name}.yaml", scale), steps=40, every=8)
    verdicts = list(
        itertools.chain.from_iterable(judge.judge_all(registered, runs) for runs in load.load(tmp_path, SWEEPS))
    )
    assert len(verdicts) == len(registered)
    for verdict in verdicts:
        assert verdict.numbers, verdict
        excused = scale in registered[verdict.id].not_at
        assert bool(verdict.comparisons) != excused, verdict


def test_numbers_of_a_verdict_are_means_over_its_seeds() -> None:
    given_values = [60.0, 61.0, 65.0]
    (low, _) = judged(claim("order", "a", "b"), sweep({"a": given_values, "b": [70.0] * 3})).numbers
    assert (low.mean, low.n) == (pytest.approx(62.0), 3)
    assert low.sd == pytest.approx(np.std(given_values, ddof=1))
