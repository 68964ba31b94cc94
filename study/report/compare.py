"""An estimate against a threshold: the answer, how sure it is, and what more seeds would tell."""

from dataclasses import dataclass
from typing import Literal

from study.report.intervals import Estimate

Answer = Literal["holds", "fails", "undecided"]
Sign = Literal[">", "≤", "within ±"]


@dataclass(frozen=True)
class Comparison:
    """One estimate with its interval, compared with one threshold, in the printed unit.

    It is decided when the whole interval lies on one side of the threshold. For ``within ±`` that is two one-sided
    tests, each at 2.5 %: stricter than the usual two at 5 %, whose interval has 90 %, so that one interval serves all.
    """

    what: str
    estimate: float
    low: float
    high: float
    threshold: float
    sign: Sign
    interval: str
    answer: Answer
    p_holds: float | None
    """Twice the one-sided p-value, so that an answer stands where this is ≤ 5 %; None where noise is registered."""
    p_fails: float | None
    seeds: int
    distance: float
    """Of the estimate from the (nearer) threshold."""
    resolves: float | None
    """Where undecided: the smallest distance from the threshold that so many seeds tell at 80 % power."""
    needs: int | None
    """The seeds that this distance from the threshold would take; None where it is too small for any number."""


def compare(what: str, found: Estimate, sign: Sign, threshold: float) -> Comparison:
    """Hold an estimate against a threshold."""
    low, high = found.value - found.half, found.value + found.half
    over, under = found.beyond(threshold), found.beyond(-threshold)
    match sign:
        case ">":
            holds, fails = low > threshold, high <= threshold
            p_values = over, 1 - over
        case "≤":
            holds, fails = high <= threshold, low > threshold
            p_values = 1 - over, over
        case "within ±":
            holds, fails = -threshold <= low and high <= threshold, low > threshold or high < -threshold
            p_values = max(under, 1 - over), min(over, 1 - under)
    answer: Answer = "holds" if holds else "fails" if fails else "undecided"
    distance = abs((abs(found.value) if sign == "within ±" else found.value) - threshold)
    p_holds, p_fails = (None if found.error is None else min(1.0, 2 * p) for p in p_values)
    return Comparison(
        what=what,
        estimate=found.value,
        low=low,
        high=high,
        threshold=threshold,
        sign=sign,
        interval=found.how,
        answer=answer,
        p_holds=p_holds,
        p_fails=p_fails,
        seeds=found.n,
        distance=distance,
        resolves=found.resolves if answer == "undecided" else None,
        needs=found.needs(distance) if answer == "undecided" else None,
    )
