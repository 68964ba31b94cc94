"""Two views of each image: the paper's augmentation, batched, with parameters of its own for each image.

What torchvision does to one picture at a time is split in two: `sample` draws every parameter of a batch from one
generator, and `Augment.apply` applies them to the whole batch where it lies. Order (paper, Appendix A; code of the
authors): v1: crop, grey, jitter, flip, normalise; v2: crop, jitter, grey, blur, flip, normalise.

Unlike torchvision on PIL pictures, nothing is rounded to eight bits between the operations, and the blur is a Gaussian
of 13 taps where PIL approximates one by boxes.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from study.config import Views
from study.data import colour
from study.data.resample import Resampling, blurring, resampling

RATIO = (3 / 4, 4 / 3)
"""Aspect of a crop, width over height, uniform in its logarithm."""
ATTEMPTS = 10
"""Draws of a crop until one lies within the image; then the largest allowed centre crop (as torchvision)."""
BLUR_SIGMA = (0.1, 2.0)
CACHED = 2**16
"""Pixels of a piece that the CPU works on at a time: a plane of colour takes 256 KiB."""
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
        self.mean, self.scale = torch.tensor(mean).view(3, 1, 1), 1 / torch.tensor(std).view(3, 1, 1)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of each image, channels_last, on the images' device."""
        n, _, height, width = images.shape
        return self.apply(images, sample(self.views, n, height, width, generator))

    def pairs(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Two views of each image, equal to those of two calls, in less time."""
        n, _, height, width = images.shape
        x_q, x_k = self.apply(images, sample(self.views, n, height, width, generator, times=2)).chunk(2)
        return x_q, x_k

    def apply(self, images: Tensor, p: Parameters) -> Tensor:
        """The views that ``p`` describes: (B, 3, H, W) uint8 → (B, 3, size, size), computed in fp32.

        With more rows in ``p`` than images, the images are taken again from the first.

        Brightness, contrast and saturation are one kind of operation, so all images take their three of them together.
        Only the turn of the hue comes in between, at one of four places: images are sorted by that place, and each
        place turns a slice. A piece of the batch goes through everything while it lies in the processor's cache.
        """
        n, device = len(p.flip), images.device
        views = torch.empty(n, self.size, self.size, 3, dtype=self.dtype, device=device)
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):  # many small calls: cheaper so
            self._write(views, images, p)
        return views.permute(0, 3, 1, 2)

    def _write(self, views: Tensor, images: Tensor, p: Parameters) -> None:
        """Fill ``views`` (B, size, size, 3)."""
        n, device, v1 = len(views), images.device, self.views.recipe == "v1"
        colourless = p.grey if v1 else p.hue == 0
        place = torch.where(colourless, 4, (p.order == HUE).int().argmax(1))  # (B,) 4: no turn, it would change nothing
        sorted_rows = torch.argsort(place, stable=True)
        edges = [0, *torch.bincount(place, minlength=5).cumsum(0).tolist()]
        table = _table(p)[sorted_rows].to(device, non_blocking=True)  # (B, columns): one copy to the device
        top, left, crop_height, crop_width, flip, hue, sigma, *factors = table.T
        height, width = images.shape[2:]
        down = resampling(top, crop_height, height, self.size, torch.zeros_like(flip))
        across = resampling(left, crop_width, width, self.size, flip)
        grey, rows = p.grey[sorted_rows], sorted_rows.to(device, non_blocking=True)
        mean, scale = self.mean.to(device, non_blocking=True), self.scale.to(device, non_blocking=True)
        length = n if device.type == "cuda" else max(1, CACHED // self.size**2)
        for start in range(0, n, length):
            piece = slice(start, min(start + length, n))

            def within(low: int, high: int, piece: slice = piece) -> slice:
                return slice(max(low - piece.start, 0), max(min(high, piece.stop) - piece.start, 0))

            x = _resample(images.index_select(0, rows[piece] % len(images)), down.of(piece), across.of(piece))
            if v1:
                _grey(x, within(edges[4], n))
            for i in range(4):
                turning = within(edges[i], edges[i + 1])
                if turning.stop > turning.start:
                    colour.turn_hue(x[:, turning], hue[piece][turning])
                if i < 3:
                    colour.blend(x, *(factor[piece] for factor in factors[3 * i : 3 * i + 3]))
            if not v1:
                _grey(x, grey[piece].nonzero()[:, 0].to(device, non_blocking=True))
                x = _blur(x, sigma[piece], self.size)
            x = x.sub_(mean).mul_(scale).to(self.dtype)  # first: a strided copy that also converts is slow
            x = x.view(3, -1, self.size, self.size).permute(1, 2, 3, 0).contiguous()
            views.index_copy_(0, rows[piece], x)


def _resample(images: Tensor, down: Resampling, across: Resampling) -> Tensor:
    """Crop, resize and flip: (n, 3, H, W) uint8 → planes of colour (3, n, size²) in 0..1."""
    n, _, height, width = images.shape
    size = down.centre.shape[1]
    to_rows, to_columns = down.matrix(height), across.matrix(width)  # (n, size, H), (n, size, W)
    wide = torch.bmm(images.float().view(n, 3 * height, width), to_columns.mT.div_(255))
    x = torch.empty(3, n, size, size, device=images.device)
    for channel, tall in enumerate(wide.view(n, 3, height, size).unbind(1)):
        torch.bmm(to_rows, tall, out=x[channel])
    return x.flatten(2)


def _blur(x: Tensor, sigma: Tensor, size: int) -> Tensor:
    blur = blurring(sigma, size)  # (n, size, size)
    planes = x.view(3, -1, size, size)
    return torch.stack([torch.bmm(torch.bmm(blur, plane), blur.mT) for plane in planes]).flatten(2)


def _grey(x: Tensor, rows: Tensor | slice) -> None:
    x[:, rows] = colour.luma(x[:, rows])


def _table(p: Parameters) -> Tensor:
    """What the device needs of the parameters, (B, 16): crop, flip, hue, sigma, then for each of the three blends
    the weights of the image, of its grey, and of the mean of its grey."""
    order = p.order[p.order != HUE].view(-1, 3)  # (B, 3)
    image = torch.stack((p.brightness, p.contrast, p.saturation), 1).gather(1, order)
    blends = torch.stack(
        (image, (order == SATURATION) * (1 - image), (order == CONTRAST) * (1 - image)), 2
    )  # (B, 3, 3)
    columns = (p.top, p.left, p.height, p.width, p.flip, p.hue, p.sigma)
    return torch.cat((torch.stack([column.float() for column in columns], 1), blends.flatten(1)), 1)


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
