"""A backbone as torchvision, timm and detectron2 read it. The head stays behind, as in every transfer of the paper."""

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from study.config import schema
from study.errors import UserError

TORCHVISION = {"resnet18": "resnet18", "resnet50": "resnet50", "resnext50": "resnext50_32x4d"}
"""``encoder.arch`` → the function of torchvision, and of timm, that builds that network."""

DETECTRON2 = {
    "resnet18": "DEPTH 18, RES2_OUT_CHANNELS 64",
    "resnet50": "DEPTH 50",
    "resnext50": "DEPTH 50, NUM_GROUPS 32, WIDTH_PER_GROUP 4",
    "resnet50w2": "DEPTH 50, STEM_OUT_CHANNELS 128, WIDTH_PER_GROUP 128, RES2_OUT_CHANNELS 512",
    "resnet50w4": "DEPTH 50, STEM_OUT_CHANNELS 256, WIDTH_PER_GROUP 256, RES2_OUT_CHANNELS 1024",
}
"""``encoder.arch`` → what detectron2's MODEL.RESNETS needs for it."""

SUFFIXES = {"torchvision": ".pth", "timm": ".pth", "detectron2": ".pkl"}
"""By its ending detectron2 tells its own format from torch's."""


def check(cfg: schema.Encoder, to: str) -> None:
    """Meet an encoder that a program cannot build.

    Raises:
        UserError: that; torchvision's names are given to any ResNet, since `study encoder probe` reads them.
    """
    networks = {"torchvision": {"tiny", *DETECTRON2}, "timm": TORCHVISION, "detectron2": DETECTRON2}[to]
    if cfg.arch not in networks:
        raise UserError(
            f"command line: --to = {to}: has no encoder.arch = {cfg.arch}: allowed is {', '.join(sorted(networks))}"
        )
    if to == "detectron2" and cfg.stem != "imagenet":
        raise UserError(f"command line: --to = {to}: has no encoder.stem = {cfg.stem}: allowed is imagenet")


def render(backbone: Mapping[str, Tensor], to: str, origin: dict[str, Any]) -> bytes:
    """The content of a file.

    torchvision and timm: a state dict; ``origin`` is its attribute ``study``, which ``torch.load`` gives back and
    ``load_state_dict`` passes over. detectron2: the pickle that the authors' ``convert-pretrain-to-detectron2.py``
    makes, without the head; ``origin`` is its entry ``study``.

    Args:
        backbone: by torchvision's names.
        to: a key of ``SUFFIXES``.
        origin: plain values.
    """
    file = io.BytesIO()
    if to == "detectron2":
        arrays = {detectron2_name(name): tensor.contiguous().numpy() for name, tensor in backbone.items()}
        content = {"model": arrays, "__author__": "MOCO", "matching_heuristics": True, "study": origin}
        _Pickler(file, protocol=4).dump(content)
    else:
        state = OrderedDict((name, tensor.contiguous()) for name, tensor in backbone.items())
        state.study = origin  # type: ignore[attr-defined]
        torch.save(state, file)
    return file.getvalue()


def detectron2_name(name: str) -> str:
    """``bn1.bias`` → ``stem.conv1.norm.bias``; ``layer1.0.downsample.1.bias`` → ``res2.0.shortcut.norm.bias``."""
    name = re.sub(r"\bbn(\d)\.", r"conv\1.norm.", name)
    name = name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")
    stage = re.match(r"layer(\d)\.", name)
    return f"res{int(stage[1]) + 1}.{name[stage.end() :]}" if stage else f"stem.{name}"


class _Pickler(pickle.Pickler):
    """Arrays in words that every numpy understands: numpy 2's own name ``numpy._core``, which older ones lack."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return np.ndarray, (value.shape, value.dtype.str, bytearray(value.tobytes()))
        return NotImplemented


def usage(cfg: schema.Encoder, to: str, file: str) -> str:
    """How to load the file, as lines to copy."""
    if to == "detectron2":
        needs = f"MODEL.RESNETS: {DETECTRON2[cfg.arch]}, STRIDE_IN_1X1 False; INPUT.FORMAT RGB"
        return f"MODEL.WEIGHTS: {file}; {needs}; PIXEL_MEAN and PIXEL_STD of the training images"
    if cfg.arch not in TORCHVISION:
        return f"torchvision has no such network, only its names are used; read it with `study encoder probe {file}`"
    name = TORCHVISION[cfg.arch]
    stem = "model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()\n"
    create, rest = {
        "torchvision": (f"torchvision.models.{name}()", ", strict=False)  # only fc.* is missing"),
        "timm": (f'timm.create_model("{name}", num_classes=0)', ")"),
    }[to]
    return f"model = {create}\n{stem if cfg.stem == 'cifar' else ''}model.load_state_dict(torch.load({file!r}){rest}"
