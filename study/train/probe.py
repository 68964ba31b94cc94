"""The paper's linear probe (Section 4.1): a classifier on frozen features, as a run of its own.

As in the authors' code: SGD with momentum 0.9 and no weight decay, batch 256, lr 30, ×0.1 at epochs 60 and 80 of 100,
weights from N(0, 0.01²), bias 0, the whole network in eval mode; random crops of 8–100 % of the area and flips while
training, the centre crop in the test. The result is that of the last epoch: test labels choose nothing.
"""

import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from study.config.schema import Config, Views
from study.data.images import Images, subset
from study.data.parameters import sample
from study.data.views import Augment
from study.model.encoder import Encoder
from study.rng import generator
from study.run.record import RunRecord
from study.train import interop
from study.train.evaluate import encode, frozen
from study.train.progress import Progress

PAPER_BATCH = 256
"""The batch that config.probe.lr belongs to."""
CROP_MIN = 0.08
CHECKPOINT_EVERY = 60.0
"""Seconds between two checkpoints."""
READ_EVERY = 16
"""Steps whose losses are read from the device together, so that a GPU is not made to wait at each."""


def train_probe(
    record: RunRecord, config: Config, dataset: Images, encoder: Encoder | None, device: torch.device
) -> dict[str, float]:
    """Train the classifier of the run that ``config`` defines, or continue it; only f_q is read of the pre-training.

    Every draw derives from (seed, purpose, step), so a probe that was stopped ends with the bits of one that was not.

    Args:
        record: of this run. ``probe/loss`` is logged at every step, ``probe/top1`` (a share) at every epoch; when
            ``record.stop`` is set, the state is saved at the boundary of a step and the result is of no use.
        config: with ``probe`` set; the rest describes the pre-training.
        dataset: its images.
        encoder: f_q on ``device``, from :func:`pretrained`.
        device: where to compute.

    Returns:
        ``probe/top1`` on the test split after the last epoch; NaN if it or the pre-training has diverged.

    Raises:
        RuntimeError: a parameter or a buffer of the encoder changed.
    """
    assert config.probe is not None
    probe = config.probe
    if encoder is None:
        record.note("the pre-training has diverged: there are no features to probe")
        return {"probe/top1": math.nan}
    rows = subset(dataset.train.labels, config.data.train_images)
    steps_per_epoch = math.ceil(len(rows) / probe.batch)  # as in the authors' code, the last short batch is used
    steps = probe.epochs * steps_per_epoch
    if probe.batch != PAPER_BATCH:
        record.note(
            f"probe.lr = {probe.lr:g} belongs to batch {PAPER_BATCH}; batch {probe.batch} takes {peak_lr(config):g}"
        )
    crop_and_flip = CropAndFlip(config, dataset)
    classifier = nn.Linear(encoder.channels, len(dataset.classes), device=device)
    with torch.no_grad():
        classifier.weight.copy_(torch.randn(classifier.weight.shape, generator=generator(config.seed, "probe/init")))
        classifier.weight.mul_(0.01)
        classifier.bias.zero_()
    sgd = torch.optim.SGD(classifier.parameters(), lr=peak_lr(config), momentum=0.9, weight_decay=probe.weight_decay)
    first = 0
    if (saved := record.latest()) is not None:
        first, state = saved
        classifier.load_state_dict(state["classifier"])
        sgd.load_state_dict(state["optimiser"])

    losses: list[Tensor] = []

    def read_losses(done: int) -> int | None:
        """Journal the losses of the steps up to ``done`` that were not yet; the step of one that is no number."""
        values = torch.stack(losses).tolist() if losses else []
        losses.clear()
        for step, loss in enumerate(values, done - len(values) + 1):
            record.log(step, {"probe/loss": loss})
            if not math.isfinite(loss):
                return step
        return None

    with frozen(encoder), Progress(record, "probe", first, steps, probe.batch) as bar:
        every = np.arange(len(dataset.test.labels))
        test = encode(encoder, dataset, dataset.test, every, config, device)  # once: the centre crop never changes

        def top1() -> float:
            logits: Tensor = classifier(test.features)  # (m, classes)
            return (logits.argmax(1) == test.labels).double().mean().item() if logits.isfinite().all() else math.nan

        saved_at = time.monotonic()
        for step in range(first, steps):
            epoch, i = divmod(step, steps_per_epoch)
            if i == 0 or step == first:
                order = torch.randperm(len(rows), generator=generator(config.seed, "probe/order", epoch)).numpy()
                for group in sgd.param_groups:
                    group["lr"] = peak_lr(config) * 0.1 ** sum(
                        epoch >= share * probe.epochs for share in probe.milestones
                    )
            chosen = rows[order[i * probe.batch : (i + 1) * probe.batch]]
            pixels = torch.from_numpy(dataset.train.images[chosen]).to(device)  # (B, 3, H, W)
            labels = torch.from_numpy(dataset.train.labels[chosen]).to(device)
            x = crop_and_flip(pixels, generator(config.seed, "probe/views", step))
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                features = encoder.features(x)  # (B, C)
            with torch.enable_grad():
                loss = F.cross_entropy(classifier(features), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
            sgd.zero_grad()
            losses.append(loss.detach())

            done = step + 1
            bar.update(done)
            epoch_ends = done % steps_per_epoch == 0
            due = done == steps or time.monotonic() - saved_at > CHECKPOINT_EVERY or record.stop
            if (len(losses) == READ_EVERY or due or epoch_ends) and (diverged := read_losses(done)) is not None:
                record.progress(step=diverged)
                record.note(f"the loss is not finite at step {diverged}: the probe has diverged and ends here")
                return {"probe/top1": math.nan}
            if epoch_ends:
                record.log(done, {"probe/top1": top1()})
            if due:
                record.save(done, {"classifier": classifier.state_dict(), "optimiser": sgd.state_dict()})
                saved_at = time.monotonic()
            if record.stop:
                break
        return {"probe/top1": top1()}


def peak_lr(config: Config) -> float:
    """The learning rate before any decay: lr 30 belongs to batch 256, another batch scales it linearly."""
    assert config.probe is not None
    return config.probe.lr * config.probe.batch / PAPER_BATCH


def pretrained(config: Config, runs_dir: Path, device: torch.device) -> Encoder | None:
    """f_q as the finished run of ``config`` left it; None if that run diverged, and so has no encoder to speak of.

    Raises:
        UserError: the run is not finished, or has no checkpoint of its last step.
    """
    source = interop.finished(runs_dir / config.signature, config)
    return None if source is None else interop.load(source, config).to(device)


class CropAndFlip:
    """The probe's augmentation: RandomResizedCrop of 8–100 % of the area, and the mirror where the views have one."""

    def __init__(self, config: Config, dataset: Images) -> None:
        self.views = Views(crop_min=CROP_MIN, flip=config.views.flip)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.augment = Augment(self.views, config.data.size, dataset.mean, dataset.std, dtype)

    def __call__(self, pixels: Tensor, random: torch.Generator) -> Tensor:
        """uint8 (B, 3, H, W) → (B, 3, size, size); ``random`` is on the CPU."""
        B, _, H, W = pixels.shape
        drawn = sample(self.views, B, H, W, random)
        one, none = torch.ones(B), torch.zeros(B)
        return self.augment.apply(
            pixels,
            drawn._replace(grey=none.bool(), brightness=one, contrast=one, saturation=one, hue=none, sigma=none),
        )
