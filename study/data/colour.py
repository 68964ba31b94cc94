"""Operations on colour, in place on planes x (3, n, P) in 0..1: red, green, blue of n images of P pixels.

Each equals torchvision's operation of the same parameters to rounding; none compares or selects pixel by pixel, which
costs a CPU several times what arithmetic does.
"""

import torch
from torch import Tensor

LUMA = torch.tensor([[0.2989, 0.587, 0.114]])


def luma(x: Tensor) -> Tensor:
    """Grey (n, P) with torchvision's weights of red, green and blue; they sum to 0.9999."""
    _, n, P = x.shape
    return (LUMA.to(x.device, non_blocking=True) @ x.view(3, n * P)).view(n, P)  # one pass over the planes


def blend(x: Tensor, image: Tensor, grey: Tensor, mean: Tensor) -> None:
    """Brightness, contrast and saturation: image · x + grey · luma(x) + mean · mean(luma(x)), kept in 0..1.

    Args:
        x: (3, n, P).
        image, grey, mean: (n,) weights: (factor, 0, 0) is brightness, (factor, 0, 1 − factor) contrast and
            (factor, 1 − factor, 0) saturation.
    """
    shade = luma(x)
    mean = mean * shade.mean(-1)
    shade.mul_(grey[:, None]).add_(mean[:, None])
    torch.addcmul(shade, x, image[:, None], out=x).clamp_(0, 1)


def turn_hue(x: Tensor, turns: Tensor) -> None:
    """Turn the hue: the closed form of going to HSV and back.

    With V = max, c = V − min, the hue in sixths of a turn lies 1 + (G + B − R − min) / c from red, towards green where
    G > B and towards blue otherwise. Red loses c · clamp(distance from red − 1, 0, 1) from V; green and blue likewise.

    Args:
        x: (3, n, P).
        turns: (n,).
    """
    red, green, blue = x
    value, low = torch.maximum(red, green), torch.minimum(red, green)
    torch.maximum(value, blue, out=value)
    torch.minimum(low, blue, out=low)
    chroma = value - low
    hue = (green + blue).sub_(low.add_(red)).div_(chroma.add_(1e-12)).add_(1)  # grey pixels: 0 / 1e-12
    hue.copysign_(green - blue).add_(6 * turns[:, None])
    hue.sub_(torch.div(hue, 6, out=low).floor_(), alpha=6)  # 0..6
    torch.sub(value, chroma, alpha=2, out=low)
    value.add_(chroma)
    torch.addcmul(low, chroma, torch.sub(hue, 3, out=red).abs_().clamp_(1, 2), out=red)
    torch.addcmul(value, chroma, torch.sub(hue, 2, out=green).abs_().clamp_(1, 2), value=-1, out=green)
    torch.addcmul(value, chroma, hue.sub_(4).abs_().clamp_(1, 2), value=-1, out=blue)
