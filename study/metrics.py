"""How each metric is named and printed: one place, so that tables, figures and claims agree."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A logged name, its label for readers, and its unit.

    Runs log accuracies as fractions; readers (and the paper) see per cent, so ``factor`` is 100 for those. Thresholds
    in claims.yaml are in the printed unit.
    """

    name: str
    label: str
    unit: str = ""
    factor: float = 1.0
    digits: int = 3
    printed: bool = False
    """A column of the printed tables; csv has all."""

    @property
    def points(self) -> str:
        """Unit of a difference between two values."""
        return "points" if self.unit == "%" else self.unit

    @property
    def axis(self) -> str:
        """Label of an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def show(self, value: float) -> str:
        """A logged value as printed, without its unit."""
        return f"{value * self.factor:.{self.digits}f}" if math.isfinite(value) else "diverged"


def _percent(name: str, label: str, printed: bool = True) -> Metric:
    return Metric(name, label, "%", 100.0, 1, printed)


_KNOWN = {
    metric.name: metric
    for metric in (
        _percent("knn", "kNN"),
        _percent("linear", "linear"),
        _percent("probe/top1", "probe top-1"),
        _percent("knn_output", "kNN on q", printed=False),
        _percent("train/accuracy", "pretext"),
        Metric("train/excess_loss", "loss − ln(K+1)"),
        Metric("probe/loss", "probe loss"),
        Metric("consistency/cosine_oldest", "key cosine", printed=True),
        Metric("consistency/theta_distance", "‖θ_q − θ_k‖ / ‖θ_q‖"),
        Metric("consistency/alignment", "alignment"),
        Metric("consistency/uniformity", "uniformity"),
        Metric("consistency/effective_rank", "effective rank", digits=1),
    )
}


def of(name: str) -> Metric:
    """The metric of that logged name; an unknown one is printed as it is."""
    return _KNOWN.get(name, Metric(name, name))


def ordered(names: set[str]) -> list[str]:
    """Known metrics in the order above, then the others by name."""
    return [name for name in _KNOWN if name in names] + sorted(names - set(_KNOWN))
