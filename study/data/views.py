"""Two views of each image: the paper's augmentation, batched, with parameters of its own for each image.

What torchvision does to one picture at a time is split in two: `sample` draws every parameter of a batch from one
generator, and `Augment.apply` applies them to the whole batch where it lies. Order (paper, Appendix A; code of the
authors): v1: crop, grey, jitter, flip, normalise; v2: crop, jitter, grey, blur, flip, normalise.

Unlike torchvision on PIL pictures, nothing is rounded to eight bits between the operations.
"""

import itertools
import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from study.config import Views

RATIO = (3 / 4, 4 / 3)
"""Aspect of a crop, width over height, uniform in its logarithm."""
ATTEMPTS = 10
"""Draws of a crop until one lies within the image; then the largest allowed centre crop (as torchvision)."""
BLUR_SIGMA = (0.1, 2.0)
BLUR_REACH = 6
"""Pixels to either side that a blur looks at: three times the largest sigma."""
LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in grey, torchvision's: they sum to 0.9999."""
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
ORDERS = torch.tensor(list(itertools.permutations(range(4))))


@dataclass(frozen=True)
class Parameters:
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

    def rows(self, index: Tensor) -> "Parameters":
        """The parameters of some of the images."""
        return Parameters(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


def sample(views: Views, n: int, height: int, width: int, generator: torch.Generator) -> Parameters:
    """Draw the parameters of ``n`` views of images of ``height`` × ``width`` pixels.

    Args:
        views: the recipe.
        n: number of images.
        height, width: of the source, pixels.
        generator: on the CPU: the same draws whatever device the images are on.
    """
    u = torch.rand(2 * ATTEMPTS + 12, n, generator=generator, dtype=torch.float64)
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


class Augment:
    """The augmentation of one recipe: uint8 (B, 3, H, W) → normalised (B, 3, size, size)."""

    def __init__(
        self,
        views: Views,
        size: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        dtype: torch.dtype,
    ) -> None:
        """Args: the recipe; height and width of a view; mean and SD per channel in 0..1; dtype of the result."""
        self.views, self.size, self.dtype = views, size, dtype
        self.mean = torch.tensor(mean).view(3, 1, 1)
        self.std = torch.tensor(std).view(3, 1, 1)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of each image, channels_last, on the images' device."""
        n, _, height, width = images.shape
        return self.apply(images, sample(self.views, n, height, width, generator))

    def apply(self, images: Tensor, p: Parameters) -> Tensor:
        """The views that ``p`` describes: (B, 3, H, W) uint8 → (B, 3, size, size)."""
        to_rows = interpolation(p.top, p.height, images.shape[2], self.size, p.flip & False)  # (B, size, H)
        to_columns = interpolation(p.left, p.width, images.shape[3], self.size, p.flip)  # (B, size, W)
        x = torch.einsum("byh,bchw,bxw->bcyx", to_rows, images.float() / 255, to_columns)
        if self.views.recipe == "v1":
            x = torch.where(_column(p.grey), _luma(x), x)
        x = _jitter(x, p)
        if self.views.recipe == "v2":
            x = torch.where(_column(p.grey), _luma(x), x)
            blur = blurring(p.sigma, self.size)  # (B, size, size)
            x = torch.einsum("byh,bchw,bxw->bcyx", blur, x, blur)
        return ((x - self.mean) / self.std).to(self.dtype, memory_format=torch.channels_last)


def interpolation(start: Tensor, length: Tensor, size_in: int, size_out: int, reverse: Tensor) -> Tensor:
    """Antialiased bilinear resampling of a stretch of pixels as a matrix, one an image.

    Args:
        start, length: (B,) the stretch, pixels of the source.
        size_in, size_out: pixels of the source, and of the view that the stretch fills.
        reverse: (B,) bool, mirror the view.

    Returns:
        (B, size_out, size_in) rows of weights that sum to 1; none lies outside the stretch.
    """
    start, length = _column(start).float(), _column(length).float()
    pixel = torch.arange(size_in)  # (size_in,)
    target = torch.arange(size_out).view(-1, 1)  # (size_out, 1)
    target = torch.where(_column(reverse)[:, 0], size_out - 1 - target, target)  # (B, size_out, 1)
    scale = length / size_out
    centre = start[:, 0] + scale[:, 0] * (target + 0.5)
    weight = (1 - (pixel + 0.5 - centre).abs() / scale[:, 0].clamp(min=1)).clamp(min=0)
    weight = weight * ((pixel >= start[:, 0]) & (pixel < start[:, 0] + length[:, 0]))
    return weight / weight.sum(-1, keepdim=True)


def blurring(sigma: Tensor, size: int) -> Tensor:
    """A Gaussian blur along one side as a matrix, one an image: (B,) → (B, size, size); edges are reflected."""
    offset = torch.arange(-BLUR_REACH, BLUR_REACH + 1)
    kernel = torch.exp(-0.5 * (offset / sigma.clamp(min=1e-3).view(-1, 1)) ** 2)
    kernel = kernel / kernel.sum(-1, keepdim=True)  # (B, 13)
    source = torch.arange(size).view(-1, 1) + offset  # (size, 13), beyond the edges
    source = (size - 1 - (size - 1 - source.abs()).abs()).expand(len(sigma), -1, -1)
    weight = kernel[:, None].expand(-1, size, -1)
    return torch.zeros(len(sigma), size, size).scatter_add_(2, source, weight)


def _jitter(x: Tensor, p: Parameters) -> Tensor:
    for stage in range(4):
        operation = _column(p.order[:, stage])
        blended = {
            BRIGHTNESS: (x * _column(p.brightness)),
            CONTRAST: torch.lerp(_luma(x).mean((1, 2, 3), keepdim=True), x, _column(p.contrast)),
            SATURATION: torch.lerp(_luma(x), x, _column(p.saturation)),
            HUE: _turn_hue(x, _column(p.hue)),
        }
        for name, result in blended.items():
            x = torch.where(operation == name, result.clamp(0, 1), x)
    return x


def _turn_hue(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of (B, 3, H, W) in 0..1 as torchvision does through HSV."""
    red, green, blue = x[:, 0:1], x[:, 1:2], x[:, 2:3]
    value, low = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    chroma = value - low
    safe = torch.where(chroma == 0, 1, chroma)
    hue = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    k = (torch.tensor([5.0, 3.0, 1.0]).view(3, 1, 1) + hue + 6 * turns) % 6
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)


def _luma(x: Tensor) -> Tensor:
    """Grey of (B, 3, H, W): (B, 1, H, W)."""
    return (x * torch.tensor(LUMA).view(3, 1, 1)).sum(1, keepdim=True)


def _column(values: Tensor) -> Tensor:
    """(B,) → (B, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)


def evaluation_view(
    images: Tensor,
    size: int,
    eval_crop: float,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    dtype: torch.dtype,
) -> Tensor:
    """The one view that is evaluated: shorter side resized to size / eval_crop, centre crop, normalised.

    Args:
        images: uint8 (B, 3, H, W).
        size: height and width of the view.
        eval_crop: side of the crop over the resized side; 224/256 in the paper.
        mean, std: per channel, in 0..1.
        dtype: of the result.

    Returns:
        (B, 3, size, size), channels_last, on the images' device.
    """
    height, width = images.shape[2:]
    shorter = round(size / eval_crop)
    resized = [int(shorter * side / min(height, width)) for side in (height, width)]
    x = images.float() / 255
    if resized != [height, width]:
        x = functional.interpolate(x, resized, mode="bilinear", antialias=True, align_corners=False)
    top, left = (round((side - size) / 2) for side in resized)
    x = x[:, :, top : top + size, left : left + size]
    shift = torch.tensor(mean, device=x.device).view(3, 1, 1)
    scale = torch.tensor(std, device=x.device).view(3, 1, 1)
    return ((x - shift) / scale).to(dtype, memory_format=torch.channels_last)
