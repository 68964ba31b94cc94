"""The trainer: a run that was stopped ends with the bits of one that never was, for each mechanism."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from study.config import schema
from study.config.reading import merge, resolve
from study.config.schema import Config
from study.data import images
from study.data.images import Images, Split
from study.errors import UserError
from study.run import checkpoint, journal, status
from study.run.record import RunRecord
from study.train import trainer
from study.train.trainer import Runtime, lr_at, train

SMALL = {
    "data": {"name": "noise", "size": 8, "eval_crop": 1.0},
    "encoder": {"arch": "tiny", "width": 4, "dim": 16, "bn_splits": 2},
    "dictionary": {"K": 24},
    "optimiser": {"batch": 16, "epochs": 2, "lr": 0.1},
    "evaluation": {"knn_k": 5, "linear_epochs": 2},
}
"""Two epochs of three steps on 48 images; the batch does not divide K."""

MECHANISMS: dict[str, dict[str, Any]] = {
    "queue": {},
    "queue-bf16-v2-mlp": {"precision": "bf16", "views.recipe": "v2", "encoder.head": "mlp", "m": 0.9},
    "queue-random": {"dictionary.eviction": "random"},
    "queue-m0": {"m": 0},
    "symmetric": {"symmetric": True},
    "accumulated": {"optimiser.accumulate": 2},
    "bank": {"dictionary": {"kind": "bank"}, "encoder.bn": "split"},
    "bank-fresh": {
        "dictionary": {"kind": "bank", "bank_positive": "fresh", "bank_negatives": "per-query"},
        "encoder.bn": "split",
    },
    "in-batch": {"dictionary": {"kind": "in-batch", "K": None}},
    "in-batch-m": {"dictionary": {"kind": "in-batch", "K": None}, "m": 0.9},
}  # fmt: skip


def noise(n: int = 48) -> Images:
    random = np.random.default_rng(0)
    split = Split(random.integers(0, 256, (n, 3, 8, 8), dtype=np.uint8), np.arange(n) % 3)
    return Images("noise", split, split, ("a", "b", "c"), (0.5, 0.5, 0.5), (0.3, 0.3, 0.3), "none")


@pytest.fixture(autouse=True)
def _noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "load", lambda name: noise())


def small(change: dict[str, Any] | None = None) -> Config:
    return resolve(merge(SMALL, change or {}), "test")


def state_of(folder: Path) -> dict[str, Any]:
    """The newest checkpoint, as saved."""
    newest = checkpoint.latest(folder / "checkpoints", folder.name, pytest.fail)
    assert newest is not None
    return newest[1]


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, tensors included."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def readings(folder: Path) -> list[tuple[int, str, float]]:
    return [(r.step, r.name, r.value) for r in journal.read(folder / "metrics.jsonl")]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_six_steps_equal_three_and_three(mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lightly and PyContrast lose the queue or its pointer: here everything is bit-equal, metrics too."""
    config = small(MECHANISMS[mechanism])
    whole = train(config, Runtime(tmp_path / "whole", threads=1))

    store = trainer.MoCo.store

    def stop_after_three(model: trainer.MoCo, keys: torch.Tensor, index: torch.Tensor, step: int) -> None:
        store(model, keys, index, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.MoCo, "store", stop_after_three)
        first = train(config, Runtime(tmp_path / "parts", threads=1))
    assert first.exit_code == 143
    assert max(step for step, _, _ in readings(first.dir)) == 3
    second = train(config, Runtime(tmp_path / "parts", threads=1))

    assert whole.exit_code == second.exit_code == 0
    assert second.final == whole.final
    assert same(state_of(second.dir), state_of(whole.dir))
    assert readings(second.dir) == readings(whole.dir)
    losses = [value for _, name, value in readings(whole.dir) if name == "train/loss"]
    assert len(losses) == 6 and all(map(math.isfinite, losses))


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = small()
    first = train(config, Runtime(tmp_path, threads=1))
    before = {path: path.stat().st_mtime_ns for path in first.dir.rglob("*")}
    again = train(config, Runtime(tmp_path, threads=1))
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in first.dir.rglob("*")} == before


def test_other_images_under_the_name_of_a_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the images is in a run's signature, their content is not: it is compared."""
    train(small(), Runtime(tmp_path, threads=1))
    monkeypatch.setattr(images, "load", lambda name: replace(noise(), digest="other"))
    with pytest.raises(UserError, match=r"data.name = noise: its images are other, and .* began with none"):
        train(small(), Runtime(tmp_path, threads=1))

    def gone(name: str) -> Images:
        raise UserError("no such images")

    monkeypatch.setattr(images, "load", gone)
    assert train(small(), Runtime(tmp_path, threads=1)).state == "finished already"


def test_arms_of_one_seed_see_the_same_start_and_the_same_first_batch(tmp_path: Path) -> None:
    """Arms differ in what the sweep varies and in nothing else: with m alone, the first loss is the same."""
    a, b = (train(small({"m": m}), Runtime(tmp_path, threads=1)) for m in (0, 0.999))
    assert a.signature != b.signature
    assert readings(a.dir)[:4] == readings(b.dir)[:4]  # the four train/* of step 1
    assert readings(a.dir) != readings(b.dir)


@pytest.mark.parametrize("change", [{"dictionary": {"K": 32}}, {"m": 0.9}, {"T": 0.1}], ids=["K", "m", "T"])
def test_an_arm_never_continues_another_arm(change: dict[str, Any], tmp_path: Path) -> None:
    """solo-learn's resumer takes the newest checkpoint that it finds, whoever's it is."""
    alone = train(small(change), Runtime(tmp_path / "alone", threads=1))
    train(small(), Runtime(tmp_path / "both", threads=1))
    beside = train(small(change), Runtime(tmp_path / "both", threads=1))
    assert same(state_of(beside.dir), state_of(alone.dir))
    assert readings(beside.dir) == readings(alone.dir)


def test_a_run_continues_with_the_threads_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another number of threads adds in another order, so the bits would not be those of an unbroken run."""
    monkeypatch.setattr(RunRecord, "stop", "SIGTERM")
    begun = train(small(), Runtime(tmp_path, threads=2))
    assert begun.exit_code == 143
    torch.set_num_threads(1)
    train(small(), Runtime(tmp_path))
    assert torch.get_num_threads() == 2
    assert "threads" not in capfd.readouterr().err
    train(small(), Runtime(tmp_path, threads=1))
    assert torch.get_num_threads() == 1
    assert "begun with 2 threads and continued with 1" in capfd.readouterr().err


def test_a_run_continued_by_other_numerics_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunRecord, "stop", "SIGTERM")
        train(small(), Runtime(tmp_path, threads=1))
        train(small(), Runtime(tmp_path, threads=1))
    assert "numerics" not in capfd.readouterr().err
    before = schema.NUMERICS
    monkeypatch.setattr(schema, "NUMERICS", before + 1)
    train(small(), Runtime(tmp_path, threads=1))
    assert f"begun by numerics {before} and continued by {before + 1}" in capfd.readouterr().err


def test_accumulation_is_one_key_update_and_one_enqueue_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("update_key_encoder", "store", "forward"):
        original = getattr(trainer.MoCo, name)

        def counted(model: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(model, *args)

        monkeypatch.setattr(trainer.MoCo, name, counted)
    outcome = train(small({"optimiser.accumulate": 4}), Runtime(tmp_path, threads=1))
    assert calls == ["update_key_encoder", "forward", "forward", "forward", "forward", "store"] * 6
    assert int(state_of(outcome.dir)["model"]["dictionary.pointer"]) == 6 * 16 % 24


def test_no_epochs_evaluate_the_encoder_as_initialised(tmp_path: Path) -> None:
    outcome = train(small({"optimiser.epochs": 0}), Runtime(tmp_path, threads=1))
    assert set(outcome.final) == {"knn", "knn_output", "linear"}
    pixels = train(small({"optimiser.epochs": 0, "encoder.arch": "pixels"}), Runtime(tmp_path, threads=1))
    assert set(pixels.final) == {"knn", "knn_output", "linear"}


def test_knn_while_training_is_logged_at_its_epochs(tmp_path: Path) -> None:
    outcome = train(small({"evaluation.every_epochs": 1}), Runtime(tmp_path, threads=1))
    assert [step for step, name, _ in readings(outcome.dir) if name == "knn"] == [3, 6]


def test_evaluations_and_diagnostics_do_not_move_the_training(tmp_path: Path) -> None:
    plain = train(small(), Runtime(tmp_path, threads=1))
    read = train(small({"evaluation.every_epochs": 1, "consistency": {"every_steps": 1}}), Runtime(tmp_path, threads=1))
    assert same(state_of(plain.dir), state_of(read.dir))
    assert any(name.startswith("consistency/cosine_age_") for _, name, _ in readings(read.dir))


def test_the_learning_rate_falls_where_the_paper_says() -> None:
    """×0.1 at epochs 120 and 160 of 200 (Section 4.1)."""
    paper = resolve({}, "t")
    assert [lr_at(paper, epoch * 10, 10) for epoch in (0, 119, 120, 159, 160, 199)] == pytest.approx(
        [0.03, 0.03, 0.003, 0.003, 0.0003, 0.0003]
    )
    cosine = resolve({"optimiser": {"schedule": "cosine", "epochs": 2}}, "t")
    assert [lr_at(cosine, step, 4) for step in (0, 4, 8)] == pytest.approx([0.03, 0.015, 0])


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("every", [0, 1])
def test_a_run_that_diverges_ends_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mechanism: str, every: int
) -> None:
    """Whatever is read of it on the way: the loss has the last word, at the step at which it is no number."""
    change = {"optimiser": {"lr": 1e30, "epochs": 20}, "consistency": {"every_steps": every}}
    outcome = train(small(merge(MECHANISMS[mechanism], change)), Runtime(tmp_path, threads=1))
    assert outcome.exit_code == 0 and math.isnan(outcome.final["knn"])
    found = readings(outcome.dir)
    ends = [step for step, name, value in found if name == "train/loss" and math.isnan(value)]
    assert len(ends) == 1 and max(step for step, _, _ in found) == ends[0] == outcome.diverged
    known = status.read(outcome.dir)
    assert known is not None and known.diverged == known.step == ends[0] and known.steps == 60
    assert f"not finite at step {ends[0]}: the run has diverged" in capfd.readouterr().err
    assert all(math.isfinite(value) for _, name, value in found if name.startswith("consistency/"))


def test_an_exception_is_kept_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(RunRecord, "save", boom)
    with pytest.raises(RuntimeError, match="boom"):
        train(small(), Runtime(tmp_path, threads=1))
    folder = tmp_path / small().signature
    assert "boom" in (folder / "traceback.txt").read_text()
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}]
import test_trainer as t
t.images.load = lambda name: t.noise()
from study.train.trainer import train, Runtime
from pathlib import Path
import json, signal
log = t.RunRecord.log
def first_log(*arguments):
    t.RunRecord.log = log
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))  # nothing handles it: it ends as by kill -9
    log(*arguments)
t.RunRecord.log = first_log
config = t.small(json.loads(sys.argv[2]))
sys.exit(train(config, Runtime(Path(sys.argv[1]), threads=1, checkpoint_every=0.05)).exit_code)
"""


def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Again and again: journal, checkpoint and final metrics equal those of an unbroken run."""
    change = {"optimiser.epochs": 60, "evaluation.every_epochs": 20, "consistency": {"every_steps": 30}}
    began = time.monotonic()
    whole = train(small(change), Runtime(tmp_path / "whole", threads=1))
    window = (time.monotonic() - began) / 8
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, str(tmp_path / "killed"), json.dumps(change)]
    folder = tmp_path / "killed" / whole.signature
    random = np.random.default_rng(1)

    def attempt(seconds: float) -> int:
        return subprocess.run([*command, str(seconds)], capture_output=True, check=False).returncode

    def known() -> dict[str, Any]:
        return json.loads((folder / "status.json").read_text())

    kills = 0
    while kills < 5 and attempt(random.uniform(0.001, window)) == -signal.SIGALRM and known()["state"] != "finished":
        kills += 1
    assert kills >= 2
    assert attempt(0) == 0  # without an end, if it has not come to its own
    assert readings(folder) == readings(whole.dir)
    assert same(state_of(folder), state_of(whole.dir))
    assert known()["attempt"] == kills + 1
