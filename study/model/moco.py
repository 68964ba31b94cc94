"""MoCo: Algorithm 1 of He et al. 2019, in its order and with its letters.

A step of the trainer is: :meth:`MoCo.update_key_encoder`, :meth:`MoCo.forward` (once a micro-batch), backward, SGD on
f_q, :meth:`MoCo.store`. The paper writes the momentum update behind the SGD update; between two steps that is the
same place, and it is done before the first step too, where both encoders are equal.
"""

import copy
import warnings
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from study.config.schema import Config
from study.model import dictionary, encoder
from study.model.norm import shuffle, unshuffle
from study.rng import generator as counter_based


class Output(NamedTuple):
    """What one forward pass gives."""

    loss: Tensor  # ()
    accuracy: Tensor  # (): share of queries whose positive beats every negative
    keys: Tensor  # (B, D), or (2B, D) with the symmetric loss: what store() takes in; no gradient


class MoCo(nn.Module):
    """The query encoder f_q, the key encoder f_k (None where f_q encodes the keys) and the dictionary.

    Args:
        config: the run.
        n: number of training images, the rows of a memory bank.
    """

    def __init__(self, config: Config, n: int) -> None:
        super().__init__()
        self.m, self.T, self.symmetric = config.m, config.T, config.symmetric
        self.shuffled = config.encoder.bn == "shuffle"
        if self.shuffled and config.encoder.bn_splits == 1:
            warnings.warn("encoder.bn = shuffle with encoder.bn_splits = 1: the shuffle changes nothing", stacklevel=2)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(counter_based(config.seed, "encoder").initial_seed())
            self.f_q = encoder.build(config.encoder, config.data.size)
        self.f_k = copy.deepcopy(self.f_q).requires_grad_(False) if config.m is not None else None
        self.dictionary = dictionary.build(config, n)

    @torch.no_grad()
    def update_key_encoder(self) -> None:
        """θ_k ← m·θ_k + (1−m)·θ_q, in place and on parameters only: BN statistics are f_k's own (Equation 2).

        Called once an optimiser step, before its keys are encoded, so that m = 0 makes f_k equal f_q exactly.
        """
        if self.f_k is not None and self.m is not None:
            torch._foreach_lerp_(list(self.f_k.parameters()), list(self.f_q.parameters()), 1 - self.m)

    def forward(self, x_q: Tensor, x_k: Tensor, index: Tensor, generator: torch.Generator) -> Output:
        """Loss of one batch against the dictionary as it is before the batch's own keys enter it.

        Args:
            x_q: (B, 3, size, size), one view of each image.
            x_k: (B, 3, size, size), another view of each.
            index: (B,) rows of the images in the training set.
            generator: for the shuffle and the bank's draws.
        """
        if not self.symmetric:
            return self._contrast(x_q, x_k, index, generator)
        one = self._contrast(x_q, x_k, index, generator)
        two = self._contrast(x_k, x_q, index, generator)  # same dictionary: nothing is stored in between
        return Output((one.loss + two.loss) / 2, (one.accuracy + two.accuracy) / 2, torch.cat([one.keys, two.keys]))

    def _contrast(self, x_q: Tensor, x_k: Tensor, index: Tensor, generator: torch.Generator) -> Output:
        q = self.f_q(x_q)  # queries: B×D
        k = self._encode_keys(x_k, generator) if self.dictionary.fresh_keys else q.detach()  # keys: B×D
        loss, accuracy = self.dictionary.contrast(q, k, index, self.T, generator)
        return Output(loss, accuracy, k.detach())

    @torch.no_grad()
    def store(self, keys: Tensor, index: Tensor, step: int) -> None:
        """Enqueue the keys of a step, or refresh the bank by them; once an optimiser step, after it.

        Args:
            keys: (B, D): ``Output.keys``, those of several micro-batches concatenated.
            index: (B,) rows of their images in the training set.
            step: the optimiser step.
        """
        self.dictionary.store(keys, index, step)

    @torch.no_grad()
    def encode_keys(self, x_k: Tensor, generator: torch.Generator) -> Tensor:
        """Keys (B, D) of ``x_k`` (B, 3, size, size), without gradient: by f_k, or by f_q where that is None."""
        return self._encode_keys(x_k, generator)

    def _encode_keys(self, x_k: Tensor, generator: torch.Generator) -> Tensor:
        f_k = self.f_q if self.f_k is None else self.f_k
        # Only the end-to-end mechanism has gradients to its keys.
        with nullcontext() if self.f_k is None and isinstance(self.dictionary, dictionary.InBatch) else torch.no_grad():
            if not self.shuffled:
                return cast(Tensor, f_k(x_k))
            x, order = shuffle(x_k, generator)
            return unshuffle(f_k(x), order)
