"""A MoCo loop written as the documentation of ``lightly`` writes it, the trainer's peer.

Its transform, a DataLoader with workers, its loss with a memory bank, its momentum update; the encoder, the batch, K,
the precision and the cores are the trainer's.
"""

import copy
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from study.bench import sides
from study.bench.measure import Bench, take_turns
from study.bench.sides import RESNET18, TINY, Steps, config_of
from study.config.schema import Config
from study.data import images
from study.model import encoder
from study.train.device import autocaster, configure_torch

PREFETCHED = 2
"""Batches that a worker makes in advance, DataLoader's default."""
TURN = 32
"""Steps of a turn of the tiny ResNet: many times what workers have made in advance."""
SETTLE_S = 1.0
"""Seconds that workers take to fill their queues."""


def peer(bench: Bench) -> None:
    """Images/s of the trainer ÷ those of the loop, each with its best threads and workers on the same cores."""
    if importlib.util.find_spec("lightly") is None:
        print("peer: left out: lightly is not installed (moco-study[dev])", file=sys.stderr)
        return
    precision = "bf16" if bench.device.type == "cuda" else "fp32"
    _against_peer(bench, "tiny ResNet", config_of(TINY, precision=precision), TURN, 5.0)
    _against_peer(bench, "ResNet-18 with CIFAR's stem", config_of(RESNET18, precision=precision), 1, 1.2)


def _against_peer(bench: Bench, name: str, config: Config, steps: int, goal: float) -> None:
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        take, _ = stack.enter_context(sides.trainer(config, bench.folder / "runs", bench.device))
        ours = {threads: _with_threads(bench, threads, take, steps) for threads in sorted({1, cores})}
        threads = min(ours, key=lambda setting: _tried(ours[setting]))
        tried: dict[tuple[int, int], float] = {}
        for workers, of_torch in sorted({(0, cores), (1, 1), (1, cores), (cores, 1), (cores, cores)}):
            tried[workers, of_torch] = _tried(_loop(bench, config, workers, of_torch, steps))
        best = min(tried, key=lambda setting: tried[setting])
        seconds = take_turns({"trainer": ours[threads], "peer": _loop(bench, config, *best, steps)}, bench.repeats)
    bench.add(
        f"trainer ÷ lightly's loop, {name}",
        seconds["peer"] / seconds["trainer"],
        "",
        at_least=goal,
        note=f"best settings: {threads} thread(s); lightly {best[0]} worker(s), {best[1]} thread(s)",
    )


def _tried(side: Callable[[], float]) -> float:
    side()
    return side()


def _with_threads(bench: Bench, threads: int, take: Steps, steps: int) -> Callable[[], float]:
    def side() -> float:
        configure_torch(bench.device, threads)
        began = time.perf_counter()
        take(steps)
        return time.perf_counter() - began

    return side


def _loop(bench: Bench, config: Config, workers: int, threads: int, steps: int) -> Callable[[], float]:
    """The loop as a side. Its workers fill their queues when it has no turn: where a turn is many steps, the batches
    that lie there do not count; and the next turn waits until they lie there."""
    loop = Loop(config, workers, bench.device)
    turn = _with_threads(bench, threads, loop.take, steps)

    def side() -> float:
        if steps > 1:
            loop.take(2 * workers * PREFETCHED)
        seconds = turn()
        time.sleep(SETTLE_S if workers else 0.0)
        return seconds

    return side


class Loop:
    """The loop: model, data, criterion and optimiser as in lightly's MoCo example.

    Args:
        config: encoder, K, T, precision, and the momenta.
        workers: of the DataLoader.
        device: where to compute.
    """

    def __init__(self, config: Config, workers: int, device: torch.device) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.utils import deactivate_requires_grad
        from lightly.transforms import MoCoV1Transform

        self.config, self.device = config, device
        self.model = encoder.build(config.encoder, config.data.size).to(device)
        self.model_momentum = copy.deepcopy(self.model)
        deactivate_requires_grad(self.model_momentum)
        dataset = Pictures(images.load(config.data.name).train, MoCoV1Transform(input_size=config.data.size))
        self.dataloader = torch.utils.data.DataLoader(
            dataset,
            batch_size=config.optimiser.batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )
        self.criterion = NTXentLoss(temperature=config.T, memory_bank_size=(config.K, config.encoder.dim)).to(device)
        self.optimiser = torch.optim.SGD(
            self.model.parameters(),
            lr=config.lr,
            momentum=config.optimiser.momentum,
            weight_decay=config.optimiser.weight_decay,
        )
        self.autocast = autocaster(config, device)
        self._batches = _forever(self.dataloader)

    def take(self, steps: int) -> None:
        """Train so many steps."""
        from lightly.models.utils import update_momentum

        assert self.config.m is not None
        for _ in range(steps):
            x_query, x_key = next(self._batches)
            update_momentum(self.model, self.model_momentum, m=self.config.m)
            with self.autocast():
                query = self.model(self._put(x_query))
                key = self.model_momentum(self._put(x_key)).detach()
                loss = self.criterion(query, key)
            loss.backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _put(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True, memory_format=torch.channels_last)


def _forever(dataloader: "torch.utils.data.DataLoader[tuple[list[Tensor], int]]") -> Iterator[list[Tensor]]:
    """No method: it would keep the loop, and its workers, alive."""
    while True:
        for views, _ in dataloader:
            yield views


class Pictures(torch.utils.data.Dataset[tuple[list[Tensor], int]]):
    """Images as torchvision's data sets give them: a PIL picture, transformed, and its label."""

    def __init__(self, split: images.Split, transform: Any) -> None:
        self.split, self.transform = split, transform

    def __len__(self) -> int:
        return len(self.split.labels)

    def __getitem__(self, index: int) -> tuple[list[Tensor], int]:
        from PIL import Image

        picture = Image.fromarray(self.split.images[index].transpose(1, 2, 0))
        return self.transform(picture), int(self.split.labels[index])
