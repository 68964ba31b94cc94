"""Batches: a pure function of seed and step; which images an epoch sees."""

import threading
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from study.config.schema import Config
from study.data.images import Images, Split, subset
from study.data.stream import Batch, Stream
from study.errors import UserError


def images(n: int = 100, size: int = 8) -> Images:
    """Image i has the value i everywhere, up to 255."""
    pixels = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, 3, size, size))
    split = Split(pixels, np.arange(n) % 4)
    return Images("made", split, split, ("a", "b", "c", "d"), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), "0")


def config(batch: int = 16, kind: str = "queue", seed: int = 0, **data: object) -> Config:
    return Config.model_validate(
        {
            "seed": seed,
            "data": {"name": "made", "size": 8, **data},
            "encoder": {"bn": "split", "bn_splits": 2},
            "dictionary": {"kind": kind, "K": 32},
            "optimiser": {"batch": batch, "epochs": 3},
        }
    )


def stream(n: int = 100, **options: object) -> Stream:
    return Stream(images(n), config(**options), "cpu")  # type: ignore[arg-type]


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("index", "x_q", "x_k"))


def test_a_batch_is_the_same_in_any_order_and_from_another_stream() -> None:
    one, other = stream(), stream()
    forwards = [one.at(step) for step in range(one.steps)]
    backwards = [other.at(step) for step in reversed(range(other.steps))][::-1]
    assert one.steps == 18 and all(map(equal, forwards, backwards))
    assert equal(one.at(7), forwards[7])  # after later epochs were drawn


@pytest.mark.parametrize("prefetch", [True, False])
def test_batches_resume_anywhere(prefetch: bool) -> None:
    whole = stream()
    resumed = list(stream().batches(5, 11, prefetch=prefetch))
    assert len(resumed) == 6 and all(equal(batch, whole.at(5 + i)) for i, batch in enumerate(resumed))
    assert not list(stream().batches(4, 4, prefetch=prefetch))


def test_prefetching_ends_with_its_consumer() -> None:
    before = threading.active_count()
    batches = stream().batches(0, 18)
    next(batches)
    batches.close()
    assert threading.active_count() == before


def test_an_error_while_prefetching_reaches_the_consumer() -> None:
    broken = stream()
    train = broken.images.train
    cut = Split(train.images[:1], train.labels)  # what a file that shrank would do
    broken.images = replace(broken.images, train=cut)
    with pytest.raises(IndexError):
        next(broken.batches(0, 2))


def test_steps_seeds_and_views_differ() -> None:
    one = stream()
    assert not torch.equal(one.index(0), one.index(1))
    assert not torch.equal(one.index(0), one.index(one.steps_per_epoch))  # the next epoch has another order
    assert not torch.equal(one.index(0), stream(seed=1).index(0))
    batch = one.at(0)
    assert not torch.equal(batch.x_q, batch.x_k)


def test_views_are_drawn_anew_at_each_step_and_for_each_seed() -> None:
    picture = np.arange(3 * 8 * 8, dtype=np.uint8).reshape(1, 3, 8, 8).repeat(16, 0)  # all alike: the order is not seen
    split = Split(picture, np.arange(16) % 4)
    alike = replace(images(), train=split, test=split)
    one, other = (Stream(alike, config(seed=seed), "cpu") for seed in (0, 1))
    views = [one.at(0).x_q, one.at(1).x_q, other.at(0).x_q, one.at(0).x_k]
    assert not any(torch.equal(a, b) for a, b in combinations(views, 2))


def test_autocast_around_it_changes_no_batch() -> None:
    one = stream()
    with torch.autocast("cpu", torch.bfloat16):
        inside = one.at(3)
    assert equal(inside, one.at(3))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(16, 120), batch=st.sampled_from([4, 8, 16]), epoch=st.integers(0, 2))
def test_an_epoch_sees_no_image_twice_and_drops_only_the_short_batch(n: int, batch: int, epoch: int) -> None:
    some = stream(n, batch=batch)
    steps = range(epoch * some.steps_per_epoch, (epoch + 1) * some.steps_per_epoch)
    seen = torch.cat([some.index(step) for step in steps])
    assert len(seen) == n - n % batch == len(seen.unique())
    assert seen.min() >= 0 and seen.max() < n


def test_the_bank_keeps_the_short_batch() -> None:
    bank = stream(100, kind="bank")
    assert bank.steps_per_epoch == 7
    batches = [bank.at(step) for step in range(7)]
    assert [len(batch.x_q) for batch in batches] == [16] * 6 + [4]
    assert torch.equal(torch.cat([batch.index for batch in batches]).sort().values, torch.arange(100))
    assert stream(96, kind="bank").steps_per_epoch == 6


@pytest.mark.parametrize("n", [97, 98, 99])
def test_a_short_batch_that_bn_cannot_split_is_refused_before_training(n: int) -> None:
    with pytest.raises(UserError, match=rf"last batch has {n % 16} images; allowed is a multiple of .* 2"):
        stream(n, kind="bank")
    assert stream(n).steps_per_epoch == 6  # the queue drops it


def test_fewer_images_than_a_batch_are_refused() -> None:
    with pytest.raises(UserError, match=r"optimiser\.batch = 16: allowed is at most 10"):
        stream(10)


def test_rows_count_within_the_subset_and_the_pixels_are_theirs() -> None:
    some = stream(100, train_images=40)
    rows = subset(images(100).train.labels, 40)
    assert some.n == 40
    for batch in some.batches(0, some.steps):
        assert batch.index.max() < 40
        # images of one value: only brightness changes them, and it goes down to 0.6 and up to 1.4, clamped at 1
        value = torch.from_numpy(rows)[batch.index] / 255
        for view in (batch.x_q, batch.x_k):
            ratio = view.mean((1, 2, 3)) / value.clamp(min=1e-6)
            assert ((ratio > 0.59) & (ratio < 1.41) | (value == 0)).all()
