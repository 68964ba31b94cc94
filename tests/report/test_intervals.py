"""Intervals, powers and adjusted p-values are those of scipy and of tables worked by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from study.report.compare import compare
from study.report.intervals import Estimate, Pool, Sample, Term, Undecided, estimate, holm
from study.sweep.claims import Interval

# kNN of the momentum sweep on CIFAR-10: SDs that differ by a factor of twenty.
ZERO, SLOW, FAST = [34.71, 28.21, 35.99], [49.25, 49.12, 48.89], [37.95, 37.0, 37.05]
NO_POOL = Pool(0.0, 0)


def sample(values: list[float], seeds: tuple[int, ...] = (), constant: bool = False) -> Sample:
    return Sample("arm", seeds or tuple(range(len(values))), tuple(values), constant=constant)


def found(*terms: Term, rule: Interval = "welch", noise: float = 0.0, pool: Pool = NO_POOL) -> Estimate:
    return estimate(terms, rule, noise, pool)


def between(made: Estimate) -> tuple[float, float]:
    return made.value - made.half, made.value + made.half


@pytest.mark.parametrize(("a", "b"), [(ZERO, SLOW), (SLOW, FAST), (FAST, ZERO), (ZERO, [*SLOW, 49.0, 48.0])])
def test_between_arms_it_is_welchs(a: list[float], b: list[float]) -> None:
    made, theirs = found((1, sample(a)), (-1, sample(b))), stats.ttest_ind(a, b, equal_var=False)
    assert between(made) == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-9)
    assert made.freedom == pytest.approx(theirs.df) and "of Welch" in made.how
    greater = stats.ttest_ind(a, b, equal_var=False, alternative="greater")
    assert made.beyond(0.0) == pytest.approx(greater.pvalue, rel=1e-9)


def test_within_seeds_it_is_the_paired_one() -> None:
    made, theirs = found((1, sample(SLOW)), (-1, sample(FAST)), rule="paired"), stats.ttest_rel(SLOW, FAST)
    assert between(made) == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-9)
    assert made.half == pytest.approx(1.035, abs=1e-3) and "paired by seed, 2 degrees" in made.how
    others = found((1, sample(SLOW)), (-1, sample(FAST, seeds=(0, 1, 3))), rule="paired")
    assert "of Welch" in others.how and others == found((1, sample(SLOW)), (-1, sample(FAST)))


@pytest.mark.parametrize("rule", ["paired", "welch"])
def test_against_a_number_without_spread_it_is_the_arms_own(rule: Interval) -> None:
    made = found((1, sample(ZERO)), (-1, sample([40.86], constant=True)), rule=rule)
    theirs = stats.ttest_1samp(ZERO, 40.86).confidence_interval(0.95)
    assert between(made) == pytest.approx((theirs.low - 40.86, theirs.high - 40.86), rel=1e-9)
    assert made.half == pytest.approx(10.363, abs=1e-3) and "of the arm's own seeds, 2 degrees" in made.how


def test_an_interaction_has_satterthwaites_degrees_of_freedom() -> None:
    """Worked by hand: variances 1, 4, 1, 16 of n = 2, 4, 2, 4, so v = 1/2 + 1 + 1/2 + 4 = 6 and
    df = 36 / (1/4 / 1 + 1 / 3 + 1/4 / 1 + 16 / 3) = 36 / (37/6) = 5.838."""
    half = math.sqrt(0.5)
    two, four = [-half, half], [-math.sqrt(1.5), -math.sqrt(1.5), math.sqrt(1.5), math.sqrt(1.5)]
    terms: list[Term] = [
        (1, sample([80 + x for x in two])),
        (-1, sample([70 + 2 * x / math.sqrt(2) for x in four])),
        (-1, sample([60 + x for x in two])),
        (1, sample([59 + 4 * x / math.sqrt(2) for x in four])),
    ]
    assert [each.variance for _, each in terms] == pytest.approx([1, 4, 1, 16])
    made = found(*terms)
    assert (made.value, made.error, made.freedom) == pytest.approx((9.0, math.sqrt(6), 36 / (37 / 6)))
    assert made.half == pytest.approx(stats.t.ppf(0.975, 216 / 37) * math.sqrt(6))
    values = [[80.0, 81.0, 80.5], [70.0, 72.0, 69.0], [60.0, 60.5, 61.0], [59.0, 62.0, 58.0]]
    paired: list[Term] = [(c, sample(each)) for c, each in zip((1, -1, -1, 1), values, strict=True)]
    theirs = stats.ttest_1samp(np.array([1, -1, -1, 1]) @ np.array(values), 0).confidence_interval(0.95)
    assert between(found(*paired, rule="paired")) == pytest.approx(tuple(theirs))


def test_a_pooled_sd_is_taken_only_where_it_is_asked_for() -> None:
    pool = Pool.of([sample(ZERO), sample(SLOW), sample(FAST), sample([1.0])])
    theirs = stats.ttest_ind(ZERO, SLOW)
    two = found((1, sample(ZERO)), (-1, sample(SLOW)), rule="pooled", pool=Pool.of([sample(ZERO), sample(SLOW)]))
    assert between(two) == pytest.approx(tuple(theirs.confidence_interval(0.95)), rel=1e-9)
    assert pool.freedom == 6
    assert pool.variance == pytest.approx(np.mean([np.var(each, ddof=1) for each in (ZERO, SLOW, FAST)]))
    for rule in ("welch", "paired"):
        alone = found((1, sample(ZERO)), (-1, sample(SLOW)), rule=rule)
        assert alone == found((1, sample(ZERO)), (-1, sample(SLOW)), rule=rule, pool=pool)


def test_with_one_seed_the_registered_noise_is_all_there_is() -> None:
    made = found((1, sample([70.0])), (-1, sample([67.0])), noise=1.0)
    assert between(made) == (2.0, 4.0) and "registered noise" in made.how
    assert made.error is None and made.resolves is None and made.needs(3.0) is None
    only = compare("a − b", made, ">", 2.5)
    assert (only.answer, only.p_holds, only.resolves, only.needs) == ("undecided", None, None, None)
    with pytest.raises(Undecided, match="arm: n = 1, which has no spread; the other arms have up to 3 seeds"):
        found((1, sample(SLOW)), (-1, sample([67.0])), noise=1.0)


def test_seeds_that_all_agree_leave_no_doubt() -> None:
    made = found((1, sample([2.0, 2.0])), (-1, sample([1.0, 1.0])))
    assert between(made) == (1.0, 1.0) and made.resolves is None
    assert [made.beyond(threshold) for threshold in (0.0, 1.0, 2.0)] == [0.0, 1.0, 1.0]


def test_equivalence_is_two_one_sided_tests() -> None:
    a, b = [60.0, 60.4, 59.8, 60.1], [60.2, 60.0, 60.6, 60.3]
    made = compare("a − b", found((1, sample(a)), (-1, sample(b))), "within ±", 1.0)
    lower = stats.ttest_ind(np.add(a, 1.0), b, equal_var=False, alternative="greater").pvalue
    upper = stats.ttest_ind(np.subtract(a, 1.0), b, equal_var=False, alternative="less").pvalue
    assert made.p_holds == pytest.approx(2 * max(lower, upper)) and made.answer == "holds"
    assert (made.answer == "holds") == (max(lower, upper) <= 0.025)
    assert made.distance == pytest.approx(1.0 - abs(made.estimate))


@pytest.mark.parametrize("threshold", [-2.0, 0.0, 3.0, 11.0, 12.0])
@pytest.mark.parametrize("sign", [">", "≤", "within ±"])
def test_an_answer_stands_exactly_where_its_p_value_is_at_most_five_per_cent(sign: str, threshold: float) -> None:
    for terms in ([(1, sample(SLOW)), (-1, sample(FAST))], [(1, sample(ZERO)), (-1, sample(FAST))]):
        made = compare("x", found(*terms), sign, abs(threshold) if sign == "within ±" else threshold)
        assert made.p_holds is not None and made.p_fails is not None
        assert (made.answer == "holds") == (made.p_holds <= 0.05)
        assert (made.answer == "fails") == (made.p_fails <= 0.05)


def test_what_seeds_can_tell_is_what_the_noncentral_t_says_and_simulation_finds() -> None:
    made = found((1, sample(ZERO)), (-1, sample([40.86], constant=True)))
    assert made.error and made.resolves
    critical = stats.t.ppf(0.975, 2)
    assert 1 - stats.nct.cdf(critical, 2, made.resolves / made.error) == pytest.approx(0.8, abs=1e-4)
    sd, distance = np.std(ZERO, ddof=1), 8.886
    needed = made.needs(distance)
    assert needed == 4

    def power(n: int) -> float:
        draws = np.random.default_rng(n).normal(distance, sd, (20_000, n))
        return float((stats.ttest_1samp(draws, 0, axis=1, alternative="greater").pvalue < 0.025).mean())

    assert power(needed - 1) < 0.79 and power(needed) > 0.79
    for far in (distance, 4.0, 1.5):
        enough = (n for n in range(2, 200) if stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, far * n**0.5 / sd) >= 0.8)
        assert made.needs(far) == next(enough)
    assert made.needs(0.0) is None and made.needs(1e-3) is None and made.needs(1e3) == 2


def test_holms_table() -> None:
    """Worked by hand: 4 × 0.005, 3 × 0.01, 2 × 0.03, and 0.04 is raised to the one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []
