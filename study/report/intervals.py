"""Means over seeds and how sure they are: no arm's spread is taken for another's.

One rule serves all claims. An estimate is Σ c·mean over arms, with the 95 % t-interval of

- ``paired``: the same sum within each seed, where all its arms have the same seeds. A seed fixes the first weights, the
  order of the images and their views, so arms of one seed are not independent, and this is right however they hang
  together and however unequal their SDs are;
- ``welch``: the arms' own variances, with Satterthwaite's degrees of freedom. So are paired arms whose seeds differ;
- ``pooled``: one SD for all arms of the sweep. It is right only where they are equally noisy.

What does not depend on the seed, raw pixels, is one number without a spread. With one seed an arm there is no SD, and
the interval is ± the ``noise`` that the claim was registered with.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from study.sweep.claims import Interval

LEVEL = 0.95
POWER = 0.8
MOST_SEEDS = 1000
"""Of more seeds nobody asks."""


class Undecided(Exception):  # noqa: N818 - an answer, no error
    """Why a claim cannot be decided."""


@dataclass(frozen=True)
class Sample:
    """An arm's values in the printed unit, one a seed."""

    arm: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    diverged: tuple[int, ...] = ()
    """Seeds that have no value because they diverged."""
    constant: bool = False
    """The value does not depend on the seed: it has no spread."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def variance(self) -> float:
        return float(np.var(self.values, ddof=1))


Term = tuple[float, Sample]
"""A coefficient, and the arm whose mean it multiplies."""


@dataclass(frozen=True)
class Pool:
    """One variance for all arms: what the rule ``pooled`` assumes."""

    variance: float
    freedom: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Pool":
        several = [each for each in samples if len(each.values) > 1]
        freedom = sum(len(each.values) - 1 for each in several)
        squares = sum(each.variance * (len(each.values) - 1) for each in several)
        return cls(squares / freedom if freedom else 0.0, freedom)


@dataclass(frozen=True)
class Estimate:
    """A combination of means, with the half-width of its interval, and in words what that is."""

    value: float
    half: float
    how: str
    error: float | None = None
    """Standard error; None where the interval is the registered noise."""
    freedom: float = math.inf
    n: int = 1
    """Seeds an arm, the fewest."""

    def beyond(self, threshold: float) -> float:
        """One-sided p-value of "the truth is no more than this"; NaN without a standard error."""
        if self.error is None:
            return math.nan
        if not self.error:
            return float(self.value <= threshold)
        return _tail((self.value - threshold) / self.error, self.freedom)

    @property
    def resolves(self) -> float | None:
        """The smallest distance from a threshold that so many seeds tell at 80 % power; None without a spread."""
        if not self.error:
            return None
        from scipy.special import nctdtrinc  # type: ignore[import-untyped]

        return self.error * float(nctdtrinc(self.freedom, 1 - POWER, _quantile(self.freedom)))

    def needs(self, distance: float) -> int | None:
        """The fewest seeds an arm that tell this distance at 80 % power, if the SDs are as measured.

        None where that is more than `MOST_SEEDS`, or where there is no spread to go by.
        """
        if not self.error:
            return None
        found = bisect.bisect_left(range(2, MOST_SEEDS + 1), POWER, key=lambda n: self._power(n, distance)) + 2
        return found if found <= MOST_SEEDS else None

    def _power(self, n: int, distance: float) -> float:
        """Chance that n seeds an arm tell a truth so far from the threshold."""
        from scipy.special import nctdtr

        assert self.error
        freedom = self.freedom * (n - 1) / max(self.n - 1, 1)
        return 1 - float(nctdtr(freedom, distance / self.error * math.sqrt(n / self.n), _quantile(freedom)))


def estimate(terms: Sequence[Term], rule: Interval, noise: float, pool: Pool) -> Estimate:
    """Σ c·mean with its interval.

    Args:
        terms: coefficients and arms.
        rule: how the claim was registered.
        noise: half-width with one seed an arm.
        pool: of the sweep's arms; for the rule ``pooled`` only.

    Raises:
        Undecided: some arms have several seeds and one has a single one, so nothing tells its spread.
    """
    value = sum(c * sample.mean for c, sample in terms)
    noisy = [(c, sample) for c, sample in terms if c and not sample.constant]
    counts = [len(sample.values) for _, sample in noisy]
    n = min(counts, default=1)
    if rule == "pooled" and pool.freedom > 1:
        error = math.sqrt(pool.variance * sum(c**2 / len(sample.values) for c, sample in noisy))
        return _with_interval(value, error, pool.freedom, n, "with one SD pooled over the sweep's arms")
    if n == max(counts, default=1) == 1:
        return Estimate(value, noise, "± is the registered noise: one seed" if noise else "one seed")
    if n == 1:
        lone = next(sample.arm for _, sample in noisy if len(sample.values) == 1)
        raise Undecided(f"{lone}: n = 1, which has no spread; the other arms have up to {max(counts)} seeds")
    if len(noisy) > 1 and rule == "paired" and len({sample.seeds for _, sample in noisy}) == 1:
        within = np.sum([c * np.array(sample.values) for c, sample in noisy], axis=0)
        return _with_interval(value, math.sqrt(np.var(within, ddof=1) / n), n - 1, n, "paired by seed")
    parts = np.array([c**2 * sample.variance / len(sample.values) for c, sample in noisy])
    total = float(parts.sum())
    freedom = total**2 / float((parts**2 / (np.array(counts) - 1)).sum()) if total else n - 1
    words = "of the arm's own seeds" if len(noisy) == 1 else "of Welch"
    return _with_interval(value, math.sqrt(total), freedom, n, words)


def _with_interval(value: float, error: float, freedom: float, n: int, words: str) -> Estimate:
    how = f"± is the 95 % t-interval {words}, {freedom:.3g} degrees of freedom"
    return Estimate(value, _quantile(freedom) * error, how, error, freedom, n)


def _quantile(freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def _tail(t: float, freedom: float) -> float:
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: reject where one is ≤ α, and the chance of any false rejection in
    the family is at most α."""
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted
