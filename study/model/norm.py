"""Batch normalisation over splits of a batch, and the shuffle that keeps it from giving the positive away.

A split stands in for a GPU: on the paper's 8 GPUs every BN layer saw 32 of the 256 images (Section 3.3).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


class SplitBatchNorm(nn.BatchNorm2d):
    """BN that normalises each of ``splits`` consecutive parts of the batch by its own mean and variance.

    The running statistics move by the mean over the splits of what each split would have added: the average of the
    buffers that as many GPUs would hold. In eval mode it is plain BN on those.

    Args:
        channels: C.
        splits: number of parts; it has to divide every batch.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def __init__(self, channels: int, splits: int) -> None:
        super().__init__(channels)
        self.splits = splits

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (B, C, H, W) → (B, C, H, W)."""
        if not self.training:
            return super().forward(x)
        means, variances = self.running_mean.repeat(self.splits, 1), self.running_var.repeat(self.splits, 1)
        parts = [
            F.batch_norm(part, mean, variance, self.weight, self.bias, True, self.momentum, self.eps)
            for part, mean, variance in zip(x.chunk(self.splits), means, variances, strict=True)
        ]
        if self.track_running_stats:
            self.running_mean.copy_(means.mean(0))
            self.running_var.copy_(variances.mean(0))
            self.num_batches_tracked.add_(1)
        return torch.cat(parts)


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Within it BN normalises as its mode says, but no running statistic of ``model`` moves."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def shuffle(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Put a batch in random order, so that its splits hold other images than the query's (Section 3.3).

    This and :func:`unshuffle` are where several processes will exchange their images and keys.

    Returns:
        The shuffled batch (B, …), and the order (B,) that :func:`unshuffle` needs.
    """
    order = torch.randperm(len(x), generator=generator, device=generator.device).to(x.device)
    return x[order], order


def unshuffle(k: Tensor, order: Tensor) -> Tensor:
    """Give the keys (B, D) of a shuffled batch the order that the batch had before."""
    return k[order.argsort()]
