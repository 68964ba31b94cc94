"""Encoders from files: a run's own, exported ones, the authors' checkpoints, and torchvision's weights.

What differs is the prefix before torchvision's names: ``module.encoder_q.`` in the authors' checkpoints (moco v1, v2),
``f_q.`` in ours, ``module.`` of a model that several processes trained, or none. Only the query encoder is taken, never
the key encoder. All of a backbone is read or nothing is: a prefix that fits nothing would otherwise leave a random
encoder, without a word. A head may be absent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from study.config import schema
from study.config.reading import merge, read_yaml, resolve
from study.config.schema import Config
from study.errors import UserError
from study.model.encoder import ARCHITECTURES, Encoder, build
from study.run import checkpoint, status

PREFIXES = ("module.encoder_q.", "encoder_q.", "f_q.", "module.", "")
"""In the order in which they are tried."""

COUNTER = ".num_batches_tracked"
"""Of BN: no computation reads it, and torchvision's published weights lack it, so it may be missing."""

SHOWN = 3
"""Keys that an error lists of each kind."""


@dataclass(frozen=True)
class Source:
    """A query encoder as a file holds it.

    Attributes:
        path: the file, or the run's folder.
        tensors: parameters and buffers by our names, ``backbone.…`` and ``head.…``.
        said: keys of ``config.encoder`` that the file itself tells.
        config: of the run that it comes from, if that is known.
        signature, step: of that run, if the file tells.
        left_out: what else the file holds.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    said: Mapping[str, Any]
    config: Config | None = None
    signature: str | None = None
    step: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def has_head(self) -> bool:
        return any(name.startswith("head.") for name in self.tensors)

    def tree(self, overlay: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What is known of the config: ``overlay``, or else the run's, with the architecture that the file tells."""
        if overlay is None:
            overlay = {} if self.config is None else self.config.model_dump(mode="json")
        return merge(overlay, {"encoder": self.said})


def read(path: Path) -> Source:
    """The query encoder of a run's folder, of one of its checkpoints, of an exported file, or of another's checkpoint.

    Raises:
        UserError: a run that is not finished, is a probe or has diverged; a file that is absent, damaged, or holds no
            tensors by name.
    """
    if path.is_dir():
        run = resolve(read_yaml(path / "config.yaml"), str(path / "config.yaml"))
        found = finished(path, run)
        if found is None:
            raise UserError(f"{path}: has diverged: allowed is a run with finite results; it left no encoder")
        return found
    try:
        content = checkpoint.read(path)
    except checkpoint.DamagedError:
        raise UserError(f"{path}: damaged: its bytes are not those that its name vouches for") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if isinstance(content, dict) and content.keys() == {"signature", "step", "state"}:
        return _of_run(path, content["signature"], content["step"], content["state"], _config(path, content))
    origin = getattr(content, "study", None)  # as `study.model.layouts` writes it
    if isinstance(origin, dict):
        its = None if origin["config"] is None else resolve(origin["config"], str(path))
        return Source(path, _under("", content), origin["encoder"], its, origin["signature"], origin["step"])
    return _foreign(path, content)


def finished(folder: Path, run: Config) -> Source | None:
    """f_q as the finished run of ``run`` left it in ``folder``; None if it diverged, and so has no encoder to speak of.

    Raises:
        UserError: the run is a probe, is not finished, or has no checkpoint of its last step.
    """
    if run.probe is not None:
        raise UserError(f"{folder}: is a linear probe: allowed is its pre-training, {run.pretraining.signature}")
    state = status.effective(folder)
    if state != "finished":
        go_on = f"; `study train {folder}/config.yaml` goes on" if (folder / "config.yaml").exists() else ""
        state = state if go_on else "not begun"
        raise UserError(f"{folder}: state = {state}: allowed is finished{go_on}")
    end = status.read(folder)
    if end is not None and end.diverged is not None:
        return None
    found = checkpoint.latest(folder / "checkpoints", run.signature, warn=lambda line: None)
    if found is None or end is None or found[0] != end.steps:
        step = "none" if found is None else f"one of step {found[0]}"
        raise UserError(f"{folder / 'checkpoints'}: holds {step}: allowed is a checkpoint of the last step")
    return _of_run(folder, run.signature, *found, run)


def _of_run(path: Path, signature: str, step: int, state: Mapping[str, Any], run: Config | None) -> Source:
    if "model" not in state:
        raise UserError(f"{path}: holds a linear probe's classifier: allowed is a checkpoint of its pre-training")
    tensors = _under("f_q.", state["model"])
    return Source(path, tensors, _told(tensors) if run is None else _said(run.encoder), run, signature, step)


def _config(path: Path, content: Mapping[str, Any]) -> Config | None:
    """The config of the run that a checkpoint lies in; None once it was moved elsewhere."""
    file = path.absolute().parent.parent / "config.yaml"
    run = resolve(read_yaml(file), str(file)) if file.is_file() else None
    return run if run is not None and run.signature == content["signature"] else None


def _foreign(path: Path, content: Any) -> Source:
    state = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not (isinstance(state, Mapping) and state and all(map(_is_named_tensor, state.items()))):
        held = _listed(map(str, content)) if isinstance(content, Mapping) and content else type(content).__name__
        raise UserError(f"{path}: holds {held}: allowed is tensors by name, or those under `state_dict`")
    prefix = next(prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in state))
    tensors = _under(prefix, state)
    others = (name.removeprefix("module.").split(".")[0] for name in state if not name.startswith(prefix))
    return Source(path, tensors, _told(tensors), left_out=tuple(dict.fromkeys(others)))


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_ours(name.removeprefix(prefix)): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _ours(name: str) -> str:
    """``layer1.0.conv1.weight`` → ``backbone.layer1.0.conv1.weight``; ``fc.weight``, ``fc.2.weight`` → ``head.…``."""
    if name.startswith(("backbone.", "head.")):
        return name
    if not name.startswith("fc."):
        return f"backbone.{name}"
    layer = name.removeprefix("fc.")
    return f"head.{layer}" if layer[0].isdigit() else f"head.0.{layer}"


def _told(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of ``config.encoder`` that names and shapes tell: those of a backbone that is one of ours, of a head."""

    def shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        return {
            name: tensor.shape
            for name, tensor in state.items()
            if name.startswith("backbone.") and not name.endswith(COUNTER)
        }

    theirs = shapes(tensors)
    known: list[dict[str, Any]] = [
        {"arch": "tiny", "width": C} for C in theirs.get("backbone.conv1.weight", ())[:1] if C
    ]
    known += [{"arch": arch, "stem": stem} for arch in ARCHITECTURES for stem in ("imagenet", "cifar")]
    with torch.device("meta"):  # shapes alone
        told = next(
            (keys for keys in known if theirs == shapes(build(schema.Encoder.model_validate(keys), 8).state_dict())), {}
        )
    head = [name for name in ("head.0.weight", "head.2.weight") if name in tensors]
    return told | {"head": ("linear", "mlp")[len(head) - 1], "dim": len(tensors[head[-1]])} if head else told


def _said(encoder: schema.Encoder) -> dict[str, Any]:
    """What tensors depend on: all but the BN's splits, which evaluation does not see."""
    return encoder.model_dump(mode="json", exclude={"bn", "bn_splits"})


def origin(source: Source, encoder: schema.Encoder) -> dict[str, Any]:
    """What an exported file tells of itself, in plain values: :func:`read` understands it."""
    return {
        "encoder": _said(encoder),
        "config": source.config and source.config.model_dump(mode="json"),
        "signature": source.signature,
        "step": source.step,
    }


def load(source: Source, run: Config) -> Encoder:
    """An encoder with the tensors of ``source``, all of them; without a head there, its head is the identity.

    Args:
        source: as :func:`read` gives it.
        run: tells the architecture that it should have, and the images' size.

    Raises:
        UserError: a tensor is missing, is not of this architecture, or has another shape; the first of each are named.
    """
    cfg = run.encoder
    encoder = build(cfg, run.data.size)
    if not source.has_head:
        encoder.head = nn.Identity()
    ours, theirs = encoder.state_dict(), source.tensors
    faults = {
        "is missing": [name for name in ours if name not in theirs and not name.endswith(COUNTER)],
        "is not in it": [name for name in theirs if name not in ours],
        "has another shape": [
            f"{name} ({_shape(theirs[name])}, not {_shape(tensor)})"
            for name, tensor in ours.items()
            if name in theirs and theirs[name].shape != tensor.shape
        ],
    }
    if any(faults.values()):
        found = "; ".join(
            f"{fault}: {_listed(name.removeprefix('backbone.') for name in names)}"
            for fault, names in faults.items()
            if names
        )
        known = ", ".join(get_args(schema.Encoder.model_fields["arch"].annotation))
        told = "" if "arch" in source.said else "is no whole network that is known here: it "
        raise UserError(
            f"{source.path}: {told}does not fit encoder.arch = {cfg.arch}, {_variant(cfg)}: {found}; allowed is "
            f"another encoder.arch ({known}), encoder.stem, encoder.width or encoder.head"
        )
    encoder.load_state_dict(dict(theirs), strict=False)  # checked above; a counter stays at 0
    return encoder


def _variant(cfg: schema.Encoder) -> str:
    return f"encoder.width = {cfg.width}" if cfg.arch == "tiny" else f"encoder.stem = {cfg.stem}"


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more
