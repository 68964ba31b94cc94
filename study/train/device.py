"""Where a run computes, in what precision, and the settings of its process."""

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from study.config.schema import Config
from study.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def autocaster(config: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The encoder's precision as a context to enter."""
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU when there is one.

    Raises:
        UserError: no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"command line: --device = {name}: allowed is auto, cpu, cuda or cuda:N") from None
    if device.type not in {"cpu", "cuda"} or (
        device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    ):
        raise UserError(f"command line: --device = {name}: not on this machine; allowed is auto, cpu, cuda or cuda:N")
    return device


def configure_torch(device: torch.device, threads: int | None) -> None:
    """Settings of the process: threads, and the same bits from the same work."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    _keep_freed_memory()
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def _keep_freed_memory() -> None:
    """Let glibc keep the large blocks that tensors free: given back to the kernel, each step asks for them anew and
    pays for every page again, which took a sixth of a small encoder's step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have their own ways
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_MMAP_THRESHOLD, 2**25)
