"""Claims against stored runs.

A claim is decided only when the whole interval of its estimate, a difference between arms, lies on one side of the
threshold; `study.report.intervals` says which interval. Where many are asked some come out by chance: beside the plain
answer to each primary claim stands the one that Holm's adjustment leaves.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from study import metrics
from study.report.compare import Answer, Comparison, Sign, compare
from study.report.intervals import LEVEL, Pool, Sample, Term, Undecided, estimate, holm
from study.report.load import Arm, SweepRuns, show
from study.report.verdict import Case, Measured, Verdict, because, rule
from study.sweep.claims import Claim, at

MEANINGLESS = {"smoke": "scale smoke shows that everything runs; its numbers mean nothing"}


def judge_scale(claims: Mapping[str, Claim], sweeps: Sequence[SweepRuns]) -> list[list[Verdict]]:
    """Verdicts on the claims of each sweep, in the order of claims.yaml; the primary ones adjusted together.

    Args:
        claims: all that are registered. A primary claim whose runs are missing belongs to the family, too, so that runs
            that come later make no adjustment harder.
        sweeps: of one scale.
    """
    found = [
        [judge(name, claim, sweep) for name, claim in claims.items() if claim.sweep == sweep.name] for sweep in sweeps
    ]
    scale = sweeps[0].scale if sweeps else ""
    family = sum(claim.primary and scale not in claim.not_at for claim in claims.values())
    tested = {each.id: each.p for group in found for each in group if each.primary and each.p is not None}
    adjusted = dict(zip(tested, holm([*tested.values(), *[1.0] * (family - len(tested))]), strict=False))
    return [[_adjusted(each, adjusted.get(each.id)) for each in group] for group in found]


def _adjusted(verdict: Verdict, p: float | None) -> Verdict:
    if p is None:
        return verdict
    return replace(verdict, p_adjusted=p, adjusted=verdict.answer if p <= 1 - LEVEL else "undecided")


def judge(name: str, claim: Claim, sweep: SweepRuns) -> Verdict:
    """The plain verdict on one claim at the scale of ``sweep``."""
    metric = metrics.of(at(claim.metric, sweep.scale))
    trial = _Trial(claim, sweep, metric)
    cases: list[Case] = []
    try:
        cases = trial.run()
        answer = _all([case.answer for case in cases])
        reason = "; ".join([because(cases, answer, metric), *trial.notes])
        if claim.test == "at_floor":
            others = ", ".join(trial.shared)
            reason += f"; also at this floor: {others}" if others else "; no other arm is at this floor"
    except Undecided as why:
        answer, reason = "undecided", str(why)
    return Verdict(
        id=name,
        sweep=sweep.name,
        scale=sweep.scale,
        statement=claim.statement,
        source=claim.source,
        registered=claim.registered.strip(),
        metric=metric.name,
        rule=rule(claim, trial.by, metric),
        answer=answer,
        reason=reason,
        numbers=tuple(trial.numbers.values()),
        comparisons=tuple(each for case in cases for each in case.comparisons),
        primary=claim.primary,
        p=_p(cases),
        shared_by=tuple(trial.shared),
    )


def _all(answers: Sequence[Answer]) -> Answer:
    return "fails" if "fails" in answers else "undecided" if "undecided" in answers else "holds"


def _p(cases: Sequence[Case]) -> float | None:
    """A claim holds where all its comparisons do (the largest p), and fails where one does (the least, times their
    number)."""
    holds = [each.p_holds for case in cases for each in case.comparisons if each.p_holds is not None]
    fails = [case.main.p_fails for case in cases if case.main.p_fails is not None]
    if not cases or len(holds) < sum(len(case.comparisons) for case in cases):
        return None
    return min(max(holds), len(cases) * min(fails), 1.0)


class _Trial:
    """One claim on its way to a verdict; ``numbers``, ``notes`` and ``shared`` gather what was seen."""

    def __init__(self, claim: Claim, sweep: SweepRuns, metric: metrics.Metric) -> None:
        self.claim, self.sweep, self.metric = claim, sweep, metric
        self.by, self.noise = (float(at(value, sweep.scale)) for value in (claim.by, claim.noise))
        self.excuse = claim.not_at.get(sweep.scale) or MEANINGLESS.get(sweep.scale)
        self.numbers: dict[str, Measured] = {}
        self.notes: list[str] = []
        self.shared: list[str] = []
        self.pool = Pool.of([self._values(arm) for arm in sweep.measured])

    def run(self) -> list[Case]:
        """The comparisons of the claim.

        Raises:
            Undecided: an arm is missing or has too few seeds, or this scale cannot decide.
        """
        claim, scale = self.claim, self.sweep.scale
        asked = [*claim.arms, *([claim.control] if claim.control else [])]
        wheres = [{key: at(value, scale) for key, value in where.items()} for where in asked]
        cases = [wheres] if claim.each is None else self._each(claim.each, wheres)
        samples = [[self._sample(where, i == 0) for i, where in enumerate(case)] for case in cases]
        floors = [self._sample({"floor": floor}) for floor in claim.floors]
        if self.excuse:
            raise Undecided(self.excuse)
        found = [self._case(case, floors) for case in samples]
        self.shared = self._others_at(_best(floors), [case[0] for case in samples]) if floors else []
        return found

    def _each(self, axis: str, wheres: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        values = dict.fromkeys(arm.labels[axis] for arm in self.sweep.measured if axis in arm.labels)
        cases = [[where | {axis: value} for where in wheres] for value in values]
        complete = [case for case in cases if all(self._find(where) for where in case)]
        return complete or [list(wheres)]

    def _find(self, where: Mapping[str, Any]) -> Arm | None:
        """The one arm that matches; None when there is none or more than one."""
        if "floor" in where:
            found = [arm for arm in self.sweep.floors if arm.floor == where["floor"]]
        else:
            found = [arm for arm in self.sweep.measured if all(arm.get(key) == value for key, value in where.items())]
        return found[0] if len(found) == 1 else None

    def _values(self, arm: Arm) -> Sample:
        pairs = self.sweep.by_seed(arm, self.metric.name)
        seeds = tuple(seed for seed, _ in pairs)
        values = tuple(value * self.metric.factor for _, value in pairs)
        diverged = {run.seed for run in arm.runs if run.diverged} - set(seeds)
        return Sample(arm.name, seeds, values, tuple(sorted(diverged)), arm.constant)

    def _sample(self, where: Mapping[str, Any], first: bool = False) -> Sample:
        """An arm's values, noted. The first of a claim of failure is judged by its diverged seeds, too."""
        wanted = ", ".join(str(value) if key == "floor" else f"{key} = {show(value)}" for key, value in where.items())
        arm = self._find(where)
        if arm is None:
            raise Undecided(f"missing arm: {wanted}")
        sample = self._values(arm)
        may_fail = first and self.claim.test == "at_floor"
        seeds = len(sample.values) + len(sample.diverged) * may_fail
        if not seeds:
            raise Undecided(f"{wanted}: {'diverged' if sample.diverged else arm.absent or 'no ' + self.metric.name}")
        self._show(sample)
        if seeds < self.claim.seeds and not sample.constant:
            raise Undecided(f"{wanted}: n = {seeds}; {self.claim.seeds} seeds decide")
        if sample.diverged:
            words = "counted as at the floor" if may_fail else "left out"
            self.notes.append(f"{wanted} diverged in {len(sample.diverged)} of {arm.planned} seeds, {words}")
        return sample

    def _show(self, sample: Sample) -> None:
        n = len(sample.values)
        if n:
            sd = math.sqrt(sample.variance) if n > 1 else None
            self.numbers[sample.arm] = Measured(sample.arm, sample.mean, sd, n, len(sample.diverged))

    def _case(self, arms: Sequence[Sample], floors: Sequence[Sample]) -> Case:
        match self.claim.test:
            case "at_floor":
                floor = _best(floors)
                return Case(self._at_floor(arms[0], floor), self._test(">", [(1, arms[1]), (-1, floor)]))
            case "order":
                if len(arms) > 2 and list(arms) != sorted(arms, key=lambda arm: arm.mean):
                    self.notes.append("the means are not in this order")
                return Case(self._test(">", _slope(arms)))
            case "gap":
                return Case(self._test(">", [(1, arms[0]), (-1, arms[1])]))
            case "close":
                return Case(self._test("within ±", [(1, arms[0]), (-1, arms[1])]))
            case "interaction":
                return Case(self._test(">", list(zip((1, -1, -1, 1), arms, strict=True))))

    def _at_floor(self, arm: Sample, floor: Sample) -> Comparison:
        """Training that diverged in a seed brought nothing there: that seed stands at the floor."""
        there = dict(zip(floor.seeds, floor.values, strict=True))
        values = [*zip(arm.seeds, arm.values, strict=True), *((s, there.get(s, floor.mean)) for s in arm.diverged)]
        seeds, filled = zip(*sorted(values), strict=True)
        return self._test("≤", [(1, replace(arm, seeds=seeds, values=filled)), (-1, floor)])

    def _others_at(self, floor: Sample, mine: Sequence[Sample]) -> list[str]:
        """The other arms that are at this floor as well: they, too, learned nothing that it does not have."""
        found = []
        for sample in map(self._values, self.sweep.measured):
            if sample.arm in {each.arm for each in mine} or not (sample.values or sample.diverged):
                continue
            with contextlib.suppress(Undecided):
                if self._at_floor(sample, floor).answer == "holds":
                    self._show(sample)
                    found.append(sample.arm)
        return found

    def _test(self, sign: Sign, terms: Sequence[Term]) -> Comparison:
        found = estimate(terms, self.claim.interval, self.noise, self.pool)
        return compare(_named(terms), found, sign, self.by)


def _best(floors: Sequence[Sample]) -> Sample:
    return max(floors, key=lambda floor: floor.mean)


def _named(terms: Sequence[Term]) -> str:
    """The estimate in words, such as ``(m = 0.99) − (m = 0.9)``."""
    if any(abs(c) != 1 for c, _ in terms):
        return f"mean gain a step, {_bracketed(terms[-1][1].arm)} to {_bracketed(terms[0][1].arm)}"
    named = " ".join(f"{'−' if c < 0 else '+'} {_bracketed(sample.arm)}" for c, sample in terms if c)
    return named.removeprefix("+ ")


def _bracketed(arm: str) -> str:
    return f"({arm})" if "=" in arm or "," in arm else arm


def _slope(arms: Sequence[Sample]) -> list[Term]:
    """The mean gain from an arm to the next: the slope of the line through their means, least squares.

    One contrast of the arms, in the unit of the threshold, takes the same interval as any other claim. Rank tests
    (Jonckheere, Page) suppose equal spreads, know no threshold, and have few p-values with three seeds. It does not
    tell a hump from a rise: where the means are not in order, that is said beside the answer.
    """
    places = [i - (len(arms) - 1) / 2 for i in range(len(arms))]
    squares = sum(place**2 for place in places)
    return [(place / squares, arm) for place, arm in zip(places, arms, strict=True)][::-1]
