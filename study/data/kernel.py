"""Views on a CPU: one picture after the other goes through all operations while it lies in the processor's cache.

The same views as those of :mod:`study.data.batched`, to rounding, in a quarter of the time: a batched operation reads
and writes the whole batch, and there are some forty of them.
"""

import math
from typing import Any

import numpy as np
from torch import Tensor

from study.data.loops import compiled, kept, share
from study.data.parameters import BLUR_REACH, BRIGHTNESS, CONTRAST, SATURATION, Parameters

Floats = np.ndarray[Any, np.dtype[np.float32]]

ZERO, ONE, TWO, THREE, FOUR, SIX, TINY, LEVEL = (np.float32(x) for x in (0, 1, 2, 3, 4, 6, 1e-12, 1 / 255))
RED, GREEN, BLUE = (np.float32(x) for x in (0.2989, 0.587, 0.114))
"""Torchvision's weights of grey."""


def write(views: Tensor, images: Tensor, p: Parameters, grey_first: bool, mean: Tensor, scale: Tensor) -> None:
    """Fill ``views`` (B, size, size, 3) float32 with what ``p`` makes of ``images`` (n, 3, H, W) uint8.

    As many threads as torch has share the rows; the views do not depend on their number.

    Args:
        views: with more rows than images, the images are taken again from the first.
        images: the pictures.
        p: a row a view.
        grey_first: grey before the jitter (v1) or behind it (v2).
        mean, scale: per channel: a value x becomes (x − mean) · scale.
    """
    B, size, _, _ = views.shape
    taps_down, taps_across = (2 * math.ceil(max(1.0, side / size)) for side in images.shape[2:])
    rows = Parameters._make(column.contiguous().numpy() for column in p)
    images = images.contiguous()

    def part(start: int, stop: int) -> None:
        _write(
            start,
            stop,
            views.numpy(),
            images.numpy(),
            rows,
            grey_first,
            mean.numpy(),
            scale.numpy(),
            taps_down,
            taps_across,
        )

    share(part, B)


@kept
def _write(
    start: int,
    stop: int,
    views: Floats,
    images: np.ndarray,
    p: Any,
    grey_first: bool,
    mean: Floats,
    scale: Floats,
    taps_down: int,
    taps_across: int,
) -> None:
    """Views ``start`` … ``stop`` − 1."""
    size, (_, _, H, W) = views.shape[1], images.shape
    down, across = np.empty((taps_down, size), np.float32), np.empty((taps_across, size), np.float32)
    row, column = np.empty(size, np.uint32), np.empty(size, np.uint32)  # no sign: nothing is counted from the end
    line = np.empty(max(W + taps_across, size + 2 * BLUR_REACH), np.float32)
    x, wide = np.empty((3, size * size), np.float32), np.zeros((max(H, size) + taps_down, size), np.float32)
    mean_red, mean_green, mean_blue = mean
    scale_red, scale_green, scale_blue = scale
    for i in range(start, stop):
        top, left, height, width = p.top[i], p.left[i], p.height[i], p.width[i]
        _stretch(height, False, down, row)
        _stretch(width, p.flip[i], across, column)
        crop = images[i % len(images), :, top : top + height, left : left + width]
        _resample(crop, across, column, down, row, line, wide, x)
        red, green, blue = x[0], x[1], x[2]
        if grey_first and p.grey[i]:
            _grey(red, green, blue)
        for operation in p.order[i]:
            if operation == BRIGHTNESS:
                _blend(red, green, blue, p.brightness[i], ZERO, ZERO)
            elif operation == CONTRAST:
                _blend(red, green, blue, p.contrast[i], ZERO, ONE - p.contrast[i])
            elif operation == SATURATION:
                _blend(red, green, blue, p.saturation[i], ONE - p.saturation[i], ZERO)
            elif p.hue[i] != ZERO and not (grey_first and p.grey[i]):
                _turn_hue(red, green, blue, p.hue[i])
        if p.grey[i] and not grey_first:
            _grey(red, green, blue)
        if p.sigma[i] > ZERO:
            for c in range(3):
                _blur(x[c].reshape(size, size), p.sigma[i], line, wide[:size])
        view = views[i].reshape(3 * size * size)
        for j in range(size * size):
            view[3 * j] = (red[j] - mean_red) * scale_red
            view[3 * j + 1] = (green[j] - mean_green) * scale_green
            view[3 * j + 2] = (blue[j] - mean_blue) * scale_blue


@compiled
def _stretch(length: int, mirrored: bool, weight: Floats, first: np.ndarray) -> None:
    """What antialiased bilinear resampling makes of a stretch of pixels.

    Args:
        length: of the stretch, pixels of the source.
        mirrored: the view shows it the other way round.
        weight: (taps, size), to be filled: each pixel of the view is a weighted sum of so many of the source.
        first: (size,), to be filled: the first of these, from the start.
    """
    taps, size = weight.shape
    reach = max(1.0, length / size)
    for i in range(size):
        centre = (i + 0.5) * length / size
        low = max(math.ceil(centre - reach - 0.5), 0)
        high = min(math.floor(centre + reach - 0.5), length - 1)
        j, total = size - 1 - i if mirrored else i, 0.0
        for t in range(taps):
            distance = abs(low + t + 0.5 - centre)
            w = max(0.0, 1.0 - distance / reach) if low + t <= high else 0.0
            weight[t, j] = w
            total += w
        for t in range(taps):
            weight[t, j] /= total
        first[j] = low


@compiled
def _resample(
    crop: np.ndarray,
    across: Floats,
    column: np.ndarray,
    down: Floats,
    row: np.ndarray,
    line: Floats,
    wide: Floats,
    x: Floats,
) -> None:
    """Resize and flip: uint8 ``crop`` (3, h, w) → planes ``x`` (3, size²) in 0..1; ``line`` and ``wide`` are scratch.

    Taps by twos: an enlarged crop has no more, and this is the inner loop. A tap beyond the crop has weight 0, and
    meets a number that is there.
    """
    size, (_, height, width) = len(row), crop.shape
    line[width : width + len(across)] = ZERO
    for c in range(3):
        for y in range(height):  # each row of the crop becomes as wide as the view
            source, out = crop[c, y], wide[y]
            for j in range(width):
                line[j] = LEVEL * np.float32(source[j])
            out[:] = ZERO
            for t in range(0, len(across), 2):
                one, two, w_one, w_two = line[t:], line[t + 1 :], across[t], across[t + 1]
                for j in range(size):
                    out[j] += w_one[j] * one[column[j]] + w_two[j] * two[column[j]]
        for i in range(size):
            out = x[c, i * size : (i + 1) * size]
            out[:] = ZERO
            for t in range(0, len(down), 2):
                one, two, w_one, w_two = wide[row[i] + t], wide[row[i] + t + 1], down[t, i], down[t + 1, i]
                for j in range(size):
                    out[j] += w_one * one[j] + w_two * two[j]


@compiled
def _within(value: np.float32, low: np.float32, high: np.float32) -> np.float32:
    return min(max(value, low), high)


@compiled
def _grey(red: Floats, green: Floats, blue: Floats) -> None:
    for i in range(len(red)):
        grey = RED * red[i] + GREEN * green[i] + BLUE * blue[i]
        red[i] = green[i] = blue[i] = grey


@compiled
def _blend(red: Floats, green: Floats, blue: Floats, image: np.float32, grey: np.float32, mean: np.float32) -> None:
    """image · x + grey · luma(x) + mean · mean(luma(x)), kept in 0..1: (factor, 0, 0) is brightness, (factor, 0,
    1 − factor) contrast and (factor, 1 − factor, 0) saturation."""
    shade = ZERO
    if mean != ZERO:
        for i in range(len(red)):
            shade += RED * red[i] + GREEN * green[i] + BLUE * blue[i]
        shade *= mean / np.float32(len(red))
    for i in range(len(red)):
        other = grey * (RED * red[i] + GREEN * green[i] + BLUE * blue[i]) + shade
        red[i] = _within(image * red[i] + other, ZERO, ONE)
        green[i] = _within(image * green[i] + other, ZERO, ONE)
        blue[i] = _within(image * blue[i] + other, ZERO, ONE)


@compiled
def _turn_hue(red: Floats, green: Floats, blue: Floats, turns: np.float32) -> None:
    """Turn the hue, as :func:`study.data.colour.turn_hue` does and explains."""
    for i in range(len(red)):
        r, g, b = red[i], green[i], blue[i]
        value, low = max(r, g, b), min(r, g, b)
        chroma = value - low
        hue = math.copysign(ONE + (g + b - r - low) / (chroma + TINY), g - b) + SIX * turns
        hue -= SIX * np.floor(hue / SIX)  # 0..6
        base, top = value - TWO * chroma, value + chroma
        red[i] = base + chroma * _within(abs(hue - THREE), ONE, TWO)
        green[i] = top - chroma * _within(abs(hue - TWO), ONE, TWO)
        blue[i] = top - chroma * _within(abs(hue - FOUR), ONE, TWO)


@compiled
def _blur(x: Floats, sigma: np.float32, line: Floats, tall: Floats) -> None:
    """A Gaussian of 13 taps along both sides of ``x`` (size, size), edges reflected; the others are scratch."""
    size = len(x)
    weight = np.empty(2 * BLUR_REACH + 1, np.float32)
    for t in range(len(weight)):
        weight[t] = math.exp(-0.5 * ((t - BLUR_REACH) / sigma) ** 2)
    weight /= weight.sum()
    tall[:] = ZERO
    for i in range(size):
        for t in range(len(weight)):
            source, w = x[_reflected(i + t - BLUR_REACH, size)], weight[t]
            for j in range(size):
                tall[i, j] += w * source[j]
    x[:] = ZERO
    for i in range(size):
        for j in range(size + 2 * BLUR_REACH):
            line[j] = tall[i, _reflected(j - BLUR_REACH, size)]
        for t in range(len(weight)):
            w = weight[t]
            for j in range(size):
                x[i, j] += w * line[j + t]


@compiled
def _reflected(place: int, size: int) -> int:
    return size - 1 - abs(size - 1 - abs(place))
