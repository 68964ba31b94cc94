"""A step of MoCo in the order of Algorithm 1: what moves, when, and what does not."""

import pytest
import torch
from model_fixture import images, tiny
from torch import Tensor
from torch.nn import functional as F

from study.config.reading import resolve
from study.model.loss import infonce, infonce_in_batch
from study.model.moco import MoCo
from study.model.norm import frozen_statistics
from study.rng import generator


def train(model: MoCo, steps: int, lr: float = 0.1, batch: int = 16) -> None:
    """The trainer's step, as moco.py's docstring gives it."""
    optimiser = torch.optim.SGD(model.f_q.parameters(), lr)
    for step in range(steps):
        index = torch.arange(batch)
        model.update_key_encoder()
        output = model(images(batch, 2 * step), images(batch, 2 * step + 1), index, generator(0, "model", step))
        optimiser.zero_grad()
        output.loss.backward()
        optimiser.step()
        model.store(output.keys, index, step)


def parameters(model: MoCo) -> tuple[list[Tensor], list[Tensor]]:
    assert model.f_k is not None
    return tuple([p.detach().clone() for p in f.parameters()] for f in (model.f_q, model.f_k))  # type: ignore[return-value]


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_at_construction_every_key_parameter_equals_its_query_parameter(head: str) -> None:
    model = MoCo(tiny(encoder={"head": head}), n=100)
    theta_q, theta_k = (dict(f.named_parameters()) for f in (model.f_q, model.f_k))
    assert theta_q.keys() == theta_k.keys() and any(name.startswith("head") for name in theta_k)
    for name in theta_q:
        assert torch.equal(theta_q[name], theta_k[name]) and theta_q[name] is not theta_k[name]
        assert theta_q[name].requires_grad and not theta_k[name].requires_grad


def test_initialisation_is_the_seeds_alone() -> None:
    torch.rand(3)
    state = torch.get_rng_state()
    one, two, other = (MoCo(tiny(seed=seed), n=100).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["f_q.backbone.conv1.weight"], other["f_q.backbone.conv1.weight"])
    assert torch.equal(one["f_q.head.0.weight"], MoCo(tiny(seed=1, kind="in-batch"), n=100).f_q.head[0].weight)


@pytest.mark.parametrize("m", [0.0, 0.9, 0.999, 1.0])
def test_the_key_encoder_obeys_the_momentum_update(m: float) -> None:
    model = MoCo(tiny(m=m), n=100)
    train(model, 2)
    theta_q, theta_k = parameters(model)
    assert not all(torch.equal(p_q, p_k) for p_q, p_k in zip(theta_q, theta_k, strict=True))
    model.update_key_encoder()
    for p_q, p_k, new in zip(theta_q, theta_k, model.f_k.parameters(), strict=True):
        torch.testing.assert_close(new.double(), m * p_k.double() + (1 - m) * p_q.double(), atol=1e-7, rtol=1e-7)


def test_m_0_encodes_every_step_with_f_q_itself() -> None:
    model = MoCo(tiny(m=0), n=100)
    train(model, 2)
    model.update_key_encoder()
    theta_q, theta_k = parameters(model)
    assert all(torch.equal(p_q, p_k) for p_q, p_k in zip(theta_q, theta_k, strict=True))


def test_m_1_never_moves_the_key_encoder() -> None:
    model = MoCo(tiny(m=1), n=100)
    start = parameters(model)
    train(model, 3)
    model.update_key_encoder()
    theta_q, theta_k = parameters(model)
    assert all(torch.equal(now, then) for now, then in zip(theta_k, start[1], strict=True))
    assert not any(torch.equal(now, then) for now, then in zip(theta_q, start[0], strict=True))


def test_the_momentum_update_leaves_batch_norm_buffers_alone() -> None:
    model = MoCo(tiny(m=0), n=100)
    model.f_q(3 + 2 * images(16))
    before = [buffer.clone() for buffer in model.f_k.buffers()]
    model.update_key_encoder()
    assert before and all(torch.equal(now, then) for now, then in zip(model.f_k.buffers(), before, strict=True))
    model.encode_keys(images(16), generator(0, "model"))  # its own, in train mode
    assert not any(torch.equal(now, then) for now, then in zip(model.f_k.buffers(), before, strict=True))


@pytest.mark.parametrize("kind", ["queue", "bank", "in-batch"])
def test_nothing_is_rebound_by_a_step(kind: str) -> None:
    """`param.data = …` would break graphs and captured steps."""
    model = MoCo(tiny(kind=kind), n=100)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    train(model, 3)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


def test_a_batch_is_compared_with_the_queue_as_it_is_before_its_own_keys_enter() -> None:
    model = MoCo(tiny(m=0.9), n=100)
    train(model, 2)
    queue = model.dictionary.get_buffer("queue")
    before = queue.clone()
    x_q, x_k, index = images(16, 7), images(16, 8), torch.arange(16)
    output = model(x_q, x_k, index, generator(0, "model", 2))
    assert torch.equal(queue, before)
    with frozen_statistics(model):
        q, k = model.f_q(x_q), model.f_k(x_k)
    expected, accuracy = infonce(q, k, before, model.T)
    assert torch.equal(output.loss, expected) and torch.equal(output.accuracy, accuracy)
    assert torch.equal(output.keys, k) and not output.keys.requires_grad
    model.store(output.keys, index, 2)
    assert torch.equal(queue[-8:], k[:8]) and torch.equal(queue[:8], k[8:])  # 2 × 16 of 40 rows were taken


def test_gradients_flow_to_theta_q_alone() -> None:
    model = MoCo(tiny(), n=100)
    model(images(16), images(16, 1), torch.arange(16), generator(0, "model")).loss.backward()
    assert all(p.grad is not None for p in model.f_q.parameters())
    assert all(p.grad is None for p in model.f_k.parameters())


def test_symmetric_halves_see_the_same_queue_and_are_stored_together() -> None:
    symmetric, plain = MoCo(tiny(symmetric=True), n=100), MoCo(tiny(), n=100)
    views, index = (images(16), images(16, 1)), torch.arange(16)
    with frozen_statistics(symmetric), frozen_statistics(plain):
        both = symmetric(*views, index, generator(0, "model"))
        halves = [plain(*pair, index, generator(0, "model")) for pair in (views, views[::-1])]
    torch.testing.assert_close(both.loss, (halves[0].loss + halves[1].loss) / 2)
    assert torch.equal(both.keys, torch.cat([halves[0].keys, halves[1].keys]))
    symmetric.store(both.keys, index, 0)
    assert int(symmetric.dictionary.get_buffer("pointer")) == 32


def test_accumulation_compares_every_micro_batch_with_the_same_queue() -> None:
    """One momentum update, one enqueue an optimiser step (BN sees the micro-batch, so keys are those of its own)."""
    model = MoCo(tiny(), n=100)
    queue = model.dictionary.get_buffer("queue")
    before, index = queue.clone(), torch.arange(16)
    outputs = [
        model(x_q, x_k, rows, generator(0, "model"))
        for x_q, x_k, rows in zip(images(16).chunk(2), images(16, 1).chunk(2), index.chunk(2), strict=True)
    ]
    assert torch.equal(queue, before)
    model.store(torch.cat([output.keys for output in outputs]), index, 0)
    assert int(model.dictionary.get_buffer("pointer")) == 16
    assert torch.equal(queue[8:16], outputs[1].keys)


def test_in_batch_without_momentum_has_gradients_to_both_sides() -> None:
    model = MoCo(tiny(kind="in-batch"), n=100)
    assert model.f_k is None
    x_q, x_k = images(16), images(16, 1)
    model(x_q, x_k, torch.arange(16), generator(0, "model")).loss.backward()
    got = [p.grad.clone() for p in model.f_q.parameters()]
    model.zero_grad()
    infonce_in_batch(model.f_q(x_q), model.f_q(x_k), model.T)[0].backward()
    for one, p in zip(got, model.f_q.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad)


def test_in_batch_with_momentum_has_its_keys_from_f_k_without_gradient() -> None:
    model = MoCo(tiny(kind="in-batch", m=0.9), n=100)
    train(model, 2)
    x_q, x_k = images(16), images(16, 1)
    got = model(x_q, x_k, torch.arange(16), generator(0, "model")).loss
    with frozen_statistics(model):
        expected = infonce_in_batch(model.f_q(x_q), model.f_k(x_k), model.T)[0]
    assert torch.equal(got, expected)
    got.backward()
    assert all(p.grad is None for p in model.f_k.parameters())


@pytest.mark.parametrize("positive", ["bank", "fresh"])
def test_the_bank_has_no_key_encoder_and_is_written_by_store_alone(positive: str) -> None:
    config = resolve(
        {**tiny(kind="bank").model_dump(), "dictionary": {"kind": "bank", "K": 40, "bank_positive": positive}}, "test"
    )
    model = MoCo(config, n=100)
    bank, index = model.dictionary.get_buffer("bank"), torch.arange(50, 66)
    before = bank.clone()
    x_q, x_k = images(16), images(16, 1)
    output = model(x_q, x_k, index, generator(0, "model"))
    model.eval()
    with torch.no_grad():
        model.f_q(x_q)
    assert model.f_k is None and torch.equal(bank, before), "neither a forward pass nor an evaluation writes to it"
    model.train()
    with frozen_statistics(model), torch.no_grad():
        stored = model.f_q(x_q if positive == "bank" else x_k)
    assert torch.equal(output.keys, stored)
    model.store(output.keys, index, 0)
    assert torch.equal(bank[:50], before[:50])
    torch.testing.assert_close(bank[index], F.normalize((before[index] + stored) / 2, dim=1))


@pytest.mark.parametrize("kind", ["queue", "bank", "in-batch"])
def test_encode_keys_makes_the_keys_again_without_gradient_or_trace(kind: str) -> None:
    model = MoCo(tiny(kind=kind, encoder={"bn": "split" if kind == "bank" else "shuffle"}), n=100)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with frozen_statistics(model):
        again = [model.encode_keys(images(16), generator(0, "model", 5)) for _ in range(2)]
    assert torch.equal(*again) and not again[0].requires_grad
    with frozen_statistics(model):
        output = model(images(16), images(16), torch.arange(16), generator(0, "model", 5))
    assert torch.equal(again[0], output.keys)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_saved_model_continues_bit_for_bit() -> None:
    one, two = MoCo(tiny(m=0.9), n=100), MoCo(tiny(m=0.9, seed=0), n=100)
    train(one, 3)
    two.load_state_dict(one.state_dict())
    for model in (one, two):
        train(model, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
