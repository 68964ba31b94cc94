"""Crop, resize, flip and blur as matrices, one an image: first along the rows of a picture, then along its columns."""

from typing import NamedTuple

import torch
from torch import Tensor

from study.data.parameters import BLUR_REACH


class Resampling(NamedTuple):
    """Antialiased bilinear resampling of a stretch of pixels, one an image; :meth:`matrix` makes it one."""

    centre: Tensor  # (B, size_out) where each pixel of the view lies, in pixels of the source
    reach: Tensor  # (B, 1) from that centre to where the weight ends
    outside: Tensor | None  # (B, size_in) inf beyond the stretch, 0 within it; None: centres see to it

    def matrix(self, size_in: int) -> Tensor:
        """(B, size_out, size_in): rows of weights that sum to 1; none lies outside the stretch."""
        pixel = torch.arange(size_in, device=self.centre.device) + 0.5  # centres
        distance = (pixel - self.centre[:, :, None]).abs_()  # (B, size_out, size_in)
        if self.outside is None:  # two pixels that sum to 1
            return distance.neg_().add_(1).clamp_(min=0)
        weight = distance.div_(self.reach[:, :, None]).add_(self.outside[:, None]).neg_().add_(1).clamp_(min=0)
        return weight.div_(weight.sum(-1, keepdim=True))  # a triangle, cut at the ends of the stretch


def resampling(start: Tensor, length: Tensor, size_in: int, size_out: int, reverse: Tensor) -> Resampling:
    """What resamples a stretch of pixels.

    Args:
        start, length: (B,) the stretch, pixels of the source.
        size_in, size_out: pixels of the source, and of the view that the stretch fills.
        reverse: (B,) 1 mirrors the view, 0 does not.
    """
    start, length, reverse = start[:, None], length[:, None], reverse[:, None]  # (B, 1)
    target = torch.arange(size_out, device=start.device) + 0.5
    centre = start + length / size_out * torch.lerp(target, size_out - target, reverse)  # (B, size_out)
    reach = (length / size_out).clamp(min=1)
    if size_in <= size_out:  # never wider than a pixel: beyond the centre of the last one, that one alone
        return Resampling(torch.clamp(centre, start + 0.5, start + length - 0.5), reach, None)
    pixel = torch.arange(size_in, device=start.device) + 0.5
    return Resampling(centre, reach, torch.where((pixel > start) & (pixel < start + length), 0.0, torch.inf))


def blurring(sigma: Tensor, size: int) -> Tensor:
    """A Gaussian blur along one side as a matrix, one an image: (B,) → (B, size, size); edges are reflected."""
    offset = torch.arange(-BLUR_REACH, BLUR_REACH + 1, device=sigma.device)
    kernel = torch.exp(-0.5 * (offset / sigma.clamp(min=1e-3).view(-1, 1)) ** 2)
    kernel = kernel / kernel.sum(-1, keepdim=True)  # (B, 13)
    source = torch.arange(size, device=sigma.device).view(-1, 1) + offset  # (size, 13), beyond the edges
    source = size - 1 - (size - 1 - source.abs()).abs()
    place = torch.eye(size, device=sigma.device)[source.T]  # (13, size, size)
    return (kernel @ place.flatten(1)).view(-1, size, size)
