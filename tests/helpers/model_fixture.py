"""A MoCo small enough for any test of the model."""

from typing import Any

import torch
from torch import Tensor

from study.config.reading import resolve
from study.config.schema import Config


def tiny(
    encoder: dict[str, Any] | None = None, size: int = 16, epochs: int = 1, kind: str = "queue", K: int = 40, **top: Any
) -> Config:
    dictionary = {"kind": kind, **({} if kind == "in-batch" else {"K": K})}
    base = {
        "encoder": {"arch": "tiny", "width": 4, "dim": 8, "bn": "split", "bn_splits": 2, **(encoder or {})},
        "data": {"size": size},
        "dictionary": dictionary,
        "optimiser": {"batch": 16, "epochs": epochs},
        **top,
    }
    return resolve(base, "test")


def images(B: int, seed: int = 0) -> Tensor:
    x = torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return x.contiguous(memory_format=torch.channels_last)
