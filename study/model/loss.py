"""InfoNCE (Section 3.1, Equation 1) in closed form: nothing concatenated, no gradient to the negatives."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = {"cpu": 1024, "cuda": 16384}
"""Negatives handled at once: B × CHUNK logits are all that is ever held, whatever K is. On a CPU they stay in cache."""

SMALL_T = 0.02
"""Unit vectors bound a logit by 1/T; down to this T neither a sum of exponentials nor its inverse overflows fp32."""

MARGIN = 1e-6
"""By how much a cosine must win: above the rounding of two ways to the same product, so that a tie is no win."""


class _InfoNCE(torch.autograd.Function):
    """One pass over the negatives gives the loss and, up to a factor that is known at its end, dL/dq."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, negatives: Tensor, T: float, counts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        B, size = len(q), CHUNK[q.device.type]
        chunks = [slice(start, start + size) for start in range(0, len(negatives), size)]

        def l_neg(chunk: slice) -> Tensor:  # B×size
            logits = (q / T) @ negatives[chunk].T
            return logits if counts is None else logits.masked_fill_(counts[:, chunk] == 0, -torch.inf)

        l_pos = (q * k).sum(1) / T  # B
        shift = torch.zeros_like(l_pos)  # taken off every logit of a query before exp; the loss does not depend on it
        if T < SMALL_T:
            shift = torch.stack([l_pos, *(l_neg(chunk).amax(1) for chunk in chunks)]).amax(0)
        e_pos = (l_pos - shift).exp()

        hardest = torch.full_like(l_pos, -torch.inf)  # B: the largest negative logit
        total = e_pos.clone()  # B: Σ exp over positive and negatives
        pull = torch.zeros_like(q)  # B×D: Σ exp · negative
        for chunk in chunks:
            logits = l_neg(chunk)
            hardest = torch.maximum(hardest, logits.amax(1))
            e_neg = logits.exp_() if T >= SMALL_T else logits.sub_(shift[:, None]).exp_()
            if counts is not None:
                e_neg *= counts[:, chunk]
            total += e_neg.sum(1)
            if ctx.needs_input_grad[0]:
                pull += e_neg @ negatives[chunk]

        push = (1 - e_pos / total)[:, None]  # B×1: the share of the negatives
        ctx.save_for_backward(
            (pull / total[:, None] - push * k) / (B * T) if ctx.needs_input_grad[0] else None,
            push * q / (-B * T) if ctx.needs_input_grad[1] else None,
        )
        accuracy = (l_pos > hardest + MARGIN / T).float().mean()
        ctx.mark_non_differentiable(accuracy)
        return (total.log() + shift - l_pos).mean(), accuracy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = (None if grad is None else grad * grads[0] for grad in ctx.saved_tensors)
        return grad_q, grad_k, None, None, None


def infonce(q: Tensor, k: Tensor, negatives: Tensor, T: float, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """−log of the positive's share among 1 + K candidates, averaged over the batch; fp32, whatever autocast says.

    Args:
        q: queries (B, D) of unit length.
        k: positives (B, D) of unit length; they get a gradient if they require one.
        negatives: (K, D) of unit length; they never get a gradient, and may be overwritten before backward.
        T: temperature.
        counts: (B, K), how often each negative stands among those of each query; None: once each.

    Returns:
        The loss (), and the accuracy (): the share of queries whose positive beats every negative. A tie is no win,
        so that a collapsed model reads 0.
    """
    with torch.autocast(q.device.type, enabled=False):
        loss, accuracy = _InfoNCE.apply(q, k, negatives, T, counts)
        return loss, accuracy


def infonce_in_batch(q: Tensor, k: Tensor, T: float) -> tuple[Tensor, Tensor]:
    """InfoNCE with the other keys of the batch as negatives, and gradients to both sides (Figure 2a).

    Args:
        q: queries (B, D) of unit length.
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
