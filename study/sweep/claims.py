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
Interval = Literal["paired", "welch", "pooled"]

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
        at_floor     arms[0] ≤ the best of ``floors`` + by, and ``control`` > the same: where nothing is above a floor,
                     to be at it is no failure. A seed that diverged counts as at the floor
        order        arms[1] − arms[0] > by; of more arms, one test of the trend: the mean gain from each to the next
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
    control: Where | None = None
    """With ``at_floor``: an arm that does train."""
    each: str | None = None
    """Ask the same at each value of this axis at which all the arms exist; every answer must hold."""
    by: float | dict[str, float] = 0.0
    interval: Interval = "welch"
    """Whose spread the 95 % interval is made of, see `study.report.intervals`: that of the differences within each seed
    (where the arms have the same seeds; else as ``welch``), each arm's own, or one of all arms of the sweep."""
    noise: float | dict[str, float] = 0.0
    """Half-width of the interval with one seed an arm."""
    primary: bool = False
    """One of the few that Holm's adjustment is made for, over all of a scale."""
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
        if (claim.test == "at_floor") != (claim.control is not None):
            allowed = "an arm that trains" if claim.test == "at_floor" else f"none with {claim.test}"
            raise UserError(f"{path}: {name}.control = {render(claim.control)}: allowed is {allowed}")
        claims[name] = claim
    return claims
