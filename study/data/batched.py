"""Views on a GPU: each operation on the whole batch, with the parameters of each image.

Brightness, contrast and saturation are one kind of operation, so all images take their three of them together. Only the
turn of the hue comes in between, at one of four places: images are sorted by that place, and each place turns a slice.
"""

import torch
from torch import Tensor

from study.data import colour
from study.data.parameters import CONTRAST, HUE, SATURATION, Parameters
from study.data.resample import Resampling, blurring, resampling


def write(views: Tensor, images: Tensor, p: Parameters, grey_first: bool, mean: Tensor, scale: Tensor) -> None:
    """Fill ``views`` (B, size, size, 3) float32 with what ``p`` makes of ``images`` (n, 3, H, W) uint8.

    The arguments are those of :func:`study.data.kernel.write`.
    """
    with torch.inference_mode(), torch.autocast(images.device.type, enabled=False):  # many small calls: cheaper so
        _write(views, images, p, grey_first, mean, scale)


def _write(views: Tensor, images: Tensor, p: Parameters, grey_first: bool, mean: Tensor, scale: Tensor) -> None:
    n, size, device = len(views), views.shape[1], images.device
    colourless = p.grey if grey_first else p.hue == 0
    place = torch.where(colourless, 4, (p.order == HUE).int().argmax(1))  # (B,) 4: no turn, it would change nothing
    sorted_rows = torch.argsort(place, stable=True)
    edges = [0, *torch.bincount(place, minlength=5).cumsum(0).tolist()]
    table = _table(p)[sorted_rows].to(device, non_blocking=True)  # (B, columns): one copy to the device
    top, left, crop_height, crop_width, flip, hue, sigma, *factors = table.T
    height, width = images.shape[2:]
    down = resampling(top, crop_height, height, size, torch.zeros_like(flip))
    across = resampling(left, crop_width, width, size, flip)
    rows = sorted_rows.to(device, non_blocking=True)

    x = _resample(images.index_select(0, rows % len(images)), down, across)
    if grey_first:
        _grey(x, slice(edges[4], n))
    for i in range(4):
        if edges[i] < edges[i + 1]:
            turning = slice(edges[i], edges[i + 1])
            colour.turn_hue(x[:, turning], hue[turning])
        if i < 3:
            colour.blend(x, *factors[3 * i : 3 * i + 3])
    if not grey_first:
        _grey(x, p.grey[sorted_rows].nonzero()[:, 0].to(device, non_blocking=True))
        x = _blur(x, sigma, size)
    shift, factor = (column.view(3, 1, 1).to(device, non_blocking=True) for column in (mean, scale))
    x.sub_(shift).mul_(factor)
    views.index_copy_(0, rows, x.view(3, n, size, size).permute(1, 2, 3, 0))


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
