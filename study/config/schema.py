"""The tree of a run and its signature.

The defaults are the paper's own setting (Section 3 and 4.1). Paths, devices, workers and logging are no part of it:
they may change between two attempts at the same run.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA = 1
"""Part of every signature: raise it when the meaning of a field changes."""

NUMERICS = 1
"""Which bits this code gives for a signature: raise it with whatever changes one, of training or of evaluation, and run
`make golden`. A run's provenance keeps it; no signature has it, so that old runs stay what they are."""

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
