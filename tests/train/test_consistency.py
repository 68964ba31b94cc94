"""Key drift, made measurable by making old batches again; and the shape of the embedding."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from study.config.reading import resolve
from study.config.schema import Config
from study.data.images import Images, Split
from study.data.stream import Stream
from study.model.moco import MoCo
from study.rng import generator
from study.train import consistency

CPU = torch.device("cpu")
PREFIX = "consistency/cosine_age_"


def toy_images(n: int = 128) -> Images:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (n, 3, 4, 4), dtype=np.uint8)
    split = Split(coarse.repeat(4, 2).repeat(4, 3), np.arange(n, dtype=np.int64) % 4)
    return Images("toy", split, split, ("a", "b", "c", "d"), (0.5, 0.5, 0.5), (0.3, 0.3, 0.3), "digest")


def configure(**overrides: Any) -> Config:
    tree = {
        "m": 0.9,
        "data": {"name": "toy", "size": 16, "eval_crop": 1.0},
        "encoder": {"arch": "tiny", "width": 4, "dim": 16, "bn": "plain", "bn_splits": 1},
        "dictionary": {"kind": "queue", "K": 96},
        "optimiser": {"batch": 16, "lr": 0.5, "lr_rule": False, "epochs": 4},
        "consistency": {"every_steps": 1, "samples": 4096},
    }
    for key, value in overrides.items():
        if isinstance(value, dict):
            tree[key] = {**tree.get(key, {}), **value} if key != "dictionary" else value  # type: ignore[dict-item]
        else:
            tree[key] = value
    return resolve(tree, "test")


def trained(config: Config, steps: int) -> tuple[MoCo, Stream]:
    """The trainer's loop without anything around it."""
    stream = Stream(toy_images(), config, CPU)
    model = MoCo(config, stream.n)
    optimiser = torch.optim.SGD(model.f_q.parameters(), lr=config.lr, momentum=0.9)
    micro = config.optimiser.accumulate
    for step in range(steps):
        batch = stream.at(step)
        model.update_key_encoder()
        keys = []
        parts = zip(batch.x_q.chunk(micro), batch.x_k.chunk(micro), batch.index.chunk(micro), strict=True)
        for i, (x_q, x_k, index) in enumerate(parts):
            out = model(x_q, x_k, index, generator(config.seed, "step", step * micro + i))
            (out.loss / micro).backward()
            keys.append(out.keys)
        optimiser.step()
        optimiser.zero_grad()
        model.store(torch.cat(keys), batch.index, step)
    return model, stream


def read(config: Config, steps: int) -> dict[str, float]:
    model, stream = trained(config, steps)
    return consistency.read(model, stream, steps, config, nullcontext)


def by_age(reading: dict[str, float]) -> dict[int, float]:
    return {int(name.removeprefix(PREFIX)): value for name, value in reading.items() if name.startswith(PREFIX)}


SAME_KEYS = {
    "plain": {},
    "shuffled splits": {"encoder": {"bn": "shuffle", "bn_splits": 4}},
    "accumulation": {"optimiser": {"accumulate": 2}, "encoder": {"bn": "shuffle", "bn_splits": 2}},
    "symmetric": {"symmetric": True, "encoder": {"bn": "shuffle", "bn_splits": 4}},
    "symmetric, accumulation": {
        "symmetric": True,
        "optimiser": {"accumulate": 2},
        "encoder": {"bn": "shuffle", "bn_splits": 2},
    },
    "a batch that does not divide K": {"dictionary": {"K": 100}},
}


@pytest.mark.parametrize("overrides", SAME_KEYS.values(), ids=SAME_KEYS)
def test_keys_of_a_key_encoder_that_stands_still_read_one_at_every_age(overrides: dict[str, Any]) -> None:
    reading = read(configure(m=1.0, **overrides), 10)
    ages = by_age(reading)
    assert len(ages) >= 3
    assert all(value == pytest.approx(1, abs=1e-5) for value in ages.values()), ages
    assert reading["consistency/cosine_oldest"] == pytest.approx(1, abs=1e-5)
    assert reading["consistency/theta_distance"] > 0


def test_keys_fall_behind_a_fast_encoder_with_age_and_less_behind_a_slow_one() -> None:
    fast, slow = (by_age(read(configure(m=m), 10)) for m in (0.0, 0.9))
    assert list(fast) == sorted(fast) == [1, 2, 4, 6]
    assert fast[1] == pytest.approx(1, abs=1e-5)  # f_k has not moved since: the batch was made again to the bit
    assert fast[1] > fast[2] > fast[6]
    assert fast[6] < 0.95
    assert all(slow[age] > fast[age] for age in (2, 4, 6))


def test_a_reading_in_bf16_makes_the_same_views_and_keys_again() -> None:
    """Autocast is the encoder's: a view made under it would be another view."""

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)

    config = configure(m=1.0, precision="bf16", encoder={"bn": "shuffle", "bn_splits": 4})
    stream = Stream(toy_images(), config, CPU)
    model = MoCo(config, stream.n)
    for step in range(6):
        batch = stream.at(step)
        with autocast():
            out = model(batch.x_q, batch.x_k, batch.index, generator(config.seed, "step", step))
        model.store(out.keys, batch.index, step)
    reading = consistency.read(model, stream, 6, config, autocast)
    assert all(value == pytest.approx(1, abs=1e-6) for value in by_age(reading).values()), reading


@pytest.mark.parametrize("eviction", ["oldest", "newest", "random"])
def test_every_eviction_order_finds_its_stored_keys(eviction: str) -> None:
    config = configure(m=1.0, dictionary={"kind": "queue", "K": 64, "eviction": eviction})
    reading = read(config, 12)
    assert all(value == pytest.approx(1, abs=1e-5) for value in by_age(reading).values())
    assert reading["consistency/cosine_oldest"] == pytest.approx(1, abs=1e-5)
    assert reading["consistency/cosine_age_1"] == pytest.approx(1, abs=1e-5)
    ages = {"oldest": (4, 2.5), "newest": (12, (12 + 11 + 10 + 1) / 4)}  # three first batches stay for ever
    if eviction in ages:
        assert (reading["consistency/age_oldest"], reading["consistency/age_mean"]) == ages[eviction]
    assert eviction != "newest" or list(by_age(reading)) == [1]


@pytest.mark.parametrize("positive", ["bank", "fresh"])
def test_a_bank_is_compared_row_by_row_with_the_vector_it_stores(positive: str) -> None:
    dictionary = {"kind": "bank", "K": 64, "bank_momentum": 0.0, "bank_positive": positive}
    still = configure(m=None, dictionary=dictionary, optimiser={"lr": 1e-12})
    reading = read(still, 11)  # 8 steps an epoch: of the first, what the second has not come to yet
    ages = by_age(reading)
    assert set(ages) == {1, 2, 3, 5, 8}
    assert all(value == pytest.approx(1, abs=1e-4) for value in ages.values()), ages
    assert "consistency/theta_distance" not in reading
    assert 1e-3 < reading["consistency/alignment"] < 4  # of two views, not of a stored query with itself
    mixed = read(configure(m=None, dictionary={**dictionary, "bank_momentum": 0.5}, optimiser={"lr": 1e-12}), 3)
    assert by_age(mixed)[1] < 0.99  # half of the entry is its random start


def test_an_in_batch_dictionary_has_nothing_stored() -> None:
    reading = read(configure(m=None, dictionary={"kind": "in-batch"}), 2)
    assert set(reading) == {
        f"consistency/{name}" for name in ("alignment", "uniformity", "effective_rank", "collapsed")
    }
    assert "consistency/theta_distance" in read(configure(m=0.9, dictionary={"kind": "in-batch"}), 2)


def test_few_samples_take_the_ages_in_turn() -> None:
    config = configure(consistency={"every_steps": 1, "samples": 16})
    model, stream = trained(config, 10)
    made: list[int] = []
    at = stream.at
    stream.at = lambda step: made.append(step) or at(step)  # type: ignore[method-assign, func-returns-value]
    seen: set[int] = set()
    for every in (1, 2, 3, 4):  # as if this were the 10th, 5th, 3rd and 2nd reading
        made.clear()
        ages = by_age(
            consistency.read(
                model, stream, 10, configure(consistency={"every_steps": every, "samples": 16}), nullcontext
            )
        )
        assert len(made) == 2 and len(ages) == 2 and 1 in ages  # the last batch, and one old one
        seen |= set(ages)
    assert len(seen) > 2


@pytest.mark.parametrize("kind", ["queue", "bank"])
def test_a_reading_changes_nothing(kind: str) -> None:
    bn = {"bn": "shuffle" if kind == "queue" else "split", "bn_splits": 4}
    config = configure(m=0.9 if kind == "queue" else None, dictionary={"kind": kind, "K": 64}, encoder=bn)
    model, stream = trained(config, 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    first = consistency.read(model, stream, 5, config, nullcontext)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and model.training
    assert consistency.read(model, stream, 5, config, nullcontext) == first


def test_theta_distance_is_that_of_the_parameters_alone() -> None:
    config = configure(m=1.0)
    model, stream = trained(config, 1)
    for f_q, f_k in zip(model.f_q.parameters(), model.f_k.parameters(), strict=True):
        f_k.data.copy_(f_q.detach() * 0.75)
    model.f_k.backbone.bn1.running_mean.fill_(100)
    reading = consistency.read(model, stream, 1, config, nullcontext)
    assert reading["consistency/theta_distance"] == pytest.approx(0.25, rel=1e-5)


def test_embedding_figures_on_vectors_whose_answers_are_known() -> None:
    q = torch.eye(8)
    figures = consistency._embedding(q, q.roll(1, 0))
    assert figures["effective_rank"] == pytest.approx(8, rel=1e-5)
    assert figures["alignment"] == pytest.approx(2)
    assert figures["uniformity"] == pytest.approx(-4)  # every pair at distance² 2
    assert figures["collapsed"] == 0
    random = F.normalize(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    pairs = torch.stack([(a - b).square().sum() for i, a in enumerate(random) for b in random[:i]])
    figures = consistency._embedding(random, random)
    assert figures["alignment"] == 0
    assert figures["uniformity"] == pytest.approx((-2 * pairs).exp().mean().log().item(), rel=1e-4)
    assert 12 < figures["effective_rank"] <= 16 and figures["collapsed"] == 0


@pytest.mark.parametrize("signs", [False, True], ids=["one point", "one line"])
def test_a_collapsed_embedding_is_called_so(signs: bool) -> None:
    q = F.normalize(torch.randn(1, 16), dim=1).repeat(32, 1)
    if signs:
        q[::2] *= -1  # mean cosine near 0, but rank 1
    figures = consistency._embedding(q, q)
    assert figures["effective_rank"] == pytest.approx(1, abs=0.05) and figures["collapsed"] == 1
    near = F.normalize(q.abs() + 0.02 * torch.randn(32, 16), dim=1)  # full rank, but all but one point
    assert consistency._embedding(near, near)["collapsed"] == 1
    apart = F.normalize(q.abs() + 0.2 * torch.randn(32, 16), dim=1)
    assert consistency._embedding(apart, apart)["collapsed"] == 0


def test_ages_are_spread_in_equal_ratios_over_the_reach() -> None:
    assert consistency.ages(256) == (1, 4, 16, 64, 256)
    assert consistency.ages(16) == (1, 2, 4, 8, 16)
    assert consistency.ages(2) == (1, 2)
    assert consistency.ages(1) == (1,)


@pytest.mark.parametrize("kind", ["queue", "bank", "in-batch"])
def test_a_diverged_encoder_has_no_reading_that_is_no_number(kind: str) -> None:
    K, m = (None if kind == "in-batch" else 96), (None if kind == "bank" else 0.9)
    config = configure(dictionary={"kind": kind, "K": K}, m=m)
    model, stream = trained(config, 3)
    with torch.no_grad():
        for parameter in model.f_q.parameters():
            parameter.fill_(torch.nan)
    reading = consistency.read(model, stream, 3, config, nullcontext)
    assert "consistency/effective_rank" not in reading and np.isfinite(list(reading.values())).all()
