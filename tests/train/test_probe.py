"""The paper's linear probe: its protocol, what it reads, and that it continues to the bit."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from study.config.reading import resolve
from study.config.schema import Config
from study.data import images
from study.data.views import sample
from study.errors import UserError
from study.model.moco import MoCo
from study.rng import generator
from study.run import record, status
from study.train import interop, probe
from study.train.probe import CropAndFlip, peak_lr, pretrained, train_probe
from study.train.progress import Progress

CPU = torch.device("cpu")
N, BATCH = 100, 32  # four steps an epoch, the last of four images


def configure(**overrides: Any) -> Config:
    tree = {
        "data": {"name": "toy", "size": 16, "eval_crop": 1.0},
        "encoder": {"arch": "tiny", "width": 4, "dim": 16, "bn": "plain", "bn_splits": 1},
        "dictionary": {"K": 64},
        "optimiser": {"batch": 32, "epochs": 0},
        "probe": {"batch": BATCH, "epochs": 5},
    }
    return resolve({**tree, **overrides}, "test")


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> images.Images:
    """Three classes of noisy colour, where `images.load` finds them."""
    rng = np.random.default_rng(0)

    def split(n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(n, dtype=np.int64) % 3
        pixels = rng.integers(0, 100, (n, 3, 16, 16), dtype=np.uint8)
        pixels[np.arange(n), labels] += 150
        return pixels, labels

    root = tmp_path / "data"
    monkeypatch.setenv("STUDY_DATA", str(root))
    with images.staging("toy", root) as temporary:
        return images.store(temporary, "toy", root, ("r", "g", "b"), [split(N)], [split(45)], lambda n: None)


def pretrain(runs: Path, config: Config, final: dict[str, float] | None = None, nan_keys: bool = False) -> MoCo:
    """A pre-training of no steps, as the trainer leaves one."""
    model = MoCo(config, N)
    if nan_keys:
        for parameter in model.f_k.parameters():
            parameter.fill_(math.nan)
        model.dictionary.queue.fill_(math.nan)
    with record.start(runs, config.pretraining, command=["test"]) as run:
        run.save(0, {"model": model.state_dict(), "optimiser": {}})
        run.progress(phase="evaluate", step=0, steps=0, images_per_s=0.0)
        run.finish(final or {"knn": 0.5})
    return model


def journal(folder: Path) -> dict[tuple[int, str], float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return {(line["step"], name): value for line in lines for name, value in line["metrics"].items()}


def run_probe(runs: Path, config: Config) -> dict[str, float]:
    with record.start(runs, config, command=["test"]) as run:
        f_q = pretrained(config.pretraining, runs, CPU)
        final = train_probe(run, config, images.load(config.data.name), f_q, CPU)
        if not run.stop:
            run.finish(final)
    return final


def test_the_probe_learns_and_logs_every_step_and_epoch(tmp_path: Path) -> None:
    config = configure()
    pretrain(tmp_path, config)
    final = run_probe(tmp_path, config)
    assert set(final) == {"probe/top1"} and final["probe/top1"] > 0.6
    values = journal(tmp_path / config.signature)
    assert [step for step, name in values if name == "probe/loss"] == list(range(1, 21))
    assert [step for step, name in values if name == "probe/top1"] == [4, 8, 12, 16, 20]
    assert values[20, "probe/top1"] == final["probe/top1"]
    assert values[1, "probe/loss"] == pytest.approx(math.log(3), abs=0.1)  # fc ~ N(0, 0.01²), bias 0


@pytest.mark.parametrize("at", [1, 6, 20])
def test_a_stopped_probe_continues_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    config = configure()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for runs in (whole, broken):
        pretrain(runs, config)
    expected = run_probe(whole, config)

    class Interrupted(Progress):
        def update(self, step: int) -> None:
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(probe, "Progress", Interrupted)
        run_probe(broken, config)
    assert json.loads((broken / config.signature / "status.json").read_text())["state"] == "killed"
    assert max(step for step, _ in journal(broken / config.signature)) == at
    assert run_probe(broken, config) == expected
    assert journal(broken / config.signature) == journal(whole / config.signature)


def test_frozen_is_checked_at_the_end_and_fails_when_bn_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    pretrain(tmp_path, config)
    build = interop.build

    def thawing(*args: Any) -> Any:
        encoder = build(*args)
        features = encoder.features
        encoder.features = lambda x: features(encoder.train() and x)
        return encoder

    monkeypatch.setattr(interop, "build", thawing)
    with pytest.raises(RuntimeError, match="not frozen"):
        run_probe(tmp_path, config)
    assert json.loads((tmp_path / config.signature / "status.json").read_text())["state"] == "failed"


def test_only_f_q_is_read(tmp_path: Path) -> None:
    config = configure()
    clean, poisoned = tmp_path / "clean", tmp_path / "poisoned"
    pretrain(clean, config)
    model = pretrain(poisoned, config, nan_keys=True)
    encoder = pretrained(config.pretraining, poisoned, CPU)
    assert encoder is not None
    assert all(torch.equal(tensor, model.f_q.state_dict()[name]) for name, tensor in encoder.state_dict().items())
    assert run_probe(poisoned, config) == run_probe(clean, config)


def test_a_pretraining_that_is_not_finished_is_refused_in_one_line(tmp_path: Path) -> None:
    config = configure()
    with pytest.raises(UserError, match=r"state = not begun: allowed is finished") as absent:
        pretrained(config.pretraining, tmp_path, CPU)
    assert "\n" not in str(absent.value) and config.pretraining.signature in str(absent.value)
    with record.start(tmp_path, config.pretraining, command=["test"]) as run:
        run.save(0, {"model": MoCo(config, N).state_dict(), "optimiser": {}})
    with pytest.raises(UserError, match=r"state = killed: allowed is finished"):
        pretrained(config.pretraining, tmp_path, CPU)


def test_a_checkpoint_that_is_not_of_the_last_step_is_refused(tmp_path: Path) -> None:
    config = configure()
    with record.start(tmp_path, config.pretraining, command=["test"]) as run:
        run.save(3, {"model": MoCo(config, N).state_dict(), "optimiser": {}})
        run.progress(phase="evaluate", step=4, steps=4)
        run.finish({"knn": 0.5})
    with pytest.raises(UserError, match="holds one of step 3: allowed is a checkpoint of the last step"):
        pretrained(config.pretraining, tmp_path, CPU)
    for file in (tmp_path / config.pretraining.signature / "checkpoints").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="holds none"):
        pretrained(config.pretraining, tmp_path, CPU)


def test_a_diverged_pretraining_reads_nan(tmp_path: Path) -> None:
    config = configure()
    pretrain(tmp_path, config, final={"knn": math.nan})
    assert math.isnan(run_probe(tmp_path, config)["probe/top1"])


def test_a_probe_that_diverges_ends_at_that_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(probe={"batch": BATCH, "epochs": 5, "lr": 1e38})
    pretrain(tmp_path, config)
    assert math.isnan(run_probe(tmp_path, config)["probe/top1"])
    values = journal(tmp_path / config.signature)
    (end,) = [step for (step, _), value in values.items() if value is None]
    known = status.read(tmp_path / config.signature)
    assert known is not None and known.diverged == known.step == end == max(step for step, _ in values) < 20
    assert f"not finite at step {end}: the probe has diverged" in capfd.readouterr().err


def test_lr_30_belongs_to_batch_256_and_another_batch_scales_it_and_says_so(tmp_path: Path) -> None:
    config = configure()
    pretrain(tmp_path, config)
    run_probe(tmp_path, config)
    log = (tmp_path / config.signature / "log.txt").read_text()
    assert "probe.lr = 30 belongs to batch 256; batch 32 takes 3.75" in log
    assert [peak_lr(configure(probe={"batch": batch})) for batch in (256, 512, 128)] == [30, 60, 15]
    usual = configure(probe={"batch": 256, "epochs": 1})
    run_probe(tmp_path, usual)
    assert "belongs to batch" not in (
        (tmp_path / usual.signature / "log.txt").read_text()
        if (tmp_path / usual.signature / "log.txt").exists()
        else ""
    )


def test_sgd_is_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    pretrain(tmp_path, config)
    used: list[dict[str, Any]] = []

    class Spy(torch.optim.SGD):
        def step(self, *args: Any) -> None:  # type: ignore[override]
            used.append(dict(self.param_groups[0]))
            super().step(*args)

    monkeypatch.setattr(torch.optim, "SGD", Spy)
    run_probe(tmp_path, config)
    assert [group["lr"] for group in used] == pytest.approx([3.75] * 12 + [0.375] * 4 + [0.0375] * 4)
    assert all(group["momentum"] == 0.9 and group["weight_decay"] == 0 for group in used)


@pytest.mark.parametrize("flip", [True, False])
def test_crop_and_flip_is_torchvisions_and_nothing_else(toy: images.Images, flip: bool) -> None:
    config = configure(views={"flip": flip})
    view = CropAndFlip(config, toy)
    pixels = torch.from_numpy(toy.train.images[:64].copy())
    x = view(pixels, generator(0, "probe/views", 3))
    drawn = sample(view.views, 64, 16, 16, generator(0, "probe/views", 3))
    assert drawn.flip.any() == flip
    for i in range(64):
        box = (int(drawn.top[i]), int(drawn.left[i]), int(drawn.height[i]), int(drawn.width[i]))
        expected = tv.resized_crop(pixels[i].float() / 255, *box, [16, 16], antialias=True)
        expected = tv.horizontal_flip(expected) if drawn.flip[i] else expected
        torch.testing.assert_close(x[i], tv.normalize(expected, toy.mean, toy.std), atol=2e-3, rtol=0)


def test_crops_take_8_to_100_percent_of_the_area(toy: images.Images) -> None:
    drawn = sample(CropAndFlip(configure(), toy).views, 4000, 64, 64, generator(0, "probe/views"))
    share = (drawn.height * drawn.width).double() / 64**2
    assert 0.07 < share.min() < 0.1 and share.max() > 0.95
