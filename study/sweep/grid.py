"""A sweep's YAML and a scale give points: one resolved config, one signature and one set of labels each.

Merge order, the later over the earlier: ``scales/<scale>.yaml`` ← ``base`` ← ``scales[scale]`` ← the command line ←
the axes' choices ← ``adjust`` ← the seed. The command line changes what the arms share; a key that an axis sets is
refused there, because the labels of the arms would no longer say what ran.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from study.config.explain import explain
from study.config.reading import flatten, merge, nest, read_yaml, resolve
from study.config.schema import Config, Probe, render
from study.errors import UserError

SCALES = Path(__file__).parents[2] / "sweeps" / "scales"

Label = str | int | float | bool
Tree = dict[str, Any]
Choices = dict[str, dict[Label, Tree]]
"""Axis → label → the overrides of that choice, nested."""


SHOWN = 20
"""Arms that an error lists."""
METRICS = ("knn", "knn_output", "linear", "probe/top1")


class Cost(BaseModel):
    """What one point takes at one scale, and where the figure comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    core_seconds: float | None = Field(None, gt=0)
    gpu_seconds: float | None = Field(None, gt=0)
    source: str

    @model_validator(mode="after")
    def _one(self) -> "Cost":
        if (self.core_seconds is None) == (self.gpu_seconds is None):
            raise ValueError("either core_seconds or gpu_seconds")
        return self

    @property
    def seconds(self) -> float:
        return self.core_seconds or self.gpu_seconds or 0.0

    @property
    def unit(self) -> str:
        """``"core"`` or ``"GPU"``."""
        return "core" if self.core_seconds else "GPU"


class Rule(BaseModel):
    """Arms by their labels, ``{axis: value or values}``, at all scales or at some; ``set`` is for ``adjust`` only."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    scale: str | list[str] | None = None
    set: Tree | None = None

    @property
    def where(self) -> dict[str, list[Label]]:
        """Axis → the values that it matches."""
        return {axis: value if isinstance(value, list) else [value] for axis, value in (self.model_extra or {}).items()}

    def at(self, scale: str) -> bool:
        return self.scale is None or scale in ([self.scale] if isinstance(self.scale, str) else self.scale)

    def matches(self, labels: Mapping[str, Label]) -> bool:
        return all(labels[axis] in values for axis, values in self.where.items())


class SweepFile(BaseModel):
    """The keys of a sweep's YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    title: str
    description: str = ""
    command: str = ""
    base: Tree = {}
    axes: Annotated[dict[str, list[Label] | dict[Label, Tree]], Field(min_length=1)]
    adjust: list[Rule] = []
    exclude: list[Rule] = []
    floors: dict[str, Tree] = {}
    seeds: list[int] | dict[str, list[int]] = [0]
    scales: dict[str, Tree] = {}
    metric: str | dict[str, str] = "knn"
    paper: list[dict[str, Any]] = []
    claims: list[str] = []
    cost: dict[str, Cost] = {}
    expected: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    signature: str
    config: Config
    labels: dict[str, Label]
    """Axis → value: the arm. A floor has none, and a pre-training none of the axes that change its probe alone."""
    seed: int
    floor: str | None
    name: str
    """What differs between the points, such as ``m=0.99 seed=1``."""
    after: str | None
    """Signature of the pre-training that must be finished before this probe can start."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A grid at one scale. The points come seed by seed, so that a grid cut short has every arm once."""

    name: str
    scale: str
    title: str
    description: str
    path: Path
    points: tuple[Point, ...]
    axes: tuple[str, ...]
    claims: tuple[str, ...]
    cost: Cost | None
    expected: Any
    paper: tuple[dict[str, Any], ...]
    metric: str
    overrides: Tree
    """What the command line changed for all points."""

    @property
    def id(self) -> str:
        """Name of the sweep's record and of its experiment in MLflow."""
        return f"{self.name}-{self.scale}"


def load(path: Path, scale: str, overrides: Mapping[str, Any] | None = None) -> Sweep:
    """Expand a sweep.

    Args:
        path: the sweep's YAML; the scales lie in the folder ``scales`` beside it, else in the project's.
        scale: name of a scale.
        overrides: a config tree, from the command line, that all points share.

    Raises:
        UserError: a fault in one of the files or in the overrides; one line with the file and the key.
    """
    file = _read(path)
    scales = path.parent / "scales" if (path.parent / "scales").is_dir() else SCALES
    overlay = scale_overlay(scale, scales)
    choices = _choices(file)
    _check_rules(file, path, choices)
    _check_scales(file, path, scales)
    _check_metric(file, path)
    _check_claims(file, path)
    overrides = merge({}, overrides or {})
    _check_overrides(file, overrides, choices)
    _check_paper(file, path, choices)
    about_probe = {axis for axis, of in choices.items() if all(key.startswith("probe") for key in _set_by(of))}

    shared = merge(merge(overlay, file.base), file.scales.get(scale, {}))
    points: dict[str, Point] = {}
    arms = list(_arms(file, path, scale, choices, merge(shared, overrides)))
    seeds = _seeds(file, scale, overrides)
    for seed in seeds:
        for labels, floor, tree in arms:
            name = _name(file, labels, floor, seed)
            config = _resolve({**tree, "seed": seed}, path, name, overrides)
            if seed != seeds[0] and _constant(config):
                continue
            for point in _with_pretraining(file, config, labels, floor, name, about_probe):
                twin = points.setdefault(point.signature, point)
                if twin is not point and (point.config.probe is not None or config.probe is None):
                    raise UserError(
                        f"{path}: {twin.name} and {point.name} are the same run; allowed is arms that differ"
                    )
    if not points:
        raise UserError(f"{path}: exclude and seeds leave no point at scale {scale}; allowed is one or more")
    _check_expected(file.expected.get(scale), path, scale, points.values())
    return Sweep(
        name=file.name,
        scale=scale,
        title=file.title,
        description=file.description,
        path=path,
        points=tuple(points.values()),
        axes=tuple(file.axes),
        claims=tuple(file.claims),
        cost=file.cost.get(scale),
        expected=file.expected.get(scale),
        paper=tuple(file.paper),
        metric=file.metric if isinstance(file.metric, str) else file.metric.get(scale, "knn"),
        overrides=overrides,
    )


def labels(path: Path) -> dict[str, list[Label]]:
    """Axis → its labels in a sweep's YAML, whichever of them a scale leaves out; ``floor`` → the floors' names."""
    file = _read(path)
    return {"floor": [*file.floors], **{axis: list(choices) for axis, choices in file.axes.items()}}


# -------------------------------------------------------------------------------------------------------- expanding


def _arms(
    file: SweepFile, path: Path, scale: str, choices: Choices, shared: Tree
) -> Iterator[tuple[dict[str, Label], str | None, Tree]]:
    """Labels, floor and config tree of each arm, then of each floor."""
    arms: list[tuple[dict[str, Label], Tree]] = [({}, shared)]
    for axis, of in choices.items():
        arms = [({**labels, axis: label}, merge(tree, choice)) for labels, tree in arms for label, choice in of.items()]
    for rule in file.adjust:
        if rule.at(scale):
            arms = [(labels, merge(tree, rule.set or {}) if rule.matches(labels) else tree) for labels, tree in arms]
    for rule in file.exclude:
        if rule.at(scale):
            kept = [arm for arm in arms if not rule.matches(arm[0])]
            if len(kept) == len(arms):
                raise UserError(f"{path}: exclude = {render(rule.where)}: matches no arm; allowed is a rule that does")
            arms = kept
    yield from ((labels, None, tree) for labels, tree in arms)
    if arms:
        yield from (({}, floor, merge(shared, over)) for floor, over in file.floors.items())


def _with_pretraining(
    file: SweepFile, config: Config, labels: dict[str, Label], floor: str | None, name: str, about_probe: set[str]
) -> Iterator[Point]:
    """A pre-training as it is; a probe after the pre-training that it needs, which several probes may share."""
    signature = config.signature
    if config.probe is None:
        yield Point(signature, config, labels, config.seed, floor, name, None)
        return
    bare = config.pretraining
    arm = {axis: label for axis, label in labels.items() if axis not in about_probe}
    before = Point(bare.signature, bare, arm, config.seed, floor, _name(file, arm, floor, config.seed), None)
    yield before
    yield Point(signature, config, labels, config.seed, floor, f"{name} probe", before.signature)


def _constant(config: Config) -> bool:
    """Every seed gives the same numbers: raw pixels have no weights, unless a probe is trained on them."""
    return config.encoder.arch == "pixels" and config.probe is None


def _choices(file: SweepFile) -> Choices:
    return {
        axis: {label: merge({}, over) for label, over in choices.items()}
        if isinstance(choices, dict)
        else {value: nest(_KEYS[axis], value) for value in choices}
        for axis, choices in file.axes.items()
    }


def _set_by(choices: dict[Label, Tree]) -> set[str]:
    """The config keys that an axis sets."""
    return {key for over in choices.values() for key in flatten(over)}


def _keys() -> dict[str, str]:
    """Config key by its dotted name, and by its last part where that is unique: ``K`` is ``dictionary.K``."""
    full = list(flatten(Config.model_validate({}).model_dump()))
    last = [key.rpartition(".")[2] for key in full]
    short = {name: key for name, key in zip(last, full, strict=True) if last.count(name) == 1}
    return short | {key: key for key in full} | {key: key for key in (f"probe.{name}" for name in Probe.model_fields)}


_KEYS = _keys()


def short_key(key: str) -> str:
    """The shortest name of a config key that sweeps and names know: ``lr`` of ``optimiser.lr``."""
    last = key.rpartition(".")[2]
    return last if _KEYS.get(last) == key else key


def _name(file: SweepFile, labels: Mapping[str, Label], floor: str | None, seed: int) -> str:
    differing = [f"{axis}={_show(label)}" for axis, label in labels.items() if len(file.axes[axis]) > 1]
    return " ".join([*([floor] if floor else differing), f"seed={seed}"])


def _show(label: Label) -> str:
    return label if isinstance(label, str) else render(label)


def _resolve(tree: Tree, path: Path, name: str, overrides: Tree) -> Config:
    try:
        return resolve(tree, f"{path}: {name}")
    except UserError as error:
        keys = {
            key[:end] for key in flatten(overrides) for end in range(len(key) + 1) if key[end : end + 1] in (".", "")
        }
        if any(str(error).startswith(f"{path}: {name}: {key} ") for key in keys):
            raise UserError(str(error).replace(f"{path}: {name}", f"command line ({path}: {name})", 1)) from None
        raise


# ---------------------------------------------------------------------------------------------------------- reading


def _read(path: Path) -> SweepFile:
    tree = read_yaml(path)
    try:
        file = SweepFile.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, tree, SweepFile)}") from None
    for axis, choices in file.axes.items():
        if not choices:
            raise UserError(f"{path}: axes.{axis} = {render(choices)}: allowed is one value or more")
        if isinstance(choices, list) and axis not in _KEYS:
            raise UserError(
                f"{path}: axes.{axis} = {render(choices)}: not a key of the config; allowed is one, or labels with "
                "the overrides of each"
            )
        if isinstance(choices, list) and len({(type(choice), choice) for choice in choices}) != len(choices):
            raise UserError(f"{path}: axes.{axis} = {render(choices)}: a value stands twice; allowed is once")
    if file.name != path.stem:
        raise UserError(f"{path}: name = {render(file.name)}: allowed is the file's own name, {path.stem}")
    return file


def scale_overlay(scale: str, folder: Path = SCALES) -> Tree:
    """The config tree of a scale, nested.

    Raises:
        UserError: there is no such scale, or its file is no valid config.
    """
    known = scale_names(folder)
    if scale not in known:
        raise UserError(f"{folder}: scale = {render(scale)}: allowed is {', '.join(known) or 'none: it has no *.yaml'}")
    tree = read_yaml(folder / f"{scale}.yaml")
    resolve(tree, str(folder / f"{scale}.yaml"))
    return merge({}, tree)


def scale_names(folder: Path = SCALES) -> list[str]:
    """The scales that lie in a folder."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _check_rules(file: SweepFile, path: Path, choices: Choices) -> None:
    for kind, rules in (("adjust", file.adjust), ("exclude", file.exclude)):
        for rule in rules:
            for axis, values in rule.where.items():
                if axis not in choices:
                    raise UserError(
                        f"{path}: {kind}: {axis} = {render(values)}: no axis; allowed is {', '.join(choices)}"
                    )
                for value in values:
                    if value not in choices[axis]:
                        allowed = ", ".join(_show(label) for label in choices[axis])
                        raise UserError(f"{path}: {kind}: {axis} = {render(value)}: allowed is {allowed}")
            if (rule.set is None) == (kind == "adjust"):
                allowed = "the overrides of these arms" if kind == "adjust" else "none: exclude changes nothing"
                raise UserError(f"{path}: {kind}: set = {render(rule.set)}: allowed is {allowed}")


def _check_metric(file: SweepFile, path: Path) -> None:
    for metric in file.metric.values() if isinstance(file.metric, dict) else [file.metric]:
        if metric not in METRICS:
            raise UserError(f"{path}: metric = {metric}: allowed is {', '.join(METRICS)}")


def _check_claims(file: SweepFile, path: Path) -> None:
    register = path.parent / "claims.yaml"
    known = read_yaml(register) if register.exists() else {}
    for claim in file.claims:
        if claim not in known:
            raise UserError(f"{path}: claims = {claim}: allowed is a claim of {register}")


def _check_paper(file: SweepFile, path: Path, choices: Choices) -> None:
    """Each row names an arm by labels that the axes have, at whichever scale, and has the paper's value of it."""
    for row in file.paper:
        for key, value in row.items():
            if key not in (*choices, "value", "mark"):
                allowed = ", ".join([*choices, "value", "mark"])
                raise UserError(f"{path}: paper: {key} = {render(value)}: no axis; allowed is {allowed}")
            if key in choices and value not in list(choices[key]):
                allowed = ", ".join(_show(label) for label in choices[key])
                raise UserError(f"{path}: paper: {key} = {render(value)}: allowed is {allowed}")
        if "value" not in row or not row.keys() & choices.keys():
            allowed = "the labels of an arm, value and mark"
            raise UserError(f"{path}: paper: {render(row)}: allowed is {allowed}")


def _check_expected(expected: Any, path: Path, scale: str, points: Iterable[Point]) -> None:
    """Numbers are expected of arms by their names, words of the sweep as a whole."""
    arms = dict.fromkeys(point.name.replace(f" seed={point.seed}", "") for point in points)
    for arm, value in expected.items() if isinstance(expected, Mapping) else ():
        if arm not in arms:
            allowed = ", ".join(list(arms)[:SHOWN]) + ", …" * (len(arms) > SHOWN)
            raise UserError(f"{path}: expected.{scale}.{arm} = {render(value)}: no arm; allowed is {allowed}")


def _check_scales(file: SweepFile, path: Path, folder: Path) -> None:
    known = scale_names(folder)
    named: list[tuple[str, Sequence[str]]] = [
        ("scales", list(file.scales)),
        ("cost", list(file.cost)),
        ("expected", list(file.expected)),
        ("seeds", list(file.seeds) if isinstance(file.seeds, dict) else []),
        ("metric", list(file.metric) if isinstance(file.metric, dict) else []),
        *(
            (kind, [rule.scale] if isinstance(rule.scale, str) else rule.scale or [])
            for kind, rule in itertools.chain(
                (("adjust", rule) for rule in file.adjust), (("exclude", rule) for rule in file.exclude)
            )
        ),
    ]
    for kind, scales in named:
        for scale in scales:
            if scale not in known:
                raise UserError(f"{path}: {kind}: scale = {render(scale)}: allowed is {', '.join(known)}")


def _seeds(file: SweepFile, scale: str, overrides: Tree) -> list[int]:
    if "seed" in overrides:
        return [overrides["seed"]]
    return file.seeds if isinstance(file.seeds, list) else file.seeds.get(scale, [0])


def _check_overrides(file: SweepFile, overrides: Tree, choices: Choices) -> None:
    chosen = {key: f"axis {axis}" for axis, of in choices.items() for key in _set_by(of)}
    chosen |= {key: "adjust" for rule in file.adjust for key in flatten(merge({}, rule.set or {}))}
    for key, value in flatten(overrides).items():
        if key in chosen:
            raise UserError(
                f"command line: {key} = {render(value)}: the {chosen[key]} of {file.name} sets it; "
                "allowed is a key that the arms share"
            )
