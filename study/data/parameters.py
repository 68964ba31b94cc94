"""What is drawn for each view: the parameters of the paper's augmentation, all of a batch from one generator."""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from study.config.schema import Views

RATIO = (3 / 4, 4 / 3)
"""Aspect of a crop, width over height, uniform in its logarithm."""
ATTEMPTS = 10
"""Draws of a crop until one lies within the image; then the largest allowed centre crop (as torchvision)."""
BLUR_SIGMA = (0.1, 2.0)
BLUR_REACH = 6
"""Pixels to either side that a blur looks at: three times the largest sigma."""
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
ORDERS = torch.tensor(list(itertools.permutations(range(4))))


class Parameters(NamedTuple):
    """One row an image, on the CPU. Factors 1 and hue 0 leave an image as it is; so does sigma 0."""

    top: Tensor  # (B,) int64, pixels of the source
    left: Tensor  # (B,)
    height: Tensor  # (B,)
    width: Tensor  # (B,)
    flip: Tensor  # (B,) bool
    grey: Tensor  # (B,) bool
    order: Tensor  # (B, 4) int64: the operations BRIGHTNESS … HUE in the order in which they are applied
    brightness: Tensor  # (B,) float32
    contrast: Tensor  # (B,)
    saturation: Tensor  # (B,)
    hue: Tensor  # (B,) turns
    sigma: Tensor  # (B,) pixels of the view


def sample(views: Views, n: int, height: int, width: int, generator: torch.Generator, *, times: int = 1) -> Parameters:
    """Draw the parameters of ``n`` views of images of ``height`` × ``width`` pixels.

    Args:
        views: the recipe.
        n: number of images.
        height, width: of the source, pixels.
        generator: on the CPU: the same draws whatever device the images are on.
        times: draw so many times, one after the other: rows ``n`` … 2n − 1 are the second draw.
    """
    shape = (2 * ATTEMPTS + 12, n)
    u = torch.cat([torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(times)], 1)
    n *= times
    top, left, crop_height, crop_width = _crop(views.crop_min, height, width, u)
    flip, grey, jittered, order, brightness, contrast, saturation, hue, blurred, sigma = u[2 * ATTEMPTS + 2 :]
    v1 = views.recipe == "v1"
    jitter = torch.ones(n, dtype=torch.bool) if v1 else jittered < 0.8

    def factor(uniform: Tensor) -> Tensor:
        return torch.where(jitter, 0.6 + 0.8 * uniform, 1.0).float()

    return Parameters(
        top=top,
        left=left,
        height=crop_height,
        width=crop_width,
        flip=(flip < 0.5) & views.flip,
        grey=grey < 0.2,
        order=ORDERS[(order * len(ORDERS)).long()],
        brightness=factor(brightness),
        contrast=factor(contrast),
        saturation=factor(saturation),
        hue=torch.where(jitter, (2 * hue - 1) * (0.4 if v1 else 0.1), 0.0).float(),
        sigma=torch.where(
            (blurred < 0.5) & (not v1), BLUR_SIGMA[0] + (BLUR_SIGMA[1] - BLUR_SIGMA[0]) * sigma, 0.0
        ).float(),
    )


def _crop(crop_min: float, height: int, width: int, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RandomResizedCrop: the first of ten draws of area and aspect that fits; top, left, height, width (B,)."""
    low, high = (math.log(ratio) for ratio in RATIO)
    area = height * width * (crop_min + (1 - crop_min) * u[:ATTEMPTS])  # (10, B)
    aspect = torch.exp(low + (high - low) * u[ATTEMPTS : 2 * ATTEMPTS])
    w = torch.round(torch.sqrt(area * aspect)).long()
    h = torch.round(torch.sqrt(area / aspect)).long()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits.int().argmax(0, keepdim=True)  # argmax gives the first of equals
    ratio = min(max(width / height, RATIO[0]), RATIO[1])  # torchvision's fallback: the largest centre crop allowed
    h = torch.where(fits.any(0), h.gather(0, first)[0], min(height, round(width / ratio)))
    w = torch.where(fits.any(0), w.gather(0, first)[0], min(width, round(height * ratio)))
    place = u[2 * ATTEMPTS : 2 * ATTEMPTS + 2]
    top = torch.where(fits.any(0), (place[0] * (height - h + 1)).long(), (height - h) // 2)
    left = torch.where(fits.any(0), (place[1] * (width - w + 1)).long(), (width - w) // 2)
    return top, left, h, w
