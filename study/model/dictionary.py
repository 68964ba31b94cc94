"""The three dictionaries of Figure 2: where the keys that a query is compared with come from.

Each compares a batch of queries with its positives and negatives (:meth:`contrast`) and takes in the keys of the
batch afterwards (:meth:`store`). Stored keys are rows of unit length in fp32, written in place.
"""

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from study.config.schema import Config
from study.model.loss import infonce, infonce_in_batch
from study.rng import generator as counter_based


class Dictionary(nn.Module):
    """What MoCo asks of a dictionary."""

    fresh_keys = True
    """Whether the other view is encoded for it; otherwise the query is the key that it stores."""

    def contrast(
        self, q: Tensor, k: Tensor, index: Tensor, T: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """InfoNCE of queries ``q`` (B, D) whose own keys are ``k`` (B, D): the loss () and the accuracy ().

        Args:
            q: queries.
            k: keys of the same images.
            index: (B,) rows of the images in the training set.
            T: temperature.
            generator: for what is drawn.
        """
        raise NotImplementedError

    def store(self, keys: Tensor, index: Tensor, step: int) -> None:
        """Take in the ``keys`` (B, D) of optimiser step ``step``, of the images ``index`` (B,)."""
        raise NotImplementedError


class Queue(Dictionary):
    """MoCo's dictionary: the keys of the last batches, decoupled from the batch size (Section 3.2).

    A true ring: any batch and any K. Random unit vectors at the start, all of them replaced before any key is.

    Args:
        K: number of keys.
        dim: D.
        eviction: what a batch replaces once the queue is full: the ``oldest`` keys; the ``newest``, so that those
            of the first steps stay for ever; or distinct ones drawn at ``random``.
        seed: of the random start and of the random eviction.

    Buffers: ``queue`` (K, D); ``pointer`` (), the row that comes next; ``origin`` (K,), the step at which a row was
    written, −1 for the random start; ``position`` (K,), its place in that step's keys.
    """

    queue: Tensor
    pointer: Tensor
    origin: Tensor
    position: Tensor

    def __init__(self, K: int, dim: int, eviction: str, seed: int) -> None:
        super().__init__()
        self.K, self.eviction, self.seed = K, eviction, seed
        self.register_buffer("queue", _unit_vectors(K, dim, counter_based(seed, "queue")))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("origin", torch.full((K,), -1))
        self.register_buffer("position", torch.zeros(K, dtype=torch.int64))

    def contrast(
        self, q: Tensor, k: Tensor, index: Tensor, T: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return infonce(q, k, self.queue, T)

    @torch.no_grad()
    def store(self, keys: Tensor, index: Tensor, step: int) -> None:
        position = torch.arange(len(keys), device=keys.device)[-self.K :]  # of a batch above K the last K stay
        rows = self._rows(len(keys), step)
        self.queue[rows] = keys[position]
        self.origin[rows] = step
        self.position[rows] = position

    def _rows(self, B: int, step: int) -> Tensor:
        """Where a batch goes, min(B, K) distinct rows; moves the pointer."""
        K, device = self.K, self.pointer.device
        if self.eviction == "oldest":
            rows = (self.pointer + torch.arange(B, device=device)[-K:]) % K
            self.pointer.add_(B).remainder_(K)
        elif self.eviction == "newest":  # a stack: the batch fills what is free and else lands on its top
            B = min(B, K)
            rows = self.pointer.clamp_(max=K - B) + torch.arange(B, device=device)
            self.pointer.add_(B)
        else:
            draw = torch.rand(K, generator=counter_based(self.seed, "eviction", step)).to(device)
            rows = draw.masked_fill_(self.origin < 0, 2.0).topk(min(B, K)).indices  # the random start goes first
        return rows


class MemoryBank(Dictionary):
    """Wu et al. 2018: one stored key an image, refreshed when the image is seen (Figure 2b).

    Negatives are drawn uniformly with replacement from all entries; as in Wu et al. nothing is excluded, so that an
    image's own entry may be among its negatives.

    Args:
        n: number of images.
        K: negatives a query.
        dim: D.
        momentum: weight of the *old* entry when a key f refreshes it: v ← unit(momentum·v + (1 − momentum)·f).
        positive: ``bank``, the image's own entry; ``fresh``, its other view encoded now.
        negatives: ``shared``, one draw for the batch; ``per-query``, one for each query.
        seed: of the random start.

    Buffers: ``bank`` (n, D); ``origin`` (n,), the step at which an entry was refreshed last, −1 for the random
    start; ``position`` (n,), its place in that step's keys.
    """

    bank: Tensor
    origin: Tensor
    position: Tensor

    def __init__(self, n: int, K: int, dim: int, momentum: float, positive: str, negatives: str, seed: int) -> None:
        super().__init__()
        self.K, self.momentum, self.negatives = K, momentum, negatives
        self.fresh_keys = positive == "fresh"
        self.register_buffer("bank", _unit_vectors(n, dim, counter_based(seed, "bank")))
        self.register_buffer("origin", torch.full((n,), -1))
        self.register_buffer("position", torch.zeros(n, dtype=torch.int64))

    def contrast(
        self, q: Tensor, k: Tensor, index: Tensor, T: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        n, B = len(self.bank), len(q)
        positive = k if self.fresh_keys else self.bank[index]
        if self.negatives == "shared":
            drawn = torch.randint(n, (self.K,), generator=generator, device=generator.device).to(q.device)
            return infonce(q, positive, self.bank[drawn], T)
        drawn = torch.randint(n, (B, self.K), generator=generator, device=generator.device).to(q.device)
        counts = torch.zeros(B, n, device=q.device).scatter_add_(
            1, drawn, torch.ones((), device=q.device).expand(B, self.K)
        )
        return infonce(q, positive, self.bank, T, counts)

    @torch.no_grad()
    def store(self, keys: Tensor, index: Tensor, step: int) -> None:
        refreshed = self.momentum * self.bank[index] + (1 - self.momentum) * keys
        self.bank[index] = F.normalize(refreshed, dim=1)
        self.origin[index] = step
        self.position[index] = torch.arange(len(keys), device=keys.device)


class InBatch(Dictionary):
    """End-to-end: the keys of the batch are the dictionary, K = B − 1 (Figure 2a); it remembers nothing."""

    def contrast(
        self, q: Tensor, k: Tensor, index: Tensor, T: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return infonce_in_batch(q, k, T)

    def store(self, keys: Tensor, index: Tensor, step: int) -> None:
        pass


def build(config: Config, n: int) -> Dictionary:
    """The dictionary that a config describes, for ``n`` training images."""
    cfg = config.dictionary
    dim = 3 * config.data.size**2 if config.encoder.arch == "pixels" else config.encoder.dim
    if cfg.kind == "in-batch":
        return InBatch()
    if cfg.kind == "queue":
        if n <= config.K:
            warnings.warn(
                f"dictionary.K = {config.K} with {n} images: an image's own old keys stand among its negatives"
                f" (below {n - config.optimiser.batch} they do not, within an epoch)",
                stacklevel=2,
            )
        assert cfg.eviction is not None  # these are filled by the config
        return Queue(config.K, dim, cfg.eviction, config.seed)
    assert cfg.bank_momentum is not None and cfg.bank_positive is not None and cfg.bank_negatives is not None
    return MemoryBank(n, config.K, dim, cfg.bank_momentum, cfg.bank_positive, cfg.bank_negatives, config.seed)


def _unit_vectors(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(rows, dim, generator=generator), dim=1)
