"""Accidents to real processes, in small: `make torture` shows them in full, with figures."""

import random
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import mlflow.tracking  # noqa: F401  # once, and not in each forked process
import pytest
import torch
from accidents import Server, Trainee, tracked_points
from run_fixture import MEGABYTE, kill_after, mount
from torture import crowd, kills
from tracking_fixture import Proxy, fresh_store, line, make, set_status, sweep

from study.run import journal, record, status
from study.run.files import StorageError
from study.run.record import RunRecord
from study.tracking import store
from study.tracking.mirror import Mirror

SHORT = ("optimiser.epochs=3", "evaluation.every_epochs=2", "evaluation.linear_epochs=0", "consistency.every_steps=8")


def test_training_killed_in_the_middle_is_bit_equal_and_whole_in_mlflow(tmp_path: Path) -> None:
    """The bank, whose writes are of rows: a continued run must not refresh one twice."""
    figures = kills(tmp_path, hard=1, polite=1, mechanisms=("bank",), length=SHORT)
    assert figures["passed"], figures
    assert figures["signals"] == {"SIGKILL": 1, "SIGTERM": 1}


def test_processes_that_finish_at_once_are_all_in_a_store_that_was_not_there(tmp_path: Path) -> None:
    figures = crowd(tmp_path, 8)
    assert figures["passed"], figures


def test_a_server_that_is_killed_while_it_is_written_loses_and_doubles_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    folders = [make(runs, seed, steps=1200) for seed in range(4)]
    sweep(runs, folders)
    with Server(fresh_store(tmp_path / "store")) as server:
        proxy = Proxy(int(server.uri.rpartition(":")[2]))
        killer = threading.Timer(0.002, server.kill)

        def kill_in_the_middle(method: str, path: str) -> None:
            if path.endswith("log-batch") and list(runs.glob("*/mirror.json")) and not killer.ident:
                killer.start()

        proxy.fault = kill_in_the_middle
        mirror = Mirror(runs, proxy.uri)
        broken = mirror.sync()
        killer.join()
        assert broken.error is not None and "\n" not in broken.error and 0 < broken.created < 4
        with (folders[0] / "metrics.jsonl").open("a") as file:
            file.write(line(1201, {"train/loss": 0.5}))
        set_status(folders[0], state="finished")
        server.start()
        assert mirror.sync().complete
        counts = tracked_points(server.uri, runs)
        proxy.close()
    points = 4 * (2 * 1200 + 1) + 1
    assert counts == {"runs": 4, "in Default": 0, "not FINISHED": 0, "points": points, "lost": 0, "doubled": 0}


def mirror_in_child(report: Connection, runs: Path) -> None:
    report.send("begun")
    report.send(Mirror(runs).sync().json())


def test_a_mirror_killed_at_any_moment_loses_and_doubles_nothing(tmp_path: Path) -> None:
    runs, chance = tmp_path / "runs", random.Random(0)
    kept = fresh_store(runs)
    folders = [make(runs, seed, steps=500, state="running") for seed in range(4)]
    sweep(runs, folders)
    interrupted, passes, window = 0, 0, 0.5
    while interrupted < 8:
        for folder in folders:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(line(501 + passes, {"train/loss": 0.5, "train/lr": 0.03}))
        passes += 1
        if len(kill_after(chance.uniform(0.0, window), mirror_in_child, runs)) == 1:
            interrupted += 1
        else:
            window *= 0.9  # it was faster
    for folder in folders:
        set_status(folder, state="finished")
    assert Mirror(runs).sync().complete
    counts = tracked_points(kept.uri, runs)
    assert (counts["runs"], counts["not FINISHED"], counts["lost"], counts["doubled"]) == (4, 0, 0, 0)


def small_training(run: RunRecord, until: int) -> None:
    """A trainer in small: its weights depend on every step before."""
    weights, step = torch.ones(50_000, dtype=torch.float64), 0
    if (saved := run.latest()) is not None:
        step, weights = saved[0], saved[1]["weights"]
    while step < until and not run.stop:
        weights.mul_(1.001).add_(step)
        step += 1
        run.log(step, {"train/loss": float(weights[0])})
        if step % 10 == 0:
            run.save(step, {"weights": weights})


def values(folder: Path) -> dict[tuple[int, str], float]:
    return {(r.step, r.name): r.value for r in journal.tail(folder / "metrics.jsonl")[0]}


def test_a_disk_that_fails_under_open_files_loses_nothing_that_a_checkpoint_rests_on(tmp_path: Path) -> None:
    """ext4 that aborts turns read-only under the run and forgets what was not synced, as in a power cut."""
    config, command = Trainee(tmp_path, ()).config, ["torture"]
    with record.start(tmp_path / "unbroken", config, command=command) as whole:
        small_training(whole, 200)
    image, room = tmp_path / "image", tmp_path / "disk"
    room.mkdir()
    with image.open("wb") as file:
        file.truncate(32 * MEGABYTE)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mount("-o", "loop", str(image), str(room))
    try:
        with (
            pytest.raises(StorageError, match=r"Read-only file system|Input/output error") as caught,
            record.start(room / "runs", config, command=command) as broken,
        ):
            small_training(broken, 60)
            while not list(broken.dir.glob("checkpoints/*60-*.pt")):
                time.sleep(0.001)
            mount("-o", "remount,abort", str(room))
            small_training(broken, 200)
        assert "\n" not in str(caught.value)
        subprocess.run(["umount", str(room)], check=True)
        mount("-o", "loop", str(image), str(room))
        with record.start(room / "runs", config, command=command) as mended:
            assert mended.attempt == 2
            small_training(mended, 200)
        assert values(mended.dir) == values(whole.dir)
        assert len(values(mended.dir)) == len(journal.read(mended.dir / "metrics.jsonl")) == 200
    finally:
        subprocess.run(["umount", "-l", str(room)], check=True)


def test_a_clock_set_back_between_two_attempts_changes_no_value_and_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, real = Trainee(tmp_path, ()).config, time.time
    fresh_store(tmp_path)
    mirror = Mirror(tmp_path)
    with record.start(tmp_path, config, command=["torture"]) as run:
        small_training(run, 30)
    assert mirror.sync().complete
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    assert status.effective(run.dir) == "killed"
    with record.start(tmp_path, config, command=["torture"]) as run:
        assert status.effective(run.dir) == "running"
        small_training(run, 60)
        run.finish({})
    assert mirror.sync().complete
    times = [reading.time_ms for reading in journal.tail(run.dir / "metrics.jsonl")[0]]
    assert len(times) == 60 and times == sorted(times)
    known = status.read(run.dir)
    assert known is not None and known.ended is not None and known.ended >= known.started
    counts = tracked_points(store.resolve(tmp_path).uri, tmp_path)
    assert (counts["runs"], counts["points"], counts["lost"], counts["doubled"]) == (1, 60, 0, 0)
