"""Split BN, frozen statistics, and the shuffle that keeps BN from giving the positive away."""

import pytest
import torch
from model_fixture import images, tiny
from torch import Tensor, nn

from study.model.moco import MoCo
from study.model.norm import SplitBatchNorm, frozen_statistics, shuffle, unshuffle
from study.rng import generator


def reference(x: Tensor, splits: int) -> tuple[Tensor, nn.BatchNorm2d]:
    """As many plain BN layers as splits, with the average of their buffers."""
    norms = [nn.BatchNorm2d(x.shape[1]) for _ in range(splits)]
    out = torch.cat([norm(part) for norm, part in zip(norms, x.chunk(splits), strict=True)])
    average = nn.BatchNorm2d(x.shape[1])
    for name in ("running_mean", "running_var"):
        getattr(average, name).copy_(torch.stack([getattr(norm, name) for norm in norms]).mean(0))
    return out, average


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_each_split_is_normalised_by_its_own_statistics(splits: int, dtype: torch.dtype) -> None:
    x, pull = (torch.randn(16, 3, 4, 4).contiguous(memory_format=torch.channels_last).to(dtype) for _ in range(2))
    one, two = x.clone().requires_grad_(), x.float().requires_grad_()
    norm = SplitBatchNorm(3, splits)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    out, (normalised, average) = norm(one), reference(two, splits)
    weight, bias = (p.detach()[:, None, None] for p in (norm.weight, norm.bias))
    out.backward(pull)
    (normalised * weight).backward(pull.float())

    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(out.float(), normalised * weight + bias, **tolerance)
    torch.testing.assert_close(one.grad.float(), two.grad, **tolerance)
    torch.testing.assert_close(norm.weight.grad, (normalised.detach() * pull).sum((0, 2, 3)), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(norm.bias.grad, pull.float().sum((0, 2, 3)), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(norm.running_mean, average.running_mean)
    torch.testing.assert_close(norm.running_var, average.running_var)
    assert out.is_contiguous(memory_format=torch.channels_last) and out.dtype == dtype and norm.num_batches_tracked == 1


def test_in_eval_mode_split_bn_is_plain_bn() -> None:
    norm, plain = SplitBatchNorm(3, 4), nn.BatchNorm2d(3)
    norm(torch.randn(16, 3, 4, 4))
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(5, 3, 4, 4)  # need not divide
    assert torch.equal(norm.eval()(x), plain.eval()(x))
    assert norm.num_batches_tracked == 1


def test_a_split_does_not_see_the_others() -> None:
    norm, x = SplitBatchNorm(3, 2), torch.randn(8, 3, 4, 4)
    other = torch.cat([x[:4], 10 * x[4:] + 3])
    assert torch.equal(norm(x)[:4], norm(other)[:4])


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), SplitBatchNorm(3, 4)])
def test_frozen_statistics_move_no_buffer_and_change_no_output(norm: nn.BatchNorm2d) -> None:
    x = 3 + 2 * torch.randn(16, 3, 4, 4)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with frozen_statistics(norm):
        frozen = norm(x)
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
    assert torch.equal(frozen, norm(x)), "train mode still normalises by the batch"
    assert not any(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


def test_shuffle_is_undone_and_moves_images_between_the_splits() -> None:
    x = torch.arange(64.0).view(64, 1, 1, 1).expand(64, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    shuffled, order = shuffle(x, generator(0, "shuffle"))
    assert torch.equal(shuffled, x[order]) and not torch.equal(shuffled, x)
    assert shuffled.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(unshuffle(shuffled.flatten(1), order), x.flatten(1))


def test_unshuffled_key_i_carries_id_i() -> None:
    """Identity encoder, one-hot ids; the queue then holds the ids in the batch's order."""
    B, ids = 32, 3 * 8 * 8
    model = MoCo(tiny(encoder={"arch": "pixels", "bn": "shuffle"}, epochs=0, size=8, K=B), n=100)
    x = torch.eye(ids)[:B].view(B, 3, 8, 8)
    output = model(x, x, torch.arange(B), generator(0, "shuffle"))
    assert torch.equal(output.keys.argmax(1), torch.arange(B))
    model.store(output.keys, torch.arange(B), 0)
    assert torch.equal(model.dictionary.get_buffer("queue").argmax(1), torch.arange(B))


@pytest.mark.filterwarnings("ignore:encoder.bn = shuffle")
@pytest.mark.parametrize(("splits", "changes"), [(1, False), (4, True)])
def test_shuffling_changes_nothing_with_plain_bn_and_something_with_split_bn(splits: int, changes: bool) -> None:
    shuffled, straight = (MoCo(tiny(encoder={"bn": bn, "bn_splits": splits}), n=100) for bn in ("shuffle", "split"))
    one, two = (model.encode_keys(images(16), generator(0, "shuffle")) for model in (shuffled, straight))
    assert torch.allclose(one, two, atol=1e-4) is not changes


def test_shuffling_one_split_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"bn_splits = 1: the shuffle changes nothing"):
        MoCo(tiny(encoder={"bn": "shuffle", "bn_splits": 1}), n=100)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bn", [{"bn": "shuffle", "bn_splits": 2}, {"bn": "plain", "bn_splits": 1}])
def test_nothing_else_is_warned_of(bn: dict[str, object]) -> None:
    MoCo(tiny(encoder=bn), n=100)
