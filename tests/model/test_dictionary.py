"""The three dictionaries, on tensors small enough to write down."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from study.config.reading import resolve
from study.model.dictionary import Dictionary, InBatch, MemoryBank, Queue, build
from study.model.loss import infonce
from study.rng import generator

EVICTIONS = ["oldest", "newest", "random"]


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)


def keys(*rows: int) -> Tensor:
    """Unit vectors (len(rows), 2), one direction an integer: tells them apart and turns none into another."""
    angle = torch.tensor(rows, dtype=torch.float32)
    return torch.stack([angle.cos(), angle.sin()], 1)


def index(B: int) -> Tensor:
    return torch.arange(B)


def contrast(dictionary: Dictionary, q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return dictionary.contrast(q, k, rows, 0.07, generator(0, "test"))


def config(**dictionary: object) -> object:
    return resolve({"dictionary": dictionary, "encoder": {"bn": "split"}, "optimiser": {"batch": 16}}, "test")


# ------------------------------------------------------------------------------------------------------------- queue


def test_queue_step_by_step() -> None:
    queue = Queue(K=3, dim=2, eviction="oldest", seed=0)
    start = queue.queue.clone()
    queue.store(keys(1, 2), index(2), 0)
    torch.testing.assert_close(queue.queue, torch.cat([keys(1, 2), start[2:]]))
    assert queue.origin.tolist() == [0, 0, -1] and int(queue.pointer) == 2
    queue.store(keys(3, 4), index(2), 1)  # does not divide K: wraps round
    torch.testing.assert_close(queue.queue, keys(4, 2, 3))
    assert queue.origin.tolist() == [1, 0, 1] and queue.position.tolist() == [1, 1, 0] and int(queue.pointer) == 1
    queue.store(keys(5, 6, 7, 8), index(4), 2)  # more than K: the last K stay, none is refused
    torch.testing.assert_close(queue.queue, keys(7, 8, 6))
    assert queue.origin.tolist() == [2, 2, 2] and queue.position.tolist() == [2, 3, 1] and int(queue.pointer) == 2


@settings(max_examples=150, deadline=None)
@given(
    K=st.integers(1, 12),
    batches=st.lists(st.integers(1, 15), min_size=1, max_size=8),
    eviction=st.sampled_from(EVICTIONS),
)
def test_queue_is_a_true_ring_for_any_K_and_any_batches(K: int, batches: list[int], eviction: str) -> None:
    """Against a list: nothing dropped, no random start left while keys were evicted, the order that was asked for."""
    queue = Queue(K, 2, eviction, seed=3)
    held: list[tuple[int, int]] = []  # (step, position), oldest first
    for step, B in enumerate(batches):
        written = [(step, position) for position in range(B)]
        queue.store(keys(*(100 * step + position for position in range(B))), index(B), step)
        now = [(o, p) for o, p in zip(queue.origin.tolist(), queue.position.tolist(), strict=True) if o >= 0]
        survivors = K - min(B, K)  # how many old keys a full queue keeps
        if eviction == "oldest":
            held = (held + written)[-K:]
        elif eviction == "newest":
            held = held[:survivors] + written[-K:]
        else:
            kept = [entry for entry in held if entry in now]
            assert len(kept) == min(len(held), survivors)
            held = kept + written[-K:]
        assert sorted(now) == sorted(held)
        expected = keys(*(100 * o + p for o, p in now))
        torch.testing.assert_close(queue.queue[queue.origin >= 0], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(queue.queue.norm(dim=1), torch.ones(K))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_no_cell_keeps_its_random_start(eviction: str) -> None:
    queue = Queue(10, 2, eviction, seed=0)
    for step in range(4):  # 3 does not divide 10
        assert (queue.origin < 0).sum() == 10 - 3 * step
        queue.store(keys(1, 2, 3), index(3), step)
    assert (queue.origin >= 0).all()


def test_newest_keeps_the_first_keys_for_ever() -> None:
    queue = Queue(4, 2, "newest", seed=0)
    for step in range(9):
        queue.store(keys(2 * step, 2 * step + 1), index(2), step)
    assert queue.origin.tolist() == [0, 0, 8, 8]


def test_random_eviction_depends_on_seed_and_step_alone() -> None:
    def origins(seed: int) -> list[int]:
        torch.rand(7)  # moves the global state, which plays no part
        queue = Queue(16, 2, "random", seed)
        for step in range(20):
            queue.store(keys(*range(4)), index(4), step)
        return queue.origin.tolist()

    assert origins(1) == origins(1) != origins(2)
    assert len(set(origins(1))) > 4  # neither first-in nor last-in


def test_random_eviction_is_uniform() -> None:
    queue = Queue(8, 2, "random", seed=0)
    hits = torch.zeros(8)
    for step in range(2000):
        queue.store(keys(1, 2), index(2), step)
        hits += queue.origin == step
    torch.testing.assert_close(hits / 4000, torch.full((8,), 1 / 8), atol=0.02, rtol=0)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_queue_is_written_in_place(eviction: str) -> None:
    queue = Queue(7, 2, eviction, seed=0)
    before = {name: buffer.data_ptr() for name, buffer in queue.named_buffers()}
    for step in range(5):
        queue.store(keys(1, 2, 3), index(3), step)
    assert {name: buffer.data_ptr() for name, buffer in queue.named_buffers()} == before
    assert set(before) == {"queue", "pointer", "origin", "position"}


@pytest.mark.parametrize("kind", ["queue", "bank"])
def test_gradient_is_that_of_a_frozen_copy_though_the_store_comes_before_backward(kind: str) -> None:
    dictionary: Dictionary = (
        Queue(8, 16, "oldest", 0) if kind == "queue" else MemoryBank(8, 8, 16, 0.5, "bank", "shared", 0)
    )
    frozen = dictionary.state_dict()[kind].clone()
    q = F.normalize(torch.randn(4, 16), dim=1)
    k = F.normalize(torch.randn(4, 16), dim=1)
    one, two = q.clone().requires_grad_(), q.clone().requires_grad_()
    loss, _ = contrast(dictionary, one, k, index(4))
    dictionary.store(k, index(4), 0)
    loss.backward()
    drawn = torch.randint(8, (8,), generator=generator(0, "test"))
    infonce(two, *((k, frozen) if kind == "queue" else (frozen[:4], frozen[drawn])), 0.07)[0].backward()
    assert torch.equal(one.grad, two.grad)


def test_a_queue_that_holds_an_images_own_old_keys_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"dictionary.K = 40 with 40 images.*own old keys"):
        build(config(kind="queue", K=40), n=40)


# -------------------------------------------------------------------------------------------------------------- bank


@pytest.mark.parametrize("momentum", [0.9, 0.0, 1.0, 0.5])
def test_bank_momentum_weighs_the_old_value(momentum: float) -> None:
    bank = MemoryBank(3, 2, 2, momentum, "bank", "shared", seed=0)
    bank.bank.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]))
    bank.store(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), 5)
    expected = torch.tensor([momentum, 1 - momentum]) / math.hypot(momentum, 1 - momentum)
    torch.testing.assert_close(bank.bank, torch.stack([expected, torch.tensor([0.0, 1]), torch.tensor([0.6, 0.8])]))
    assert bank.origin.tolist() == [5, -1, -1]


def test_every_row_of_the_bank_is_written_once_an_epoch_the_short_batch_included() -> None:
    bank = MemoryBank(450, 16, 2, 0.5, "bank", "shared", seed=0)
    pointer = bank.bank.data_ptr()
    order = torch.randperm(450, generator=generator(0, "order"))
    before, writes = bank.bank.clone(), 0
    for step, rows in enumerate(order.split(100)):
        bank.store(keys(*range(len(rows))), rows, step)
        assert torch.equal(bank.origin[rows], torch.full((len(rows),), step))
        assert torch.equal(bank.position[rows], index(len(rows)))
        writes += int((bank.origin == step).sum())
    assert writes == 450 and (bank.origin >= 0).all() and (bank.bank != before).any(1).all()
    torch.testing.assert_close(bank.bank.norm(dim=1), torch.ones(450))
    assert bank.bank.data_ptr() == pointer


@pytest.mark.parametrize("positive", ["bank", "fresh"])
@pytest.mark.parametrize("negatives", ["shared", "per-query"])
def test_bank_draws_its_negatives_with_replacement(positive: str, negatives: str) -> None:
    n, K, B = 12, 30, 3  # K > n: only with replacement
    bank = MemoryBank(n, K, 8, 0.5, positive, negatives, seed=0)
    q, k = (F.normalize(torch.randn(B, 8), dim=1) for _ in range(2))
    rows = torch.tensor([7, 2, 9])
    value, accuracy = contrast(bank, q, k, rows)
    drawn = torch.randint(n, (K,) if negatives == "shared" else (B, K), generator=generator(0, "test"))
    own = bank.bank[rows] if positive == "bank" else k
    losses, wins = [], []
    for i in range(B):
        against = bank.bank[drawn if negatives == "shared" else drawn[i]] @ q[i] / 0.07
        own_logit = own[i] @ q[i] / 0.07
        losses.append(torch.cat([own_logit[None], against]).logsumexp(0) - own_logit)
        wins.append(bool(own_logit > against.max() + 1e-4))
    torch.testing.assert_close(value, torch.stack(losses).mean(), atol=1e-5, rtol=1e-5)
    assert float(accuracy) == pytest.approx(sum(wins) / B)


# ---------------------------------------------------------------------------------------------------------- in-batch


def test_in_batch_has_the_other_keys_as_negatives_and_gradients_to_both_sides() -> None:
    q = torch.eye(2).requires_grad_()
    k = torch.tensor([[0.8, 0.6], [0.6, 0.8]]).requires_grad_()
    value, accuracy = InBatch().contrast(q, k, index(2), 1.0, generator(0, "test"))
    value.backward()
    share = 1 / (1 + math.exp(-0.2))  # each query: positive 0.8, the only negative 0.6
    assert float(value.detach()) == pytest.approx(-math.log(share)) and accuracy == 1
    for side in (q, k):
        torch.testing.assert_close(side.grad.abs().sum(), torch.tensor((1 - share) * (0.4 if side is q else 2.0)))


def test_in_batch_remembers_nothing() -> None:
    dictionary = build(config(kind="in-batch"), n=40)
    dictionary.store(keys(1, 2), index(2), 0)
    assert not dictionary.state_dict()


@pytest.mark.parametrize("kind", ["queue", "bank"])
def test_stored_keys_start_as_random_unit_vectors_of_the_seed(kind: str) -> None:
    first, again = (build(config(kind=kind, K=32), n=64).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    torch.testing.assert_close(first[kind].norm(dim=1), torch.ones(len(first[kind])))
    assert first[kind].shape == ((32, 128) if kind == "queue" else (64, 128))
    assert (first[kind] @ first[kind].T - torch.eye(len(first[kind]))).abs().max() < 0.5
