"""What is measured against what: the real trainer, its encoder alone, and the products with the queue."""

import contextlib
import copy
import io
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from study.bench.measure import DATA
from study.config.reading import merge, resolve
from study.config.schema import Config
from study.data import images
from study.data.stream import Stream
from study.model import encoder
from study.run import record
from study.train.device import autocaster
from study.train.trainer import Pretraining, Runtime

TINY: dict[str, Any] = {
    "data": {"name": DATA, "size": 32, "eval_crop": 1.0},
    "encoder": {"arch": "tiny", "width": 16, "bn": "shuffle", "bn_splits": 8},
    "dictionary": {"K": 4096},
    "optimiser": {"batch": 256, "epochs": 1000, "schedule": "cosine"},
}
"""The committed study's regime, without its end."""
RESNET18: dict[str, Any] = merge(TINY, {"encoder": {"arch": "resnet18", "stem": "cifar"}})

CHUNK = 1024
"""Rows of the queue in one product: its logits stay in a CPU's cache, which is the fastest way there was."""

Steps = Callable[[int], None]
"""Does so many steps."""


def config_of(tree: dict[str, Any], **changes: Any) -> Config:
    """A config of the bench: ``changes`` by dotted key with ``__`` for the dot."""
    return resolve(merge(tree, {key.replace("__", "."): value for key, value in changes.items()}), "bench")


@contextmanager
def trainer(
    config: Config, folder: Path, device: torch.device, *, checkpoint_every: float = 60.0
) -> Iterator[tuple[Steps, Pretraining]]:
    """The trainer itself on a run of its own: stream, views, EMA, loss, SGD, store, journal, heartbeat, checkpoints.

    Args:
        config: the run.
        folder: of runs.
        device: where to compute.
        checkpoint_every: seconds between checkpoints; the default is the trainer's own.
    """
    stream = Stream(images.load(config.data.name), config, device)
    with contextlib.redirect_stderr(io.StringIO()), record.start(folder, config, command=["study", "bench"]) as run:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the run would only note them; the bench has to end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pretraining = Pretraining(run, config, stream, device, Runtime(folder, checkpoint_every=checkpoint_every))
        taken = pretraining.steps()

        def steps(n: int) -> None:
            for _ in range(n):
                next(taken)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        try:
            yield steps, pretraining
        finally:
            taken.close()  # type: ignore[attr-defined]


def encoder_alone(config: Config, device: torch.device) -> Steps:
    """f_q forward and backward and f_k forward on views that are there already, and nothing else."""
    f_q = encoder.build(config.encoder, config.data.size).to(device)
    f_k = copy.deepcopy(f_q)
    shape = (config.optimiser.batch, 3, config.data.size, config.data.size)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    x_q, x_k = (torch.randn(shape, device=device).to(dtype=dtype, memory_format=torch.channels_last) for _ in range(2))
    gradient = torch.randn(config.optimiser.batch, config.encoder.dim, device=device) / config.optimiser.batch
    parameters, autocast = list(f_q.parameters()), autocaster(config, device)

    def steps(n: int) -> None:
        for _ in range(n):
            with autocast():
                q = f_q(x_q)
                with torch.no_grad():
                    f_k(x_k)
            q.backward(gradient)
            for parameter in parameters:
                parameter.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return steps


def products(config: Config, device: torch.device) -> Steps:
    """The two products with the queue that the loss and its gradient cannot do without, in the run's precision."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    queue = F.normalize(torch.randn(config.K, config.encoder.dim, device=device), dim=1).to(dtype)
    q = F.normalize(torch.randn(config.optimiser.batch, config.encoder.dim, device=device), dim=1).to(dtype)
    pull = torch.zeros_like(q)
    logits = torch.empty(len(q), CHUNK, dtype=dtype, device=device)

    def steps(n: int) -> None:
        for _ in range(n):
            for chunk in torch.split(queue, CHUNK):
                torch.mm(q, chunk.T, out=logits)
                pull.addmm_(logits, chunk)
            pull.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return steps
