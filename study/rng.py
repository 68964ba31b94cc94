"""Counter-based randomness: every draw derives from (seed, purpose, step).

Nothing carries a random state from one step to the next, so a run that was interrupted draws exactly what an
unbroken run would have drawn.
"""

import hashlib

import torch


def generator(seed: int, purpose: str, step: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator for one purpose at one step.

    Args:
        seed: the run's seed.
        purpose: what is drawn, such as ``"order"``, ``"views"``, ``"bank"``; two purposes never share a stream.
        step: the optimiser step, the epoch, or whatever counts this purpose.
        device: where the numbers are drawn; the same numbers only on the same kind of device.
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
