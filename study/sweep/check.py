"""Are the claims that a sweep names ones that can be judged? Asked before the training, not after it."""

from collections.abc import Mapping

from study.config.reading import flatten
from study.config.schema import Config, render
from study.errors import UserError
from study.sweep import claims, grid
from study.sweep.grid import Sweep


def check(sweep: Sweep) -> None:
    """Read the claims beside a sweep that names some, and look for what they speak of.

    A scale may leave out arms that a claim needs: there the claim stays undecided, which is no fault.

    Raises:
        UserError: a claim is malformed, is about another sweep, or about labels or floors that this one lacks.
    """
    if not sweep.claims:
        return
    path = sweep.path.parent / "claims.yaml"
    registered = claims.read(path)
    known = grid.labels(sweep.path)
    settings = {"K", *flatten(Config.model_validate({}).model_dump())}
    for name in sweep.claims:
        claim = registered[name]
        if claim.sweep != sweep.name:
            raise UserError(
                f"{path}: {name}.sweep = {claim.sweep}: allowed is {sweep.name}, whose file names this claim"
            )
        floors: list[claims.Where] = [{"floor": floor} for floor in claim.floors]
        for where in [*claim.arms, *([claim.control] if claim.control else []), *floors]:
            for key, value in where.items():
                if key not in known and key not in settings:
                    allowed = f"{', '.join(known)}, or a key of the config"
                    raise UserError(f"{path}: {name}.arms: {key} = {render(value)}: no axis; allowed is {allowed}")
                for label in value.values() if isinstance(value, Mapping) else [value]:
                    if key in known and label not in known[key]:
                        allowed = ", ".join(map(render, known[key])) or "none: the sweep has no floors"
                        raise UserError(f"{path}: {name}.arms: {key} = {render(label)}: allowed is {allowed}")
