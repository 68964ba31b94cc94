"""Views: every operation against torchvision's of the same parameters, every parameter against its distribution."""

import math

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tv
from scipy import stats
from torch import Tensor
from torchvision.transforms import CenterCrop, InterpolationMode, RandomResizedCrop, Resize

from study.config.schema import Views
from study.data import batched, kernel
from study.data.parameters import Parameters, sample
from study.data.views import Augment, evaluation_view

IDENTITY = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
TOLERANCE = 2e-5
"""In 0..1: a two-hundredth of a grey level."""


@pytest.fixture(params=["kernel", "batched"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views are made by the loops for CPUs, and by the operations for GPUs."""
    if request.param == "batched":
        monkeypatch.setattr(kernel, "write", batched.write)


def pictures(n: int, height: int, width: int) -> Tensor:
    """Smooth and noisy pictures, some grey, some black or white in places: uint8 (n, 3, H, W)."""
    random = torch.Generator().manual_seed(1)
    coarse = torch.rand(n, 3, 4, 4, generator=random) * 1.6 - 0.3
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    smooth[::3] += 0.3 * torch.randn(smooth[::3].shape, generator=random)
    smooth[1::8] = smooth[1::8, :1]
    return (smooth.clamp(0, 1) * 255).round().to(torch.uint8)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_torchvision(image: Tensor, p: Parameters, i: int, recipe: str, size: int) -> Tensor:
    """One picture (3, H, W) through torchvision's functions with row ``i`` of the parameters."""
    box = (int(p.top[i]), int(p.left[i]), int(p.height[i]), int(p.width[i]))
    x = tv.resized_crop(image.float() / 255, *box, [size, size], InterpolationMode.BILINEAR, antialias=True)
    adjust = [
        lambda x: tv.adjust_brightness(x, float(p.brightness[i])),
        lambda x: tv.adjust_contrast(x, float(p.contrast[i])),
        lambda x: tv.adjust_saturation(x, float(p.saturation[i])),
        lambda x: tv.adjust_hue(x, float(p.hue[i])),
    ]
    if recipe == "v1" and p.grey[i]:
        x = tv.rgb_to_grayscale(x, 3)
    for operation in p.order[i].tolist():
        x = adjust[operation](x)
    if recipe == "v2" and p.grey[i]:
        x = tv.rgb_to_grayscale(x, 3)
    if p.sigma[i] > 0:
        x = tv.gaussian_blur(x, [13, 13], [float(p.sigma[i])] * 2)
    return tv.hflip(x) if p.flip[i] else x


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("recipe", ["v1", "v2"])
@pytest.mark.parametrize("source", [(32, 32), (28, 28), (60, 90), (24, 50)], ids=str)
def test_views_equal_torchvision_on_each_picture(recipe: str, source: tuple[int, int]) -> None:
    views = Views(recipe=recipe, crop_min=0.08)
    images = pictures(150, *source)
    p = sample(views, len(images), *source, generator())
    ours = Augment(views, 32, *IDENTITY, torch.float32).apply(images, p)
    theirs = torch.stack([by_torchvision(image, p, i, recipe, 32) for i, image in enumerate(images)])
    assert (ours - theirs).abs().max() < TOLERANCE
    assert len({tuple(order) for order in p.order.tolist()}) == 24  # every order of the jitter was seen


@pytest.mark.usefixtures("way")
def test_normalisation_and_result_dtype() -> None:
    images, mean, std = pictures(8, 32, 32), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    p = sample(Views(), 8, 32, 32, generator())
    plain = Augment(Views(), 32, *IDENTITY, torch.float32).apply(images, p)
    exact = (plain - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        views = Augment(Views(), 32, mean, std, dtype).apply(images, p)
        assert views.dtype == dtype and views.is_contiguous(memory_format=torch.channels_last)
        assert ((views.float() - exact).abs() <= tolerance * (1 + exact.abs())).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("recipe", ["v1", "v2"])
def test_a_view_depends_on_its_own_image_and_parameters_alone(recipe: str) -> None:
    views = Views(recipe=recipe)
    images = pictures(300, 32, 32)
    p = sample(views, 300, 32, 32, generator())
    augment = Augment(views, 32, *IDENTITY, torch.float32)
    some = torch.tensor([299, 4, 150])
    few = Parameters._make(column[some] for column in p)
    assert torch.allclose(augment.apply(images, p)[some], augment.apply(images[some], few), atol=1e-6)


def test_a_view_has_the_same_bits_whatever_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    augment, images = Augment(Views(recipe="v2"), 32, *IDENTITY, torch.float32), pictures(25, 40, 32)
    alone = augment(images, generator())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(augment(images, generator()), alone)


@pytest.mark.usefixtures("way")
def test_images_are_not_written_to() -> None:
    images = pictures(16, 32, 32)
    before = images.clone()
    Augment(Views(), 32, *IDENTITY, torch.float32)(images, generator())
    assert torch.equal(images, before)


def test_the_generator_alone_decides_and_moves_on() -> None:
    augment, images, random = Augment(Views(), 32, *IDENTITY, torch.float32), pictures(8, 32, 32), generator()
    first, second = augment(images, random), augment(images, random)
    assert torch.equal(first, augment(images, generator()))
    assert not torch.equal(first, second)


# ---------------------------------------------------------------------------------------------------- distributions

N = 20_000


def uniform(values: Tensor, low: float, high: float) -> bool:
    return stats.kstest(values.double().numpy(), stats.uniform(low, high - low).cdf).pvalue > 1e-3


def share(flags: Tensor, p: float) -> bool:
    return abs(flags.float().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / len(flags))


def test_crop_area_aspect_and_place() -> None:
    side = 1000  # large: rounding to pixels does not show
    p = sample(Views(crop_min=0.2), N, side, side, generator())
    area, aspect = p.height * p.width / side**2, torch.log(p.width / p.height)
    always_fits = area < 0.75  # whatever the aspect
    assert uniform(area[always_fits], 0.2, 0.75)
    assert uniform(aspect[always_fits], math.log(3 / 4), math.log(4 / 3))
    theirs = np.array(
        [RandomResizedCrop.get_params(torch.empty(3, side, side), [0.2, 1], [3 / 4, 4 / 3]) for _ in range(2000)]
    )
    for ours, column in ((p.top, 0), (p.left, 1), (p.height, 2), (p.width, 3)):
        assert stats.ks_2samp(ours.numpy(), theirs[:, column]).pvalue > 1e-3
    assert (p.top >= 0).all() and (p.top + p.height <= side).all()
    assert (p.left >= 0).all() and (p.left + p.width <= side).all()
    small = sample(Views(crop_min=0.2), N, 4, 4, generator())
    square = (small.height == 3) & (small.width == 3)
    assert share(small.top[square] == 1, 0.5)  # the last place is as likely as the first


@pytest.mark.parametrize("source", [(10, 100), (100, 10), (20, 20)], ids=str)
def test_crop_that_never_fits_falls_back_like_torchvision(source: tuple[int, int]) -> None:
    p = sample(Views(crop_min=1), 50, *source, generator())
    theirs = RandomResizedCrop.get_params(torch.empty(3, *source), [1, 1], [3 / 4, 4 / 3])
    whole = min(source) < max(source)  # the square may also fit by chance
    rows = torch.stack((p.top, p.left, p.height, p.width), 1)
    assert (rows == torch.tensor(theirs)).all() if whole else (rows[:, 2:] <= 20).all()


def test_v1_jitters_always() -> None:
    p = sample(Views(), N, 32, 32, generator())
    for factor in (p.brightness, p.contrast, p.saturation):
        assert uniform(factor, 0.6, 1.4)
    assert uniform(p.hue, -0.4, 0.4)
    assert share(p.grey, 0.2) and share(p.flip, 0.5) and not p.sigma.any()
    assert not sample(Views(flip=False), N, 32, 32, generator()).flip.any()


def test_v2_jitters_four_times_in_five_and_blurs_every_other() -> None:
    p = sample(Views(recipe="v2"), N, 32, 32, generator())
    jittered = p.hue != 0
    assert share(jittered, 0.8) and share(p.grey, 0.2) and share(p.sigma > 0, 0.5)
    assert uniform(p.hue[jittered], -0.1, 0.1)
    assert uniform(p.sigma[p.sigma > 0], 0.1, 2.0)
    for factor in (p.brightness, p.contrast, p.saturation):
        assert uniform(factor[jittered], 0.6, 1.4) and (factor[~jittered] == 1).all()


def test_each_order_of_the_jitter_is_as_likely_as_the_others() -> None:
    order = sample(Views(), N, 32, 32, generator()).order
    counts = torch.unique(order, dim=0, return_counts=True)[1]
    assert len(counts) == 24 and stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_parameters_are_independent() -> None:
    p = sample(Views(recipe="v2"), N, 200, 200, generator())
    jittered = p.hue != 0
    columns = (p.height * p.width, p.flip, p.grey, p.brightness, p.contrast, p.saturation, p.hue, p.sigma > 0)
    table = torch.stack([column.double()[jittered] for column in columns], 1)
    first = torch.nn.functional.one_hot(p.order[jittered, 0], 4).double()
    correlation = torch.corrcoef(torch.cat((table, first[:, :3]), 1).T)[:8] - torch.eye(8, 11)
    assert correlation.abs().max() < 0.04


# ------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(("source", "crop"), [((32, 32), 1.0), ((28, 28), 1.0), ((100, 150), 0.875), ((61, 40), 0.875)])
def test_evaluation_view_equals_torchvision(source: tuple[int, int], crop: float) -> None:
    images = pictures(5, *source)
    ours = evaluation_view(images, 32, crop, *IDENTITY, torch.float32)
    theirs = CenterCrop(32)(Resize(round(32 / crop), antialias=True)(images.float() / 255))
    assert ours.shape == (5, 3, 32, 32) and (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("recipe", ["v1", "v2"])
def test_pairs_equal_two_calls(recipe: str) -> None:
    augment, images, random = (
        Augment(Views(recipe=recipe), 24, *IDENTITY, torch.float32),
        pictures(70, 32, 28),
        generator(),
    )
    one, two = augment(images, random), augment(images, random)
    x_q, x_k = augment.pairs(images, generator())
    assert torch.allclose(x_q, one, atol=1e-6) and torch.allclose(x_k, two, atol=1e-6)
    assert x_q.is_contiguous(memory_format=torch.channels_last) and x_k.is_contiguous(memory_format=torch.channels_last)
