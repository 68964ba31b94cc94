"""Batches of a run: which images, in which order, and two views of each; a pure function of (seed, step)."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from study.config.schema import Config
from study.data.images import Images, subset
from study.data.views import Augment
from study.errors import UserError
from study.rng import generator


@dataclass(frozen=True)
class Batch:
    """The images of one step."""

    index: Tensor  # (B,) int64, rows of the training subset
    x_q: Tensor  # (B, 3, size, size)
    x_k: Tensor  # (B, 3, size, size)


class Stream:
    """All batches of a run. Nothing is carried from one to the next, so any of them can be made again at any time."""

    def __init__(self, images: Images, config: Config, device: torch.device | str) -> None:
        """
        Args:
            images: the data set; the training images after ``data.train_images`` are used.
            config: seed, data, views, optimiser, dictionary and precision (of the views) matter here.
            device: where the views are made.

        Raises:
            UserError: fewer images than a batch, or a short batch of the memory bank that BN cannot split.
        """
        self.device = torch.device(device)
        self.images = images
        """The data set, whole."""
        self._rows = subset(images.train.labels, config.data.train_images)
        self._seed, self._batch = config.seed, config.optimiser.batch
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._augment = Augment(config.views, config.data.size, images.mean, images.std, dtype)
        self.n = len(self._rows)
        """Training images, after the subset."""
        if self.n < self._batch:
            raise UserError(f"optimiser.batch = {self._batch}: allowed is at most {self.n}, the training images")
        self.steps_per_epoch = self.n // self._batch
        if config.dictionary.kind == "bank" and self.n % self._batch:
            _check_short_batch(config, self.n % self._batch)
            self.steps_per_epoch += 1  # every entry of the bank is refreshed once an epoch
        self.steps = self.steps_per_epoch * config.optimiser.epochs
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def _shuffle(self, epoch: int) -> Tensor:
        return torch.randperm(self.n, generator=generator(self._seed, "order", epoch))

    def index(self, step: int) -> Tensor:
        """Rows of the training subset in the batch of ``step``: (B,) int64, fewer in a bank's short batch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[position * self._batch : (position + 1) * self._batch]

    def at(self, step: int) -> Batch:
        """The batch of ``step``, equal whenever it is asked for."""
        index = self.index(step)
        pixels = torch.from_numpy(self.images.train.images[self._rows[index.numpy()]])  # (B, 3, H, W)
        if self.device.type == "cuda":
            pixels = pixels.pin_memory()
        pixels = pixels.to(self.device, non_blocking=True)
        x_q, x_k = self._augment.pairs(pixels, generator(self._seed, "views", step))
        return Batch(index.to(self.device, non_blocking=True), x_q, x_k)

    def batches(self, start: int, stop: int, *, prefetch: bool = True) -> Iterator[Batch]:
        """The batches of steps ``start`` … ``stop`` − 1.

        Args:
            prefetch: make the next batch in a thread while this one is used; the batches are the same.
        """
        if not prefetch:
            yield from map(self.at, range(start, stop))
            return
        with ThreadPoolExecutor(1, thread_name_prefix="views") as pool:
            following = pool.submit(self.at, start) if start < stop else None
            for step in range(start, stop):
                assert following is not None
                batch = following.result()
                if step + 1 < stop:
                    following = pool.submit(self.at, step + 1)
                yield batch


def _check_short_batch(config: Config, short: int) -> None:
    """A bank's last batch must go through the same micro-batches and BN splits as the others."""
    accumulate, splits = config.optimiser.accumulate, config.encoder.bn_splits
    if short % (accumulate * splits) or short // (accumulate * splits) < 2:
        raise UserError(
            f"data.train_images = {config.data.train_images}: the bank's last batch has {short} images; allowed is a"
            f" multiple of optimiser.accumulate × encoder.bn_splits = {accumulate * splits}, at least twice that"
        )
