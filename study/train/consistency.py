"""Is the dictionary consistent? The paper's reason for a large m (Section 3.2), measured while training.

A batch is a pure function of its step, so the views of an old key can be made again, encoded by the key encoder of
now in the way that they were then, and compared with the key that the dictionary holds: how far have the keys drifted?
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from study.config.schema import Config
from study.data.stream import Batch, Stream
from study.model.dictionary import MemoryBank, Queue
from study.model.moco import MoCo
from study.model.norm import frozen_statistics
from study.rng import generator

Autocast = Callable[[], AbstractContextManager[Any]]

COLLAPSED_RANK = 1.5
COLLAPSED_COSINE = 0.99


@torch.no_grad()
def read(model: MoCo, stream: Stream, step: int, config: Config, autocast: Autocast) -> dict[str, float]:
    """One reading of the dictionary and of the embedding; moves no buffer, weight or random state.

    The age of a key is the number of steps since it was written, as the queries of the next step meet it. A queue's
    newest keys (age 1) were written by the encoder as it still is, so they read 1 up to rounding: proof that batches
    are really made again. A bank's were written before the last step of f_q, and are mixed with the entry's past.

    Cost: 2 + samples/keys forward passes, where a step makes about 4 (f_q forward and backward, f_k forward), and
    1 + samples/keys times a step's views; ``keys`` is the number of keys a step. With samples = batch that is 0.75
    to 1 of a step: 1 % of the run at ``every_steps`` = 100. BN needs whole batches, so at least one old batch is
    encoded; the ages take turns from reading to reading when ``samples`` does not reach for all of them.

    Args:
        model: in train mode, with the dictionary as it is after ``step`` steps.
        stream: the run's batches.
        step: optimiser steps done, at least 1.
        config: the run.
        autocast: the context in which the trainer encodes.

    Returns:
        With the prefix ``consistency/``:
        ``cosine_age_<a>``: mean cosine of stored keys of age a with the same views encoded now;
        ``cosine_oldest``, ``age_oldest``: the same for the oldest key, and its age; ``age_mean``: of all keys;
        ``theta_distance``: ‖θ_q − θ_k‖ / ‖θ_q‖, over parameters;
        ``alignment``: mean ‖q − k⁺‖² of the last batch, ``uniformity``: log mean exp(−2‖q − q'‖²) over its pairs
        (Wang & Isola 2020); ``effective_rank`` of its q: exp of the entropy of the normalised singular values, 1 to D
        (Roy & Vetterli 2007);
        ``collapsed``: 1 if that rank is below 1.5 (all q on one line) or the mean cosine of two q is above 0.99.
        What a dictionary lacks (no stored keys, no f_k, no key of that age left) is left out, and so is what has no
        number because the encoder has diverged.
    """
    newest = step - 1
    micro = config.optimiser.accumulate
    batch = stream.at(newest)
    with frozen_statistics(model):
        keys = _keys(model, batch, newest, config, autocast)
        with autocast():
            if model.dictionary.fresh_keys:
                q = torch.cat([model.f_q(x) for x in batch.x_q.chunk(micro)])  # (B, D)
                k = torch.cat(keys[:: 1 + config.symmetric])  # (B, D): those of x_k
            else:
                q, k = torch.cat(keys), torch.cat([model.f_q(x) for x in batch.x_k.chunk(micro)])
        reading = _embedding(q, k)
        if isinstance(model.dictionary, Queue | MemoryBank):
            known = {newest: torch.cat(keys)}
            reading |= _drift(model, stream, step, config, autocast, model.dictionary, known)
    if model.f_k is not None:
        theta_q, theta_k = (torch.cat([p.flatten() for p in f.parameters()]) for f in (model.f_q, model.f_k))
        reading["theta_distance"] = ((theta_q - theta_k).norm() / theta_q.norm()).item()
    return {f"consistency/{name}": value for name, value in reading.items() if math.isfinite(value)}


def ages(reach: int) -> tuple[int, ...]:
    """Ages from 1 to ``reach`` steps, in equal ratios: the same for a whole run."""
    return tuple(sorted({round(reach ** (i / 4)) for i in range(5)}))


def _drift(
    model: MoCo,
    stream: Stream,
    step: int,
    config: Config,
    autocast: Autocast,
    dictionary: Queue | MemoryBank,
    known: dict[int, Tensor],
) -> dict[str, float]:
    """Cosine of stored keys with the keys of their views now; ``known`` holds the keys of steps encoded already."""
    origin = dictionary.origin  # (K,) or (n,)
    written = origin[origin >= 0]
    oldest = int(written.min())
    reading = {"age_mean": step - written.double().mean().item(), "age_oldest": float(step - oldest)}

    keys_a_step = config.optimiser.batch * (1 + config.symmetric)
    reach = math.ceil(config.K / keys_a_step) if isinstance(dictionary, Queue) else stream.steps_per_epoch
    wanted = [step - age for age in ages(reach) if (origin == step - age).any()]
    others = sorted({*wanted, oldest} - known.keys())
    count = min(len(others), max(1, config.consistency.samples // keys_a_step))
    turn = step // max(1, config.consistency.every_steps) * count
    for old in [others[(turn + i) % len(others)] for i in range(count)]:
        known[old] = torch.cat(_keys(model, stream.at(old), old, config, autocast))

    stored = dictionary.queue if isinstance(dictionary, Queue) else dictionary.bank
    for old, now in sorted(known.items(), reverse=True):
        rows = (origin == old).nonzero().squeeze(1)
        cosine = F.cosine_similarity(stored[rows], now[dictionary.position[rows]]).mean().item()
        if old in wanted:
            reading[f"cosine_age_{step - old}"] = cosine
        if old == oldest:
            reading["cosine_oldest"] = cosine
    return reading


def _keys(model: MoCo, batch: Batch, step: int, config: Config, autocast: Autocast) -> list[Tensor]:
    """The keys of ``step`` by the encoder of now: pieces (B / accumulate, D) in the order in which they were stored."""
    micro, keys = config.optimiser.accumulate, []
    with autocast():
        for i, (x_q, x_k) in enumerate(zip(batch.x_q.chunk(micro), batch.x_k.chunk(micro), strict=True)):
            if model.dictionary.fresh_keys:
                draws = generator(config.seed, "step", step * micro + i, x_q.device)  # the trainer's: the same shuffle
                keys += [model.encode_keys(x, draws) for x in ((x_k, x_q) if config.symmetric else (x_k,))]
            else:
                keys.append(model.f_q(x_q))  # the queries are what is stored
    return keys


def _embedding(q: Tensor, k: Tensor) -> dict[str, float]:
    """Alignment, uniformity, effective rank and collapse of queries (B, D) and their positives (B, D)."""
    if not (q.isfinite().all() and k.isfinite().all()):
        return {}  # svdvals would raise
    B = len(q)
    cosine = (q @ q.T)[~torch.eye(B, dtype=torch.bool, device=q.device)]  # (B·(B − 1),)
    sigma = torch.linalg.svdvals(q)
    p = sigma / sigma.sum()
    rank = torch.special.entr(p).sum().exp().item()
    mean_cosine = cosine.mean().item()
    return {
        "alignment": (q - k).square().sum(1).mean().item(),
        "uniformity": (4 * cosine - 4).exp().mean().log().item(),  # ‖q − q'‖² = 2 − 2 cos
        "effective_rank": rank,
        "collapsed": float(rank < COLLAPSED_RANK or mean_cosine > COLLAPSED_COSINE),
    }
