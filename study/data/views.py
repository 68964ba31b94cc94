"""Two views of each image: the paper's augmentation, with parameters of its own for each image.

What torchvision does to one picture at a time is split in two: `parameters.sample` draws every parameter of a batch
from one generator, and `Augment.apply` applies them, on a CPU picture by picture in compiled loops (`kernel`), on a GPU
to the whole batch at once (`batched`). Order (paper, Appendix A; code of the authors): v1: crop, grey, jitter, flip,
normalise; v2: crop, jitter, grey, blur, flip, normalise.

Unlike torchvision on PIL pictures, nothing is rounded to eight bits between the operations, and the blur is a Gaussian
of 13 taps where PIL approximates one by boxes.
"""

import torch
from torch import Tensor
from torch.nn import functional

from study.config.schema import Views
from study.data import batched
from study.data.parameters import Parameters, sample


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
        self.mean, self.scale = torch.tensor(mean), 1 / torch.tensor(std)

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
        """
        views = torch.empty(len(p.flip), self.size, self.size, 3, device=images.device)
        if images.device.type == "cpu":
            from study.data import kernel  # numba takes a third of a second to come, and a GPU has no use for it

            write = kernel.write
        else:
            write = batched.write
        write(views, images, p, self.views.recipe == "v1", self.mean, self.scale)
        return views.to(self.dtype).permute(0, 3, 1, 2)


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
