"""Loops that numba compiles, for what costs a CPU many passes as operations on whole arrays.

Compiled once a machine, in seconds, and kept beside the source. A function that others call is ``kept``; what it calls
is only ``compiled``, and kept with it. Numbers are float32 by name: ``2 * x`` would be computed in float64.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numba
import torch

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compiled at its first call, without Python's lock."""
    return numba.njit(nogil=True, fastmath=True, error_model="numpy")(function)  # type: ignore[no-any-return]


def kept(function: F) -> F:
    """Compiled, and kept for the next process where there is a place to keep it."""
    options = {"nogil": True, "fastmath": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # neither this folder nor the user's can be written
        return numba.njit(**options)(function)  # type: ignore[no-any-return]


def share(work: Callable[[int, int], None], n: int) -> None:
    """``work(start, stop)`` on as many parts of 0 … n as torch has threads, side by side."""
    threads = max(1, min(torch.get_num_threads(), n))
    if threads == 1:
        work(0, n)
        return
    edges = [n * i // threads for i in range(threads + 1)]
    for done in [_pool(threads).submit(work, start, stop) for start, stop in pairwise(edges)]:
        done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="loops")
