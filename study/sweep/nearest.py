"""What tells a config from its scale: the scale that it is nearest to, and the fewest keys that make the rest of it."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from study.config.reading import flatten, merge, resolve
from study.config.schema import render
from study.errors import UserError
from study.sweep.grid import SCALES, Tree, scale_names, scale_overlay, short_key

MOST_NAMED = 8
"""Differences that are said; the others are counted."""


class Difference(NamedTuple):
    """A config as its ``scale``, empty where there is none to compare with, and the ``keys`` that differ (no seed)."""

    scale: str
    keys: dict[str, Any]

    def __str__(self) -> str:
        return self._said(self.keys)

    @property
    def name(self) -> str:
        """In short, as the arms of a sweep are named: ``smoke lr=30``."""
        return f"{self.scale} {self._said({short_key(key): value for key, value in self.keys.items()})}".strip()

    def _said(self, keys: Mapping[str, Any]) -> str:
        parts = [f"{key}={text(value)}" for key, value in keys.items()]
        more = len(parts) - MOST_NAMED
        return " ".join(parts[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else []))


def difference(params: Mapping[str, Any], scale: str = "") -> Difference:
    """How a config differs from a scale.

    Args:
        params: the config, flattened; one of an older schema, or a part of one, will do.
        scale: which; by default that with the fewest keys to change.
    """
    scales = _scales()
    if scale not in scales:
        scale = min(scales, key=lambda name: len(_unequal(name, params)), default="")
    if not scale:
        return Difference("", {})
    keys = _unequal(scale, params)
    for key in reversed(keys):  # what the others imply says nothing: of a bank that it has no m
        fewer = {name: value for name, value in keys.items() if name != key}
        if _made(scale, fewer, params.get("seed", 0)) == params:
            keys = fewer
    return Difference(scale, keys)


def text(value: Any) -> str:
    """A value as short as it can be read back: ``30`` of 30.0."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return value if isinstance(value, str) else render(value)


@cache
def _scales() -> dict[str, tuple[Tree, dict[str, Any]]]:
    """Each scale's tree as it is written, and its whole config, flattened."""
    found = {}
    for name in scale_names(SCALES):
        tree = scale_overlay(name)
        found[name] = tree, _flat(tree)
    return found


def _unequal(scale: str, params: Mapping[str, Any]) -> dict[str, Any]:
    base = _scales()[scale][1]
    return {key: value for key, value in params.items() if key != "seed" and (key not in base or base[key] != value)}


def _made(scale: str, keys: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
    """The whole config that these keys make of a scale; None if they make none."""
    try:
        return _flat(merge(merge(_scales()[scale][0], keys), {"seed": seed}))
    except UserError:
        return None


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return flatten(resolve(tree, "scale").model_dump(mode="json"))
