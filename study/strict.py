"""JSON that every reader takes: a number that is not finite is null, since JSON has no NaN and no infinity."""

import json
import math
from typing import Any


def dumps(tree: Any, **options: Any) -> str:
    """``json.dumps``, with null for every float that is not finite.

    Args:
        tree: of dictionaries, lists, tuples and plain values.
        options: those of ``json.dumps``.
    """
    return json.dumps(_finite(tree), allow_nan=False, **options)


def number(value: float | None) -> float:
    """What `dumps` wrote, read again: null is NaN."""
    return math.nan if value is None else float(value)


def _finite(tree: Any) -> Any:
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    return [_finite(value) for value in tree] if isinstance(tree, list | tuple) else tree
