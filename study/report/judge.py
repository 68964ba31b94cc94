"""Claims against stored runs.

One rule serves every test: an estimate, a difference between arms, comes with an interval, and the claim is decided
only when the whole interval lies on one side of the threshold. With several seeds the interval is the 95 % t-interval
whose standard deviation is pooled over the sweep's arms; with fewer than two degrees of freedom it is ± the ``noise``
that the claim was registered with.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from study import metrics
from study.report.load import Arm, SweepRuns, show
from study.sweep.claims import Claim, at

MEANINGLESS = {"smoke": "scale smoke shows that everything runs; its numbers mean nothing"}
Answer = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True)
class Measured:
    """An arm's numbers, in the printed unit."""

    arm: str
    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Comparison:
    """One estimate with its interval, compared with one threshold, in the printed unit."""

    what: str
    estimate: float
    low: float
    high: float
    threshold: float
    interval: str


@dataclass(frozen=True)
class Verdict:
    """The answer to one claim at one scale, and the numbers that it rests on."""

    id: str
    sweep: str
    scale: str
    statement: str
    source: str
    registered: str
    metric: str
    rule: str
    answer: Answer
    reason: str
    numbers: tuple[Measured, ...]
    comparisons: tuple[Comparison, ...]
    shared_by: tuple[str, ...] = ()
    """Other arms of the sweep that pass the same test, with ``at_floor``: where many do, the floor tells little."""

    @property
    def evidence(self) -> str:
        """The numbers on one line; empty when there are none."""
        metric = metrics.of(self.metric)
        return f"{metric.axis}: " + "; ".join(_spoken(each, metric) for each in self.numbers) if self.numbers else ""

    def as_json(self) -> dict[str, Any]:
        """Plain values, rounded so that the file is the same on every machine."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def _spoken(each: Measured, metric: metrics.Metric) -> str:
    spread = "" if each.sd is None else f" ± {each.sd:.{metric.digits}f}"
    return f"{each.arm} {each.mean:.{metric.digits}f}{spread} (n = {each.n})"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


class _Undecided(Exception):  # noqa: N818 - an answer, no error
    """Why a claim cannot be decided."""


def judge(name: str, claim: Claim, sweep: SweepRuns) -> Verdict:
    """The verdict on one claim at the scale of ``sweep``."""
    metric = metrics.of(at(claim.metric, sweep.scale))
    by = float(at(claim.by, sweep.scale))
    trial = _Trial(claim, sweep, metric, by)
    try:
        comparisons, answer = trial.run()
        sign = {"at_floor": "≤", "close": "within ±"}.get(claim.test, ">")
        reason = "; ".join(_sentence(each, metric, sign) for each in comparisons)
        reason += f" ({comparisons[0].interval})"
    except _Undecided as why:
        comparisons, answer, reason = [], "undecided", str(why)
    except _AtFloor as why:
        comparisons, answer, reason = [], "holds", str(why)
    shared: list[str] = []
    if claim.test == "at_floor" and (comparisons or answer == "holds"):
        shared, words = trial.shared(answer)
        reason += words
    return Verdict(
        id=name,
        sweep=sweep.name,
        scale=sweep.scale,
        statement=claim.statement,
        source=claim.source,
        registered=claim.registered.strip(),
        metric=metric.name,
        rule=_rule(claim, by, metric),
        answer=answer,
        reason=reason,
        numbers=tuple(trial.numbers.values()),
        comparisons=tuple(comparisons),
        shared_by=tuple(shared),
    )


class _AtFloor(Exception):  # noqa: N818 - an answer, no error
    """The arm has no numbers because it diverged."""


@dataclass(frozen=True)
class _Mean:
    arm: str
    mean: float
    n: int


class _Trial:
    """One claim on its way to a verdict; ``numbers`` gathers what was looked at."""

    def __init__(self, claim: Claim, sweep: SweepRuns, metric: metrics.Metric, by: float) -> None:
        self.claim, self.sweep, self.metric, self.by = claim, sweep, metric, by
        self.excuse = claim.not_at.get(sweep.scale) or MEANINGLESS.get(sweep.scale)
        self.numbers: dict[str, Measured] = {}

    def run(self) -> tuple[list[Comparison], Answer]:
        scale = self.sweep.scale
        wheres = [{key: at(value, scale) for key, value in where.items()} for where in self.claim.arms]
        cases = [wheres] if self.claim.each is None else self._each(self.claim.each, wheres)
        means = [[self._mean(where) for where in case] for case in cases]
        floors = [self._mean({"floor": floor}) for floor in self.claim.floors]
        if self.excuse:
            raise _Undecided(self.excuse)
        spread = _Spread(self.sweep, self.metric, float(at(self.claim.noise, scale)))
        found = [pair for case in means for pair in self._compare(case, floors, spread)]
        return [comparison for comparison, _ in found], _all(answer for _, answer in found)

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

    def _mean(self, where: Mapping[str, Any]) -> _Mean:
        wanted = ", ".join(str(value) if key == "floor" else f"{key} = {show(value)}" for key, value in where.items())
        arm = self._find(where)
        if arm is None:
            raise _Undecided(f"missing arm: {wanted}")
        values = self._values(arm)
        if not len(values):
            if arm.diverged and self.claim.test == "at_floor" and not self.excuse:
                raise _AtFloor(f"{wanted} diverged in {arm.diverged} of {arm.planned} seeds")
            raise _Undecided(f"{wanted}: {'diverged' if arm.diverged else arm.absent or 'no ' + self.metric.name}")
        self._show(arm, values)
        if len(values) < self.claim.seeds:
            raise _Undecided(f"{wanted}: n = {len(values)}; {self.claim.seeds} seeds decide")
        return _Mean(arm.name, float(values.mean()), len(values))

    def _show(self, arm: Arm, values: np.ndarray) -> None:
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        self.numbers[arm.name] = Measured(arm.name, float(values.mean()), sd, len(values))

    def shared(self, own: Answer) -> tuple[list[str], str]:
        """The other arms that are at the floor as well, and the words that say so: the verdict does not single out an
        arm that shares it."""
        spread = _Spread(self.sweep, self.metric, float(at(self.claim.noise, self.sweep.scale)))
        mine = self._find({key: at(value, self.sweep.scale) for key, value in self.claim.arms[0].items()})
        samples = {arm.name: self._values(arm) for arm in self.sweep.floors if arm.floor in self.claim.floors}
        floors = [_Mean(name, float(sample.mean()), len(sample)) for name, sample in samples.items() if len(sample)]
        others = [arm for arm in self.sweep.measured if arm is not mine and (arm.diverged or len(self._values(arm)))]
        found = []
        for arm in others:
            values = self._values(arm)
            if len(values) and floors:
                ((_, answer),) = self._compare([_Mean(arm.name, float(values.mean()), len(values))], floors, spread)
                if answer == "holds":
                    self._show(arm, values)
                    found.append(arm.name)
            elif not len(values):
                found.append(arm.name)
        if not found:
            return found, "; no other arm is at this floor" if others else ""
        if own != "holds":
            return found, f"; at this floor: {', '.join(found)}"
        words = f"; so {'does' if len(found) == 1 else 'do'} {', '.join(found)}: at this scale this floor "
        return found, words + ("tells nothing apart" if len(found) == len(others) else "does not tell them apart")

    def _values(self, arm: Arm) -> np.ndarray:
        return self.sweep.values(arm, self.metric.name) * self.metric.factor

    def _compare(
        self, arms: Sequence[_Mean], floors: Sequence[_Mean], spread: "_Spread"
    ) -> list[tuple[Comparison, Answer]]:
        match self.claim.test:
            case "at_floor":
                pairs, decide = [(arms[0], max(floors, key=lambda floor: floor.mean))], _below
            case "order":
                pairs, decide = [(better, worse) for worse, better in itertools.pairwise(arms)], _above
            case "gap":
                pairs, decide = [(arms[0], arms[1])], _above
            case "close":
                pairs, decide = [(arms[0], arms[1])], _within
            case "interaction":
                each = spread.compare(self.by, list(zip(arms, (1, -1, -1, 1), strict=True)))
                return [(each, _above(each))]
        found = [spread.compare(self.by, [(a, 1), (b, -1)]) for a, b in pairs]
        return [(each, decide(each)) for each in found]


class _Spread:
    """The noise of one seed's value, pooled over the arms of a sweep that have several seeds."""

    def __init__(self, sweep: SweepRuns, metric: metrics.Metric, noise: float) -> None:
        samples = [sweep.values(arm, metric.name) * metric.factor for arm in sweep.measured]
        residuals = np.concatenate([sample - sample.mean() for sample in samples if len(sample) > 1] or [np.empty(0)])
        self.noise = noise
        self.freedom = len(residuals) - sum(len(sample) > 1 for sample in samples)
        self.sd = math.sqrt(float((residuals**2).sum()) / self.freedom) if self.freedom else 0.0

    def compare(self, threshold: float, signed: Sequence[tuple[_Mean, int]]) -> Comparison:
        """Estimate Σ sign·mean with its interval."""
        what = " ".join(f"{'−' if sign < 0 else '+'} {_bracketed(mean.arm)}" for mean, sign in signed)
        estimate = sum(sign * mean.mean for mean, sign in signed)
        if self.freedom >= 2:
            from scipy.special import stdtrit  # type: ignore[import-untyped]

            half = float(stdtrit(self.freedom, 0.975)) * self.sd * math.sqrt(sum(1 / mean.n for mean, _ in signed))
            interval = f"± is the 95 % t-interval, {self.freedom} degrees of freedom"
        else:
            half = self.noise
            interval = "± is the registered noise: one seed" if half else "one seed"
        return Comparison(what.removeprefix("+ "), estimate, estimate - half, estimate + half, threshold, interval)


def _bracketed(arm: str) -> str:
    return f"({arm})" if "=" in arm or "," in arm else arm


def _above(each: Comparison) -> Answer:
    return "holds" if each.low > each.threshold else "fails" if each.high <= each.threshold else "undecided"


def _below(each: Comparison) -> Answer:
    return "holds" if each.high <= each.threshold else "fails" if each.low > each.threshold else "undecided"


def _within(each: Comparison) -> Answer:
    if -each.threshold <= each.low and each.high <= each.threshold:
        return "holds"
    return "fails" if each.low > each.threshold or each.high < -each.threshold else "undecided"


def _all(answers: Iterable[Answer]) -> Answer:
    found = set(answers)
    return "fails" if "fails" in found else "undecided" if "undecided" in found else "holds"


def _sentence(each: Comparison, metric: metrics.Metric, sign: str) -> str:
    d, half = metric.digits, (each.high - each.low) / 2
    margin = f" ± {half:.{d}f}" if half else ""
    estimate, threshold = (text.replace("-", "−") for text in (f"{each.estimate:+.{d}f}", f"{each.threshold:.{d}f}"))
    return f"{each.what}: {estimate}{margin}, needed {sign} {threshold}"


def _rule(claim: Claim, by: float, metric: metrics.Metric) -> str:
    unit = f" {metric.points}" if metric.points else ""
    more = f" by more than {by:g}{unit}" if by else ""
    at_each = f", at each {claim.each}" if claim.each else ""
    rules = {
        "at_floor": f"no better than the best of {', '.join(claim.floors)}, plus {by:g}{unit}",
        "order": f"each arm better than the one before{more}",
        "gap": f"the first arm better than the second{more}",
        "close": f"the two arms within {by:g}{unit}",
        "interaction": f"the first difference larger than the second{more}",
    }
    return rules[claim.test] + at_each


def judge_all(claims: Mapping[str, Claim], sweep: SweepRuns) -> list[Verdict]:
    """Verdicts on the claims of a sweep, in the order of claims.yaml."""
    return [judge(name, claim, sweep) for name, claim in claims.items() if claim.sweep == sweep.name]
