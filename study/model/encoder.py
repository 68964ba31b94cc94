"""Encoders: a ResNet of torchvision's blocks, a projection head, and unit vectors at the end."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, Bottleneck

from study.config import schema
from study.model.norm import SplitBatchNorm

Norm = Callable[[int], nn.Module]


class Architecture(NamedTuple):
    """What tells one ResNet from another."""

    block: type[BasicBlock] | type[Bottleneck]
    depth: tuple[int, ...]
    """Blocks a stage."""
    width: int = 64
    """Channels of the first stage, before a bottleneck's expansion; every layer scales with it."""
    groups: int = 1
    base_width: int = 64
    """Width of a group in the bottleneck's 3×3, at 64 channels."""


ARCHITECTURES = {
    "resnet18": Architecture(BasicBlock, (2, 2, 2, 2)),
    "resnet50": Architecture(Bottleneck, (3, 4, 6, 3)),
    "resnext50": Architecture(Bottleneck, (3, 4, 6, 3), groups=32, base_width=4),
    "resnet50w2": Architecture(Bottleneck, (3, 4, 6, 3), width=128),  # all channels (Kolesnikov et al. 2019)
    "resnet50w4": Architecture(Bottleneck, (3, 4, 6, 3), width=256),
}


class ResNet(nn.Module):
    """He et al.'s ResNet up to its global average pool; its parameters are named as torchvision's.

    Args:
        architecture: blocks and widths.
        stem: ``imagenet`` 7×7 stride 2 and max-pool; ``cifar`` 3×3 stride 1; ``tiny`` 3×3 stride 2.
        norm: makes the BN of so many channels.
    """

    def __init__(self, architecture: Architecture, stem: str, norm: Norm) -> None:
        super().__init__()
        block, depth, width, groups, base_width = architecture
        kernel, stride = {"imagenet": (7, 2), "cifar": (3, 1), "tiny": (3, 2)}[stem]
        self.conv1 = nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        self.stages = [f"layer{stage}" for stage in range(1, len(depth) + 1)]
        channels = width
        for stage, name in enumerate(self.stages):
            planes, blocks = width * 2**stage, []
            for i in range(depth[stage]):
                stride, out = (2 if stage and i == 0 else 1), planes * block.expansion
                shortcut = (
                    nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out))
                    if stride > 1 or channels != out
                    else None
                )
                blocks.append(block(channels, planes, stride, shortcut, groups, base_width, 1, norm))
                channels = out
            self.add_module(name, nn.Sequential(*blocks))
        self.channels = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, 3, size, size) → (B, C), pooled in fp32."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return x.mean((2, 3), dtype=torch.float32)


class Encoder(nn.Module):
    """f(x): backbone, head, and the length of each vector set to one.

    Args:
        backbone: (B, 3, size, size) → (B, C).
        channels: C.
        head: (B, C) → (B, dim).
    """

    def __init__(self, backbone: nn.Module, channels: int, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.channels, self.head = backbone, channels, head

    def features(self, x: Tensor) -> Tensor:
        """``x`` (B, 3, size, size) → (B, C) fp32: what is kept after pre-training, and what evaluation reads."""
        return cast(Tensor, self.backbone(x)).float()

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, 3, size, size) → (B, dim) fp32 of length 1: q or k."""
        return F.normalize(self.head(self.features(x)).float(), dim=1)


def build(cfg: schema.Encoder, size: int) -> Encoder:
    """The encoder that a config describes, channels last, initialised from torch's global random state.

    Args:
        cfg: architecture, stem, head, BN.
        size: height and width of the images; only ``pixels`` depends on it.
    """
    if cfg.arch == "pixels":
        return Encoder(nn.Flatten(), 3 * size * size, nn.Identity())
    norm: Norm = nn.BatchNorm2d if cfg.bn_splits == 1 else partial(SplitBatchNorm, splits=cfg.bn_splits)
    tiny = cfg.arch == "tiny"
    architecture = Architecture(BasicBlock, (1, 1, 1), cfg.width) if tiny else ARCHITECTURES[cfg.arch]
    backbone = ResNet(architecture, "tiny" if tiny else cfg.stem, norm)
    C = backbone.channels
    hidden = [nn.Linear(C, C), nn.ReLU(inplace=True)] if cfg.head == "mlp" else []
    encoder = Encoder(backbone, C, nn.Sequential(*hidden, nn.Linear(C, cfg.dim)))
    return encoder.to(memory_format=torch.channels_last)
