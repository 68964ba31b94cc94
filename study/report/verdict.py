"""The answer to a claim, and the words that go with it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from study import metrics
from study.metrics import Metric
from study.report.compare import Answer, Comparison
from study.report.intervals import MOST_SEEDS
from study.sweep.claims import Claim


@dataclass(frozen=True)
class Measured:
    """An arm's numbers, in the printed unit."""

    arm: str
    mean: float
    sd: float | None
    n: int
    diverged: int = 0


@dataclass(frozen=True)
class Case:
    """One comparison of a claim; with ``at_floor`` also that of the control with the floor."""

    main: Comparison
    control: Comparison | None = None

    @property
    def comparisons(self) -> list[Comparison]:
        return [self.main, self.control] if self.control else [self.main]

    @property
    def answer(self) -> Answer:
        """To be at a floor is a failure only where an arm that trains is above it."""
        if self.main.answer == "holds" and self.control and self.control.answer != "holds":
            return "undecided"
        return self.main.answer


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
    primary: bool = False
    p: float | None = None
    """Twice the one-sided p-value of the answer, or of the likelier one where undecided; None without an SD."""
    p_adjusted: float | None = None
    adjusted: Answer | None = None
    """What is left after Holm's adjustment over the primary claims of the scale; None for others, and without a p."""
    shared_by: tuple[str, ...] = ()
    """Other arms of the sweep that pass the same test, with ``at_floor``."""

    @property
    def evidence(self) -> str:
        """The numbers on one line; empty when there are none."""
        metric = metrics.of(self.metric)
        return f"{metric.axis}: " + "; ".join(_spoken(each, metric) for each in self.numbers) if self.numbers else ""

    @property
    def after_holm(self) -> str:
        """The adjusted answer with its p-value; a dash where the claim is not primary."""
        if not self.primary:
            return "–"
        if self.adjusted is None or self.p_adjusted is None:
            return "no p-value"
        return f"{self.adjusted}, p {'< 0.001' if self.p_adjusted < 0.001 else f'= {self.p_adjusted:.2g}'}"

    def as_json(self) -> dict[str, Any]:
        """Plain values, rounded so that the file is the same on every machine."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def _spoken(each: Measured, metric: Metric) -> str:
    spread = "" if each.sd is None else f" ± {each.sd:.{metric.digits}f}"
    diverged = f", {each.diverged} diverged" if each.diverged else ""
    return f"{each.arm} {each.mean:.{metric.digits}f}{spread} (n = {each.n}{diverged})"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def because(cases: Sequence[Case], answer: Answer, metric: Metric) -> str:
    """Each comparison with its interval; where they leave the claim undecided, what is missing."""
    found = [each for case in cases for each in case.comparisons]
    intervals = list(dict.fromkeys(each.interval for each in found))
    if len(intervals) == 1:
        said = ["; ".join(_sentence(each, metric) for each in found) + f" ({intervals[0]})"]
    else:
        said = [f"{_sentence(each, metric)} ({each.interval})" for each in found]
    for case in cases if answer == "undecided" else ():
        if case.control and case.control.answer != "holds":
            said.append("the control is not shown to be above this floor, so to be at it is no failure")
        said += [_resolution(each, metric) for each in case.comparisons if each.resolves is not None]
    return "; ".join(said)


def _sentence(each: Comparison, metric: Metric) -> str:
    d, half = metric.digits, (each.high - each.low) / 2
    margin = f" ± {half:.{d}f}" if half else ""
    estimate, threshold = (text.replace("-", "−") for text in (f"{each.estimate:+.{d}f}", f"{each.threshold:.{d}f}"))
    return f"{each.what}: {estimate}{margin}, needed {each.sign} {threshold}"


def _resolution(each: Comparison, metric: Metric) -> str:
    """What these seeds can tell, and how many this distance takes."""
    d = metric.digits
    takes = f"{each.needs}" if each.needs else f"more than {MOST_SEEDS:,}"
    return (
        f"{each.seeds} seeds tell a distance of {each.resolves:.{d}f} from the threshold at 80 % power; this one, "
        f"{each.distance:.{d}f}, takes {takes}"
    )


def rule(claim: Claim, by: float, metric: Metric) -> str:
    """What the test asks, in words."""
    unit = f" {metric.points}" if metric.points else ""
    more = f" by more than {by:g}{unit}" if by else ""
    at_each = f", at each {claim.each}" if claim.each else ""
    rules = {
        "at_floor": f"no better than the best of {', '.join(claim.floors)}, plus {by:g}{unit}, and the control is",
        "order": f"each arm better than the one before{more}",
        "gap": f"the first arm better than the second{more}",
        "close": f"the two arms within {by:g}{unit}",
        "interaction": f"the first difference larger than the second{more}",
    }
    if claim.test == "order" and len(claim.arms) > 2:
        rules["order"] = f"the arms rise from one to the next{more}, in the mean"
    return rules[claim.test] + at_each
