"""Pre-registered claims: what `sweeps/claims.yaml` may say. `study.report.judge` holds it against stored runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from study.config.explain import explain
from study.config.reading import read_yaml
from study.config.schema import render
from study.errors import UserError
from study.sweep.grid import Label

Where = dict[str, Label | dict[str, Label]]
"""An arm: label or config key → value, or scale → value; ``{floor: name}`` is a floor."""
Test = Literal["at_floor", "order", "gap", "close", "interaction"]

_ARMS: Mapping[Test, tuple[int, int]] = {
    "at_floor": (1, 1),
    "order": (2, 99),
    "gap": (2, 2),
    "close": (2, 2),
    "interaction": (4, 4),
}


class Claim(BaseModel):
    """One entry of claims.yaml.

    The tests, with ``by`` in the metric's printed unit:
        at_floor     arms[0] ≤ the best of ``floors`` + by; an arm that diverged in every seed is at the floor
        order        each arm is better than the one before it, by more than ``by``
        gap          arms[0] − arms[1] > by
        close        |arms[0] − arms[1]| ≤ by
        interaction  (arms[0] − arms[1]) − (arms[2] − arms[3]) > by
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sweep: str
    statement: str
    source: str
    """Who says so, and where."""
    registered: str = ""
    """When it was written down, and what was known then."""
    metric: str | dict[str, str] = "knn"
    test: Test
    arms: list[Where]
    floors: list[str] = []
    each: str | None = None
    """Ask the same at each value of this axis at which all the arms exist; every answer must hold."""
    by: float | dict[str, float] = 0.0
    noise: float | dict[str, float] = 0.0
    """Half-width of the interval when seeds are too few to estimate it."""
    seeds: int = 1
    """Fewest seeds an arm that decide."""
    not_at: dict[str, str] = {}
    """Scale → why it cannot decide there, such as a run shorter than the key encoder's lag."""

    @field_validator("metric", "by", "noise")
    @classmethod
    def _has_default(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "default" not in value:
            raise ValueError("one value, or scales with their values and a default")
        return value


def at(value: Any, scale: str) -> Any:
    """A setting, or the one for this scale of a mapping that has a ``default``."""
    return value.get(scale, value["default"]) if isinstance(value, Mapping) else value


def read(path: Path) -> dict[str, Claim]:
    """Read claims.yaml.

    Raises:
        UserError: an unknown key, a wrong type, or a number of arms that the test cannot use.
    """
    claims = {}
    for name, tree in read_yaml(path).items():
        try:
            claim = Claim.model_validate(tree)
        except ValidationError as error:
            fault = explain(error, tree, Claim)
            dot = "" if fault.startswith(" =") else "."  # no key: the entry itself is no mapping
            raise UserError(f"{path}: {name}{dot}{fault}") from None
        least, most = _ARMS[claim.test]
        if not least <= len(claim.arms) <= most:
            allowed = str(least) if least == most else f"{least} or more"
            raise UserError(f"{path}: {name}.arms has {len(claim.arms)}: allowed is {allowed} with {claim.test}")
        if (claim.test == "at_floor") != bool(claim.floors):
            allowed = "one name or more" if claim.test == "at_floor" else f"none with {claim.test}"
            raise UserError(f"{path}: {name}.floors = {render(claim.floors)}: allowed is {allowed}")
        claims[name] = claim
    return claims
