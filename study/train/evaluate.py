"""What a frozen encoder's features are worth: weighted kNN and a fast linear probe, on features encoded once.

The paper's own protocol (Section 4.1), which trains the classifier on augmented views, is `study.train.probe`.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from study.config.schema import Config
from study.data.images import Images, Split, subset
from study.data.views import evaluation_view
from study.model.encoder import Encoder
from study.train.nearest import nearest

log = logging.getLogger(__name__)

ENCODE_BATCH = 512
FIT_BATCH = 8192  # images of a product in `fit_linear`: fits a CPU's cache


def evaluate(
    encoder: Encoder,
    images: Images,
    config: Config,
    device: torch.device,
    *,
    linear: bool,
    progress: Callable[[float], None] | None = None,
) -> dict[str, float]:
    """Top-1 on the test split, as a share; test labels are used to count hits and for nothing else.

    Args:
        encoder: f_q, on ``device``. It is read in eval mode and given back in the mode that it came in.
        images: the bank (and the linear probe's training set) is the run's training subset.
        config: ``data``, ``evaluation`` and ``precision`` are read.
        device: where to compute.
        linear: fit the fast linear probe too.
        progress: called with the share of the images encoded so far; what follows takes less than the encoding.

    Returns:
        ``knn`` on pooled features, ``knn_output`` on the unit outputs, ``linear`` if asked for; NaN from an encoder
        that gives anything but finite numbers, because a diverged run has no neighbours.

    Raises:
        RuntimeError: a parameter or a buffer of the encoder changed.
    """
    rows = subset(images.train.labels, config.data.train_images)
    total = len(rows) + len(images.test.labels)
    report = progress or (lambda share: None)
    with frozen(encoder):
        bank = encode(encoder, images, images.train, rows, config, device, lambda n: report(n / total))
        test = encode(
            encoder,
            images,
            images.test,
            np.arange(len(images.test.labels)),
            config,
            device,
            lambda n: report((len(rows) + n) / total),
        )
    classes, evaluation = len(images.classes), config.evaluation

    def top1(reference: Tensor, queries: Tensor, predict: Callable[[Tensor, Tensor], Tensor]) -> float:
        if not (reference.isfinite().all() and queries.isfinite().all()):
            return math.nan
        return (predict(reference, queries) == test.labels).double().mean().item()

    def knn(reference: Tensor, queries: Tensor) -> Tensor:
        return knn_predict(reference, bank.labels, queries, classes, evaluation.knn_k, evaluation.knn_T)

    def regression(reference: Tensor, queries: Tensor) -> Tensor:
        weight, bias = fit_linear(reference, bank.labels, classes, evaluation.linear_epochs)
        return torch.addmm(bias, queries, weight).argmax(1)

    readings = {
        "knn": top1(bank.features, test.features, knn),
        "knn_output": top1(bank.outputs, test.outputs, knn),
    }
    if linear:
        readings["linear"] = top1(bank.features, test.features, regression)
    return readings


@contextmanager
def frozen(encoder: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; on leaving, the modes as they were and proof that nothing was written.

    Raises:
        RuntimeError: on leaving, if any parameter or buffer differs by a bit, as BN's buffers do in train mode.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    encoder.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
    changed = [name for name, tensor in encoder.state_dict().items() if not _same_bits(tensor, before[name])]
    if changed:
        raise RuntimeError(f"the encoder is not frozen: {len(changed)} tensors changed, the first is {changed[0]}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))  # NaN equals itself here


@dataclass(frozen=True)
class Encoded:
    """What one pass over n images gives: float32 on the device."""

    features: Tensor  # (n, C), after global pooling
    outputs: Tensor  # (n, dim), unit vectors
    labels: Tensor  # (n,)


def encode(
    encoder: Encoder,
    images: Images,
    split: Split,
    rows: np.ndarray,
    config: Config,
    device: torch.device,
    done: Callable[[int], None] = lambda n: None,
) -> Encoded:
    """Pooled features and outputs of ``split``'s ``rows``, from one forward pass over their evaluation views.

    Args:
        encoder: in eval mode.
        rows: positions (n,) in the split.
        done: called after every batch with the number of images encoded.
    """
    bf16 = config.precision == "bf16"
    features, outputs = [], []
    for start in range(0, len(rows), ENCODE_BATCH):
        batch = torch.from_numpy(split.images[rows[start : start + ENCODE_BATCH]]).to(device)  # (B, 3, H, W)
        x = evaluation_view(
            batch,
            config.data.size,
            config.data.eval_crop,
            images.mean,
            images.std,
            torch.bfloat16 if bf16 else torch.float32,
        )
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            pooled = encoder.features(x)  # (B, C)
            output = F.normalize(encoder.head(pooled).float(), dim=1)  # (B, dim), as in Encoder.forward
        features.append(pooled)
        outputs.append(output)
        done(start + len(batch))
    return Encoded(torch.cat(features), torch.cat(outputs), torch.from_numpy(split.labels[rows]).to(device))


# ------------------------------------------------------------------------------------------------------ kNN


def knn_predict(bank: Tensor, labels: Tensor, queries: Tensor, classes: int, k: int, T: float) -> Tensor:
    """The class with the largest sum of exp(cosine / T) among the k nearest of the bank (Wu et al. 2018, Section 3.4).

    Args:
        bank: (n, C). labels: (n,). queries: (m, C); neither needs unit length.
        k: neighbours; no more than n are taken, with a warning.
        T: temperature of the weights.

    Returns:
        Classes (m,). Equal on every repetition, on a GPU too: votes are summed as whole numbers.
    """
    if k > len(bank):
        log.warning("kNN: k = %d is more than the %d training images; k = %d is used", k, len(bank), len(bank))
        k = len(bank)
    columns = F.normalize(bank).T.contiguous()  # (C, n)
    similarities_at_once = 2**22 if bank.device.type == "cpu" else 2**28  # a CPU's cache, a GPU's memory
    predicted = []
    rows = max(1, similarities_at_once // len(bank))
    for start in range(0, len(queries), rows):
        chunk = F.normalize(queries[start : start + rows])
        cosine, index = nearest(chunk @ columns, k)  # (c, k)
        best = cosine.amax(1, keepdim=True)
        weight = ((cosine - best) / T).exp()  # relative to the nearest: the same vote, and no overflow
        votes = torch.zeros(len(chunk), classes, dtype=torch.int64, device=bank.device)
        votes.scatter_add_(1, labels[index], (weight.double() * 2**40).long())
        predicted.append(votes.argmax(1))
    return torch.cat(predicted)


# --------------------------------------------------------------------------------------- the fast linear probe


def fit_linear(features: Tensor, labels: Tensor, classes: int, passes: int) -> tuple[Tensor, Tensor]:
    """Softmax regression on features encoded once, by L-BFGS on the whole set: no randomness, bit-equal when repeated.

    It minimises the loss of the paper's protocol (cross-entropy, no weight decay), and so reaches what that would
    without augmentation. It differs in three ways: each image is seen as its centre crop only; features are
    standardised, which moves no optimum (the layer can undo it) but lets the solver converge; and the solver is
    L-BFGS with a strong-Wolfe line search from zero weights in place of SGD with lr 30, which is tuned to the size of
    one encoder's features. ``passes`` bounds its passes over the features, as epochs bound SGD's: after 100 the loss
    of a trained tiny encoder was 1 % above the optimum, and top-1 no longer moved beyond noise.

    Args:
        features: (n, C). labels: (n,). classes: number of classes.

    Returns:
        Weight (C, classes) and bias (classes,) for features as they came.
    """
    deviation, mean = torch.std_mean(features, 0, correction=0)
    scale = torch.where(deviation > 0, 1 / deviation, 0)  # a dead feature says nothing
    n, C = features.shape
    theta = features.new_zeros(classes, C + 1)  # the last column is the bias
    parts = []  # of the standardised features, a row of ones under them: (C + 1, rows); softmax over rows is slow
    target = torch.zeros_like(theta)  # sum of the features of each class: Σ log p(label) = ⟨θ, target⟩ − Σ log Z
    for start in range(0, n, FIT_BATCH):
        x = ((features[start : start + FIT_BATCH] - mean) * scale).T
        parts.append(torch.cat([x, x.new_ones(1, x.shape[1])]))
        target.addmm_(F.one_hot(labels[start : start + FIT_BATCH], classes).T.to(x.dtype), parts[-1].T)

    @torch.no_grad()
    def loss_and_gradient() -> Tensor:
        log_Z, gradient = theta.new_zeros(()), -target
        for x in parts:
            logits = theta @ x  # (classes, rows)
            z = logits.logsumexp(0)
            log_Z += z.sum()
            gradient.addmm_((logits - z).exp_(), x.T)
        theta.grad = gradient / n
        return (log_Z - (theta * target).sum()) / n

    solver = torch.optim.LBFGS(
        [theta], max_iter=passes, max_eval=passes, history_size=10, line_search_fn="strong_wolfe"
    )
    solver.step(loss_and_gradient)  # type: ignore[no-untyped-call]
    weight = theta[:, :-1].T * scale[:, None]
    return weight, theta[:, -1] - mean @ weight
