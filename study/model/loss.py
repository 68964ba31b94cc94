"""InfoNCE (Section 3.1, Equation 1) in closed form: nothing concatenated, no gradient to the negatives."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 2048
"""Negatives handled at once: B × CHUNK logits are all that is ever held, whatever K is."""

MARGIN = 1e-6
"""By how much a cosine must win: above the rounding of two ways to the same product, so that a tie is no win."""


class _InfoNCE(torch.autograd.Function):
    """One pass over the negatives yields the loss and, since dL/dq is linear in them, its gradient too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, negatives: Tensor, T: float, counts: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        B, K = len(q), len(negatives)
        query = (q / T).to(dtype)
        l_pos = (q * k).sum(1) / T  # B

        def l_neg(chunk: slice) -> Tensor:  # B×CHUNK, fp32
            return (query @ negatives[chunk].to(dtype).T).float()

        chunks = [slice(start, start + CHUNK) for start in range(0, K, CHUNK)]
        # |logit| ≤ 1/T for unit vectors: exp cannot overflow, nor can all of it vanish, unless T is very small.
        shift = torch.zeros_like(l_pos)
        if T < 0.025:
            shift = torch.stack([l_pos, *(l_neg(chunk).amax(1) for chunk in chunks)]).amax(0)
        hardest, total, pull = torch.full_like(l_pos, -torch.inf), torch.zeros_like(l_pos), torch.zeros_like(q)
        for chunk in chunks:
            logits = l_neg(chunk)
            seen = logits if counts is None else logits.masked_fill(counts[:, chunk] == 0, -torch.inf)
            hardest = torch.maximum(hardest, seen.amax(1))
            weight = logits.sub_(shift[:, None]).exp_() if T < 0.025 else logits.exp_()
            if counts is not None:
                weight *= counts[:, chunk]
            total += weight.sum(1)
            if ctx.needs_input_grad[0]:
                pull += (weight.to(dtype) @ negatives[chunk].to(dtype)).float()
        e_pos = (l_pos - shift).exp()
        total += e_pos
        miss = 1 - e_pos / total  # B: 1 − the positive's share
        grad_q = (pull / total[:, None] - miss[:, None] * k) / (B * T) if ctx.needs_input_grad[0] else None
        grad_k = -miss[:, None] * q / (B * T) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(grad_q, grad_k)
        accuracy = (l_pos > hardest + MARGIN / T).float().mean()
        ctx.mark_non_differentiable(accuracy)
        return (total.log() + shift - l_pos).mean(), accuracy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = (None if grad is None else grad * grads[0] for grad in ctx.saved_tensors)
        return grad_q, grad_k, None, None, None, None


def infonce(
    q: Tensor,
    k: Tensor,
    negatives: Tensor,
    T: float,
    counts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """−log of the positive's share among 1 + K candidates, averaged over the batch.

    Args:
        q: queries (B, D), unit length, fp32.
        k: positives (B, D); they get a gradient if they require one.
        negatives: (K, D), without gradient.
        T: temperature.
        counts: (B, K), how often each negative stands among those of each query; None: once each.
        dtype: of the two products with the negatives; sums are fp32 in any case.

    Returns:
        The loss (), and the accuracy (): the share of queries whose positive beats every negative. A tie is no win,
        so a collapsed model reads 0.
    """
    with torch.autocast(q.device.type, enabled=False):
        loss, accuracy = _InfoNCE.apply(q, k, negatives, T, counts, dtype)
        return loss, accuracy


def infonce_in_batch(q: Tensor, k: Tensor, T: float) -> tuple[Tensor, Tensor]:
    """InfoNCE with the other keys of the batch as negatives, and gradients to both sides (Figure 2a).

    Args:
        q: queries (B, D), unit length, fp32.
        k: keys (B, D); key i is the positive of query i and a negative of every other.
        T: temperature.

    Returns:
        The loss () and the accuracy (), as :func:`infonce` does.
    """
    with torch.autocast(q.device.type, enabled=False):
        logits = q @ k.T / T  # B×B
        loss = F.cross_entropy(logits, torch.arange(len(q), device=q.device))
        l_pos = logits.detach().diagonal()
        hardest = logits.detach().clone().fill_diagonal_(-torch.inf).amax(1)
        return loss, (l_pos > hardest + MARGIN / T).float().mean()
