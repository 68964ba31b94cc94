"""InfoNCE: exact against a naive loop, safe at any temperature, and no larger than a chunk."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from study.model import loss
from study.model.loss import infonce, infonce_in_batch


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


def naive(q: Tensor, k: Tensor, negatives: list[Tensor], T: float) -> Tensor:
    """−log of the positive's share, one query at a time, from the text of Section 3.1; negatives: (K, D) a query."""
    losses = []
    for i in range(len(q)):
        candidates = torch.stack([q[i] @ k[i] / T, *(q[i] @ negative / T for negative in negatives[i])])
        losses.append(-torch.log_softmax(candidates, 0)[0])
    return torch.stack(losses).mean()


def float32(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().float().requires_grad_(tensor.requires_grad) for tensor in tensors]


@pytest.mark.parametrize("T", [0.005, 0.019, 0.07, 1.0])
@pytest.mark.parametrize("K", [1, 7, 8, 20])  # a chunk is 8: below, one less, exactly one, two and a half
def test_loss_and_both_gradients_equal_a_naive_loop(K: int, T: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", 8)
    q, k, queue = unit(5, 6).requires_grad_(), unit(5, 6, seed=1).requires_grad_(), unit(K, 6, seed=2)
    expected = naive(q, k, [queue] * 5, T)
    expected.backward()
    q32, k32, queue32 = float32(q, k, queue)
    value, _ = infonce(q32, k32, queue32, T)
    (3 * value).backward()
    tolerance = 1e-5 * max(1, 0.07 / T)  # a logit of 1/T carries so much rounding
    torch.testing.assert_close(value.double(), expected, atol=tolerance, rtol=1e-5)
    torch.testing.assert_close(q32.grad.double(), 3 * q.grad, atol=tolerance / T, rtol=1e-5)
    torch.testing.assert_close(k32.grad.double(), 3 * k.grad, atol=tolerance / T, rtol=1e-5)


def test_counts_are_repeated_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", 4)
    q, k, bank = unit(2, 6).requires_grad_(), unit(2, 6, seed=1), unit(6, 6, seed=2)
    counts = torch.tensor([[2.0, 0, 1, 0, 0, 3], [0, 0, 0, 0, 0, 1]])
    expected = naive(q, k, [bank.repeat_interleave(row.long(), 0) for row in counts], 0.07)
    expected.backward()
    q32, k32, bank32 = float32(q, k, bank)
    value, _ = infonce(q32, k32, bank32, 0.07, counts)
    value.backward()
    torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(q32.grad.double(), q.grad, atol=1e-5, rtol=1e-5)


def test_a_negative_that_does_not_count_takes_no_part_in_the_accuracy() -> None:
    q = torch.tensor([[1.0, 0.0]])
    far, near = torch.tensor([[-1.0, 0.0], [0.8, 0.6]])
    k, negatives = torch.tensor([[-0.6, 0.8]]), torch.stack([far, near])  # q·k lies between the two
    assert infonce(q, k, negatives, 0.07, torch.tensor([[1.0, 0.0]]))[1] == 1
    assert infonce(q, k, negatives, 0.07, torch.tensor([[0.0, 1.0]]))[1] == 0


def test_negatives_and_fixed_keys_get_no_gradient() -> None:
    q, k, queue = float32(unit(4, 6).requires_grad_(), unit(4, 6, seed=1), unit(9, 6, seed=2).requires_grad_())
    infonce(q, k, queue, 0.07)[0].backward()
    assert q.grad is not None and k.grad is None and queue.grad is None


@pytest.mark.parametrize("T", [1e-4, 0.0199, 0.02, 0.07, 10.0])
@pytest.mark.parametrize(("positive", "negative"), [(1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0), (1.0, 1.0)])
def test_extreme_logits_stay_finite(T: float, positive: float, negative: float) -> None:
    u = torch.eye(4)[:1]
    q = u.clone().requires_grad_()
    value, _ = infonce(q, positive * u, (negative * u).expand(5000, 4), T)
    value.backward()
    expected = math.log1p(5000 * math.exp(min(700.0, (negative - positive) / T)))
    if (negative - positive) / T > 700:
        expected = (negative - positive) / T + math.log(5000)
    assert float(value.detach()) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert q.grad.isfinite().all()


def test_a_collapsed_model_reads_ln_of_k_plus_1_and_accuracy_0() -> None:
    """Every logit ties; an argmax would read 100 %."""
    for seed in range(20):
        u = unit(1, 128, seed=seed).float()
        value, accuracy = infonce(u.expand(16, 128), u.expand(16, 128), u.expand(4096, 128), 0.07)
        assert accuracy == 0
        assert float(value) == pytest.approx(math.log(4097), abs=1e-4)
        assert infonce_in_batch(u.expand(16, 128), u.expand(16, 128), 0.07)[1] == 0


def test_accuracy_counts_strict_wins() -> None:
    q, queue = torch.eye(3)[:2].contiguous(), torch.tensor([[0.6, 0.0, 0.8], [0.0, 0.8, 0.6]])
    k = torch.tensor([[0.8, 0.6, 0.0], [0.6, 0.8, 0.0]])  # 0.8 > 0.6 wins; 0.8 = 0.8 ties
    assert infonce(q, k, queue, 0.07)[1] == 0.5


def test_the_first_loss_with_a_random_queue_is_the_one_that_the_formula_gives() -> None:
    """PAPER: log(1 + exp(ln K + 1/(2 D T²) − s/T)); it does not start at ln(K + 1)."""
    K, D, T, s = 4096, 128, 0.07, 0.8
    q, other, queue = unit(256, D).float(), unit(256, D, seed=1).float(), unit(K, D, seed=2).float()
    orthogonal = F.normalize(other - (other * q).sum(1, keepdim=True) * q, dim=1)
    k = s * q + math.sqrt(1 - s**2) * orthogonal
    expected = math.log1p(math.exp(math.log(K) + 1 / (2 * D * T**2) - s / T))
    assert float(infonce(q, k, queue, T)[0]) == pytest.approx(expected, abs=0.02)
    assert abs(expected - math.log(K + 1)) > 5


def test_autocast_does_not_reach_the_loss() -> None:
    q, k, queue = float32(unit(4, 16), unit(4, 16, seed=1), unit(40, 16, seed=2))
    with torch.autocast("cpu", torch.bfloat16):
        inside, in_batch = infonce(q, k, queue, 0.07)[0], infonce_in_batch(q, k, 0.07)[0]
    assert torch.equal(inside, infonce(q, k, queue, 0.07)[0])
    assert torch.equal(in_batch, infonce_in_batch(q, k, 0.07)[0])


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view():
            self.numel = max(self.numel, result.numel())
        return result


def test_memory_does_not_grow_with_K() -> None:
    largest = {}
    for K in (2048, 16384):
        q, k, queue = float32(unit(16, 8).requires_grad_(), unit(16, 8, seed=1), unit(K, 8, seed=2))
        with _Largest() as mode:
            infonce(q, k, queue, 0.07)[0].backward()
        largest[K] = mode.numel
    assert largest[2048] == largest[16384] == 16 * loss.CHUNK["cpu"]


def test_in_batch_equals_a_naive_loop_with_gradients_to_both_sides() -> None:
    q, k = unit(5, 6).requires_grad_(), unit(5, 6, seed=1).requires_grad_()
    others = [torch.cat([k[:i], k[i + 1 :]]) for i in range(5)]  # K = B − 1
    expected = naive(q, k, others, 0.07)
    expected.backward()
    q32, k32 = float32(q, k)
    value, accuracy = infonce_in_batch(q32, k32, 0.07)
    value.backward()
    torch.testing.assert_close(value.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(q32.grad.double(), q.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k32.grad.double(), k.grad, atol=1e-5, rtol=1e-5)
    wins = [bool(q[i] @ k[i] > (others[i] @ q[i]).max()) for i in range(5)]
    assert float(accuracy) == pytest.approx(sum(wins) / 5)
