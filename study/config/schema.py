"""What defines a run: one frozen, validated tree, and its signature.

The defaults are the paper's own setting (Section 3 and 4.1). A YAML file and ``key=value`` overrides are merged as
plain dictionaries first and validated once, so nothing half valid exists. Paths, devices, workers and logging are
no part of it: they may change between two attempts at the same run.
"""

import difflib
import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from study.errors import UserError

SCHEMA = 1
"""Part of every signature: raise it when the meaning of a field, or the numbers that it leads to, change."""

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Milestones = Annotated[tuple[Fraction, ...], Field(strict=False)]  # YAML has lists only


class Section(BaseModel):
    """A frozen part of the tree: unknown keys and wrong types are errors; only an integer passes for a float."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Data(Section):
    name: str = Field(
        "imagenet",
        pattern=r"^[a-z0-9][a-z0-9._-]*$",
        examples=["fashion-mnist", "cifar10"],
        description="Name of the images; `study data list` shows those at hand.",
    )
    train_images: Positive | None = Field(
        None, description="Train on this many images, a fixed class-balanced draw; null takes all."
    )
    size: int = Field(224, ge=8, le=1024, description="Height and width of a view, in pixels.")
    eval_crop: float = Field(
        0.875,
        gt=0,
        le=1,
        description="Evaluation: side of the centre crop over the resized side (224/256); 1 for small images.",
    )


class Views(Section):
    """The augmentation, in the paper's order: crop, grey, jitter, (blur), flip, normalise (Appendix A; v2 report)."""

    recipe: Literal["v1", "v2"] = Field(
        "v1",
        description="v1: grey p .2, jitter (.4,.4,.4,.4); v2: jitter (.4,.4,.4,.1) p .8, grey p .2, blur p .5.",
    )
    crop_min: float = Field(0.2, gt=0, le=1, description="Smallest share of the image's area that a crop takes.")
    flip: bool = Field(True, description="Mirror left-right with probability 0.5.")


class Encoder(Section):
    arch: Literal["pixels", "tiny", "resnet18", "resnet50", "resnext50", "resnet50w2", "resnet50w4"] = Field(
        "resnet50",
        description="tiny: three blocks of 1-2-4 × width channels, stride-2 stem; pixels: no encoder, a floor.",
    )
    stem: Literal["imagenet", "cifar"] = Field(
        "imagenet", description="7×7 stride 2 + max-pool, or one 3×3 stride 1; `tiny` has its own."
    )
    width: Positive = Field(16, description="Channels of the first block of `tiny`.")
    head: Literal["linear", "mlp"] = Field(
        "linear", description="Projection to the embedding: one layer (v1) or two with a ReLU (v2)."
    )
    dim: Positive = Field(128, description="Length of q and k.")
    bn: Literal["plain", "split", "shuffle"] = Field(
        "shuffle",
        description="Statistics over the batch, splits of it, or splits of a shuffled key batch (Section 3.3).",
    )
    bn_splits: Positive = Field(8, description="Number of splits that stand in for GPUs; 1 with plain BN.")


class Dictionary(Section):
    """Where the keys that a query is compared with come from (Figure 2)."""

    kind: Literal["queue", "bank", "in-batch"] = Field(
        "queue", description="MoCo's queue, the memory bank of Wu et al., or the keys of the batch."
    )
    K: Positive | None = Field(
        None, description="Number of negatives; null: 65536, and for in-batch fixed at batch − 1."
    )
    eviction: Literal["oldest", "newest", "random"] | None = Field(
        None, description="Queue: which keys a batch replaces; null: oldest."
    )
    bank_momentum: Fraction | None = Field(
        None, description="Bank: weight of the old entry when it is refreshed; null: 0.5."
    )
    bank_positive: Literal["bank", "fresh"] | None = Field(
        None, description="Bank: positive from the image's own entry or from its other view encoded now; null: bank."
    )
    bank_negatives: Literal["shared", "per-query"] | None = Field(
        None, description="Bank: one draw of K entries for the batch, or one a query; null: shared."
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, value: Any) -> Any:
        """Fill what the kind implies, so that two spellings of one dictionary have one signature."""
        if not isinstance(value, Mapping):
            return value
        resolved = dict(value)
        kind = resolved.get("kind", "queue")
        implied: dict[str, dict[str, Any]] = {
            "queue": {"K": 65536, "eviction": "oldest"},
            "bank": {"K": 65536, "bank_momentum": 0.5, "bank_positive": "bank", "bank_negatives": "shared"},
            "in-batch": {},
        }
        for key, default in implied.get(kind, {}).items() if isinstance(kind, str) else ():
            if resolved.get(key) is None:
                resolved[key] = default
        return resolved


class Optimiser(Section):
    """SGD as in Section 4.1."""

    lr: float = Field(0.03, gt=0, description="Learning rate at batch 256.")
    lr_rule: bool = Field(
        True, description="Linear rule: lr × batch / 256 (Goyal et al. 2017); false uses lr as it is."
    )
    batch: int = Field(256, ge=2, description="Images an optimiser step, over all devices.")
    accumulate: Positive = Field(
        1, description="Micro-batches that a step is split into; one key update and one enqueue a step."
    )
    epochs: int = Field(
        200, ge=0, description="Passes over the images; 0 evaluates the encoder as initialised, a floor."
    )
    schedule: Literal["step", "cosine"] = Field(
        "step", description="×0.1 at each milestone, or half a cosine to zero, set at every step."
    )
    milestones: Milestones = Field(
        (0.6, 0.8), description="Where `step` decays, as shares of the epochs (120 and 160 of 200)."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD (not m).")
    weight_decay: float = Field(1e-4, ge=0, description="L2 penalty on all parameters.")


class Evaluation(Section):
    knn_k: Positive = Field(200, description="Neighbours of the weighted kNN.")
    knn_T: float = Field(0.1, gt=0, description="Temperature of the neighbours' weights.")
    every_epochs: int = Field(0, ge=0, description="kNN while training, each so many epochs; 0: at the end only.")
    linear_epochs: int = Field(
        100, ge=0, description="Epochs of the fast linear probe (features encoded once) at the end; 0: none."
    )


class Consistency(Section):
    every_steps: int = Field(
        0, ge=0, description="Steps between readings of key drift, alignment, uniformity and rank; 0: none."
    )
    samples: Positive = Field(256, description="Stored keys that one reading encodes again.")


class Probe(Section):
    """The paper's linear probe (Section 4.1) as a run of its own on a finished pre-training."""

    lr: float = Field(30.0, gt=0, description="Learning rate at batch 256; another batch scales it.")
    batch: int = Field(256, ge=1, description="Images a step.")
    epochs: Positive = Field(100, description="Passes over the images.")
    milestones: Milestones = Field((0.6, 0.8), description="×0.1 at these shares of the epochs (60 and 80 of 100).")
    weight_decay: float = Field(0.0, ge=0, description="L2 penalty on the classifier.")


class Config(Section):
    """Everything that a run's numbers depend on."""

    seed: int = Field(0, ge=0, lt=2**63, description="Seed of every random choice.")
    m: Fraction | None = Field(
        None,
        description="θ_k ← m·θ_k + (1−m)·θ_q; null: 0.999 for the queue, no key encoder otherwise.",
    )
    T: float = Field(0.07, gt=0, description="Temperature of InfoNCE.")
    symmetric: bool = Field(False, description="Each view is query once and key once; the two losses are averaged.")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast of the encoder.")
    data: Data = Data()
    views: Views = Views()
    encoder: Encoder = Encoder()
    dictionary: Dictionary = Dictionary.model_validate({})
    optimiser: Optimiser = Optimiser()
    evaluation: Evaluation = Evaluation()
    consistency: Consistency = Consistency()
    probe: Probe | None = Field(
        None, description="Set: this run is a linear probe on the pre-training that the rest describes."
    )

    @model_validator(mode="before")
    @classmethod
    def _default_m(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("m") is None:
            dictionary = value.get("dictionary") or {}
            kind = (
                dictionary.get("kind", "queue")
                if isinstance(dictionary, Mapping)
                else getattr(dictionary, "kind", None)
            )
            if kind == "queue":
                return {**value, "m": 0.999}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        dictionary, encoder, optimiser = self.dictionary, self.encoder, self.optimiser
        applies = {
            "queue": {"K", "eviction"},
            "bank": {"K", "bank_momentum", "bank_positive", "bank_negatives"},
            "in-batch": set[str](),
        }[dictionary.kind]
        for key in ("K", "eviction", "bank_momentum", "bank_positive", "bank_negatives"):
            if key not in applies and getattr(dictionary, key) is not None:
                raise ConflictError(
                    f"dictionary.{key}", getattr(dictionary, key), f"null with dictionary.kind = {dictionary.kind}"
                )
        if dictionary.kind == "bank":
            if self.m is not None:
                raise ConflictError("m", self.m, "null with dictionary.kind = bank, which has no key encoder")
            if encoder.bn == "shuffle":
                raise ConflictError(
                    "encoder.bn",
                    encoder.bn,
                    "plain or split with dictionary.kind = bank, which encodes no keys to shuffle",
                )
            if self.symmetric:
                raise ConflictError("symmetric", True, "false with dictionary.kind = bank")
        if optimiser.batch % optimiser.accumulate:
            raise ConflictError(
                "optimiser.accumulate", optimiser.accumulate, f"a divisor of optimiser.batch = {optimiser.batch}"
            )
        micro = optimiser.batch // optimiser.accumulate
        if dictionary.kind == "in-batch" and optimiser.accumulate > 1:
            raise ConflictError(
                "optimiser.accumulate",
                optimiser.accumulate,
                "1 with dictionary.kind = in-batch: the batch is the dictionary",
            )
        if encoder.bn == "plain":
            if encoder.bn_splits != 1:
                raise ConflictError("encoder.bn_splits", encoder.bn_splits, "1 with encoder.bn = plain")
        elif micro % encoder.bn_splits or micro // encoder.bn_splits < 2:
            raise ConflictError(
                "encoder.bn_splits",
                encoder.bn_splits,
                f"a divisor of the {micro} images a forward pass, with at least 2 a split",
            )
        if encoder.arch == "pixels" and optimiser.epochs:
            raise ConflictError(
                "optimiser.epochs", optimiser.epochs, "0 with encoder.arch = pixels, which has nothing to train"
            )
        if self.data.train_images is not None and self.data.train_images < optimiser.batch:
            raise ConflictError(
                "data.train_images", self.data.train_images, f"at least optimiser.batch = {optimiser.batch}"
            )
        if list(optimiser.milestones) != sorted(set(optimiser.milestones)):
            raise ConflictError(
                "optimiser.milestones", list(optimiser.milestones), "shares of the epochs in rising order"
            )
        return self

    @property
    def K(self) -> int:
        """Number of negatives a query is compared with."""
        return self.dictionary.K if self.dictionary.K is not None else self.optimiser.batch - 1

    @property
    def lr(self) -> float:
        """The learning rate before any decay: it follows the global batch alone, never the number of devices."""
        optimiser = self.optimiser
        return optimiser.lr * optimiser.batch / 256 if optimiser.lr_rule else optimiser.lr

    @property
    def pretraining(self) -> "Config":
        """The run that a probe reads its encoder from; a pre-training is its own."""
        return self if self.probe is None else self.model_copy(update={"probe": None})

    @property
    def signature(self) -> str:
        """Name of the run: a hash of the whole resolved tree and of the schema's version."""
        tree = json.dumps([SCHEMA, self.model_dump(mode="json")], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(tree.encode()).hexdigest()[:12]


class ConflictError(ValueError):
    """Two keys of a config that exclude each other; carries the key to name."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key} = {render(value)}: allowed is {allowed}")


def render(value: object) -> str:
    """A value as YAML would show it on one line."""
    return (
        json.dumps(value, ensure_ascii=False)
        if value is None or isinstance(value, bool | list | tuple | dict | str)
        else f"{value!r}"
    )


# ---------------------------------------------------------------------------------------------- reading and merging


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (`off` and `no` are words, `1e-3` is a number), duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice; allowed is once", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _yaml_1_2(loader: type[yaml.SafeLoader]) -> None:
    import re

    dropped = {
        "tag:yaml.org,2002:bool",
        "tag:yaml.org,2002:float",
        "tag:yaml.org,2002:int",
        "tag:yaml.org,2002:timestamp",
    }
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in dropped]
        for first, rules in loader.yaml_implicit_resolvers.items()
    }
    loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
    loader.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
    )
    loader.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$|^[-+]?\.(?:inf|nan)$"
        ),
        list("-+.0123456789"),
    )


_yaml_1_2(_Loader)


MOST_VALUES = 1_000_000
"""In one document: a hundred times the largest grid."""


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML text.

    Args:
        text: the document.
        source: the file's name, for the error.

    Raises:
        UserError: it is not YAML, or a key stands twice; one line with the source and the line's number.
    """
    try:
        value = yaml.load(text, _Loader)
        _check_size(value)
        return value
    except RecursionError:
        raise UserError(f"{source}: nested too deep; allowed is what a config needs") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source}{line}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def _check_size(value: Any) -> None:
    """Aliases of aliases make a few lines as large as one likes, and one inside of what it names has no end."""
    left, count = [value], 0
    while left:
        below = left.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values, with aliases followed")
        if isinstance(below, dict):
            left += below.values()
        elif isinstance(below, list):
            left += below


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top is a mapping; an empty file is an empty mapping.

    Raises:
        UserError: the file cannot be read, is no YAML, or holds something else.
    """
    try:
        value = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{path}: holds {_kind(value)}; allowed is a mapping of names to values")
    return cast(dict[str, Any], value)


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "a key that is no word"
    return "a list" if isinstance(value, list) else "a single value"


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Turn ``["m=0.99", "optimiser.lr=1e-3"]`` into a nested tree; the value is YAML.

    Raises:
        UserError: an argument has no ``=``, an empty key, or a key stands twice.
    """
    tree: dict[str, Any] = {}
    seen: set[str] = set()
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise UserError(f"command line: {argument!r}: allowed is key=value, such as optimiser.lr=0.03")
        if key in seen:
            raise UserError(f"command line: {key} stands twice; allowed is once")
        seen.add(key)
        if not text.strip():
            raise UserError(
                f"command line: {key} = nothing: allowed is a value; {key}=null leaves the choice to the default"
            )
        tree = merge(tree, nest(key, parse_yaml(text, f"command line: {key}")))
    return tree


def nest(key: str, value: Any) -> dict[str, Any]:
    """``nest("a.b", 1)`` is ``{"a": {"b": 1}}``."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The tree ``base`` with the leaves of ``over`` in place of its own; dotted keys in ``over`` are nested first."""
    merged = dict(base)
    for key, value in over.items():
        if "." in key:
            merged = merge(merged, nest(key, value))
            continue
        below = merged.get(key)
        merged[key] = merge(below if isinstance(below, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return merged


def resolve(tree: Mapping[str, Any], source: str) -> Config:
    """Validate a merged tree.

    Args:
        tree: nested plain values, as YAML gives them.
        source: where it came from, for the error: a file's name or ``command line``.

    Raises:
        UserError: an unknown key, a wrong type, a value out of range, or keys that exclude each other.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{source}: {explain(error, tree)}") from None


def explain(error: ValidationError, tree: Any, model: type[BaseModel] = Config) -> str:
    """One fault of a validation as ``key = value: allowed is …``.

    Args:
        error: what pydantic found.
        tree: what was validated.
        model: what it was validated as.
    """
    faults = error.errors(include_url=False)
    keys = [_key(fault["loc"], tree, fault["type"] == "missing") for fault in faults]
    # Where one of several kinds would do, each has its fault, and the one that fits best leads the deepest.
    key = max((key for key in keys if key[:1] == keys[0][:1]), key=len)
    same = [fault for fault, its in zip(faults, keys, strict=True) if its == key]
    fault = same[0]
    if isinstance(conflict := fault.get("ctx", {}).get("error"), ConflictError):
        return str(conflict)
    name = ".".join(str(part) if str(part).isprintable() else repr(part) for part in key)
    if fault["type"] == "extra_forbidden":
        known = [name for kind in _kinds_at(model, key[:-1])[1] if _is_model(kind) for name in kind.model_fields]
        close = difflib.get_close_matches(str(key[-1]), known, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        return f"{name} = {render(fault['input'])}: unknown key; allowed is {', '.join(known)}{meant}"
    if fault["type"] == "missing":
        return f"{name} is missing: allowed is {_wanted(_kinds_at(model, key)[1])}"
    allowed = dict.fromkeys(_allowed(fault["type"], fault["msg"], fault.get("ctx", {}), model, key) for fault in same)
    return f"{name} = {render(fault['input'])}: allowed is {' or '.join(allowed)}"


Key = tuple[int | str, ...]


def _key(location: Key, tree: Any, missing: bool) -> Key:
    """The part of pydantic's location that leads into the tree: it also names the kinds that it tried."""
    key: Key = ()
    for part in location:
        is_key = part in tree if isinstance(tree, Mapping) else isinstance(tree, list) and part in range(len(tree))
        if is_key:
            key, tree = (*key, part), tree[part]
    return (*key, location[-1]) if missing else key


def _kinds_at(model: type[BaseModel], key: Key) -> tuple[FieldInfo | None, list[Any]]:
    """The last field on the way to a key, and the types that may stand there."""
    field: FieldInfo | None = None
    here: list[Any] = [model]
    for part in key:
        below = []
        for kind in here:
            if _is_model(kind):
                if found := kind.model_fields.get(str(part)):
                    field = found
                    below.append(found.annotation)
            elif arguments := get_args(kind):
                below.append(arguments[-1])  # of a mapping the values, of a list the items
        here = [kind for union in below for kind in _members(union)]
    return field, here


def _members(kind: Any) -> list[Any]:
    """The types of a union, whatever is annotated to them."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [member for each in get_args(kind) for member in _members(each)]
    return [kind]


def _is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _wanted(kinds: list[Any]) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
    words |= {dict: "a mapping of names to values"}
    said = []
    for kind in kinds:
        if _is_model(kind):
            said.append(f"a mapping with {', '.join(kind.model_fields)}")
        elif get_origin(kind) is Literal:
            said.append(", ".join(map(str, get_args(kind))))
        else:
            said.append(words.get(get_origin(kind) or kind, "a value"))
    return " or ".join(dict.fromkeys(said))


def _allowed(kind: str, message: str, context: Mapping[str, Any], model: type[BaseModel], key: Key) -> str:
    """What pydantic asks for, in words that follow ``allowed is``."""
    if kind in ("model_type", "model_attributes_type"):
        return _wanted([kind for kind in _kinds_at(model, key)[1] if _is_model(kind)] or [dict])
    if kind == "dict_type":
        return _wanted([dict])
    if kind in ("list_type", "tuple_type"):
        return _wanted([list])
    if kind == "too_short":
        return f"{context['min_length']} or more"
    if kind == "string_pattern_mismatch":
        field, _ = _kinds_at(model, key)
        examples = field.examples if field and field.examples else []
        return f"text such as {' or '.join(examples)}" if examples else f"text that matches {context['pattern']}"
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted leaves of a nested tree, in its order: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
