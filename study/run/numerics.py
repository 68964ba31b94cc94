"""Which numerics made a run (`study.config.schema.NUMERICS`), and whether those of one table are the same."""

from collections import Counter
from collections.abc import Iterable

FIRST = "1"
"""Of runs from before the numerics were kept."""


def text(numerics: Iterable[int]) -> str:
    """``1``, or ``1+2`` of a run that was begun by one and continued by the other."""
    return "+".join(str(each) for each in sorted(set(numerics)))


def apart(made: Iterable[str]) -> str:
    """A sentence on runs that stand in one table, from each run's `text`; empty when one numerics made them all."""
    counts = sorted(Counter(made).items())
    if len(counts) < 2:
        return ""
    by = ", ".join(f"{count:,} by {numerics}" for numerics, count in counts)
    return f"made by different numerics, so not to be compared in every digit: {by}"
