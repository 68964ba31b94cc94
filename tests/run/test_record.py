import dataclasses
import json
import math
import os
import random
import shutil
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_fixture import MEGABYTE, fill, kill_after, mount, run_through, small_disk, start

from study.config.schema import Config
from study.errors import UserError
from study.run import journal, lock, provenance, record, status
from study.run.files import StorageError
from study.run.lock import RunLocked
from study.run.record import RunRecord

CONFIG = Config(seed=3)
STEPS = 400


@pytest.fixture(autouse=True)
def _quick_heart(monkeypatch):
    monkeypatch.setenv("STUDY_HEARTBEAT_S", "0.02")
    monkeypatch.setattr(provenance, "code", dict.fromkeys(("commit", "branch", "dirty", "untracked", "diff")).copy)


def begin(runs_dir: Path):
    return record.start(runs_dir, CONFIG, command=["study", "train", "seed=3"])


def train(run: RunRecord, *, until: int = STEPS, every: int = 20, size: int = 1) -> None:
    """A trainer in small: its weights depend on every step before."""
    weights = torch.ones(size, dtype=torch.float64)
    step = 0
    if (saved := run.latest()) is not None:
        step, state = saved
        weights.copy_(state["weights"])
    run.progress(phase="train", step=step, steps=STEPS)
    while step < until and not run.stop:
        weights.mul_(1.001).add_(math.sin(step))
        step += 1
        run.log(step, {"train/loss": float(weights[0]), "train/lr": 0.03 / step})
        run.progress(step=step)
        if step % every == 0 or step == until:
            run.save(step, {"weights": weights})
    if step == STEPS:
        run.log(step, {"knn": float(weights[0])})
        run.finish({"knn": float(weights[0])})


def everything(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def values(folder: Path) -> dict[tuple[int, str], float]:
    return {(r.step, r.name): r.value for r in journal.read(folder / "metrics.jsonl")}


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> dict[tuple[int, str], float]:
    runs_dir = tmp_path_factory.mktemp("unbroken")
    with begin(runs_dir) as run:
        train(run)
    return values(run.dir)


# ------------------------------------------------------------------------------------------------- the life of a run


def test_a_run_lies_in_the_folder_of_its_signature_with_all_that_belongs_to_it(tmp_path, unbroken):
    with begin(tmp_path) as run:
        assert (run.finished, run.attempt, run.stop, run.final) == (False, 1, None, {})
        assert status.effective(run.dir) == "running"
        train(run)
    assert run.dir == tmp_path / CONFIG.signature
    assert {path.name for path in run.dir.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "lock",
        "metrics.jsonl",
        "provenance.json",
        "status.json",
    }
    found = status.read(run.dir)
    assert (found.state, found.phase, found.step, found.steps, found.error) == ("finished", "train", STEPS, STEPS, None)
    assert found.final == run.final == {"knn": unbroken[STEPS, "knn"]}
    assert found.started <= found.ended <= time.time()
    assert (found.host, found.pid) == (os.uname().nodename, os.getpid())
    assert len(values(run.dir)) == 2 * STEPS + 1
    assert Config.model_validate(__import__("yaml").safe_load((run.dir / "config.yaml").read_text())) == CONFIG


def test_a_finished_run_says_so_and_is_left_as_it_is(tmp_path):
    with begin(tmp_path) as run:
        train(run)
    before = everything(tmp_path)
    with begin(tmp_path) as again:
        assert again.finished
        assert again.final == run.final
        with pytest.raises(RuntimeError, match="only read"):
            again.log(1, {"a": 1.0})
    assert everything(tmp_path) == before


def test_a_run_that_another_process_finished_while_this_one_waited_is_not_run_again(tmp_path, monkeypatch):
    def slow(folder: Path) -> lock.Lock:
        monkeypatch.setattr(record, "Lock", lock.Lock)
        with begin(tmp_path) as other:
            train(other)
        return lock.Lock(folder)

    monkeypatch.setattr(record, "Lock", slow)
    with begin(tmp_path) as run:
        assert run.finished
    assert len(provenance.read(run.dir)["attempts"]) == 1


def test_an_interrupted_run_continues_and_its_attempts_are_listed(tmp_path, unbroken):
    for until in (90, 210, STEPS):
        with begin(tmp_path) as run:
            train(run, until=until)
    assert values(run.dir) == unbroken
    assert run.attempt == 3
    attempts = provenance.read(run.dir)["attempts"]
    assert [(a["attempt"], a["state"], a["pid"]) for a in attempts] == [
        (1, "killed", os.getpid()),
        (2, "killed", os.getpid()),
        (3, "finished", os.getpid()),
    ]
    assert all(a["started"] <= a["ended"] for a in attempts)
    assert status.read(run.dir).started == attempts[0]["started"]


def test_a_failed_run_keeps_its_traceback_until_it_goes_on(tmp_path):
    with pytest.raises(ZeroDivisionError), begin(tmp_path) as run:
        train(run, until=50)
        1 / 0  # noqa: B018
    found = status.read(run.dir)
    assert (found.state, found.error) == ("failed", "ZeroDivisionError: division by zero")
    assert "1 / 0" in (run.dir / "traceback.txt").read_text()
    with begin(tmp_path) as run:
        assert not (run.dir / "traceback.txt").exists()
        assert status.read(run.dir).error is None
        assert run.latest()[0] == 50
        train(run)
    assert [a["state"] for a in provenance.read(run.dir)["attempts"]] == ["failed", "finished"]


@pytest.mark.parametrize(("number", "state"), [("SIGTERM", "killed"), ("SIGINT", "killed"), ("SIGUSR2", "scheduled")])
def test_a_signal_only_asks_the_run_to_stop(tmp_path, number, state):
    before = signal.getsignal(signal.Signals[number])
    with begin(tmp_path) as run:
        train(run, until=50)
        os.kill(os.getpid(), signal.Signals[number])
        assert run.stop == number
        train(run)
    assert status.read(run.dir).state == state
    assert run.stop == number
    assert signal.getsignal(signal.Signals[number]) == before
    with begin(tmp_path) as run:
        assert run.stop is None
        assert run.latest()[0] == 50


def test_a_second_interrupt_breaks_off(tmp_path):
    with pytest.raises(KeyboardInterrupt), begin(tmp_path) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert run.stop == "SIGTERM"
        os.kill(os.getpid(), signal.SIGINT)
    assert status.read(run.dir).state == "killed"
    assert not (run.dir / "traceback.txt").exists()


def tell_handlers(report: Connection) -> None:
    report.send([signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler) for number in CAUGHT])


CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def test_a_forked_worker_has_the_handlers_from_before(tmp_path):
    with begin(tmp_path):
        process, report = start(tell_handlers)
        assert report.recv() == [True, True, True]
        process.join()


def test_a_run_outside_the_main_thread_leaves_signals_alone(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    def run_it() -> bool:
        with begin(tmp_path) as run:
            train(run)
            return run.finished

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_it).result()


# --------------------------------------------------------------------------------------------------------- accidents


def train_in_child(report: Connection, runs_dir: Path) -> None:
    torch.set_num_threads(1)
    with begin(runs_dir) as run:
        report.send(run.attempt)
        while not run.finished:
            train(run)


def test_killed_at_any_moment_and_continued_it_ends_with_the_bits_of_an_unbroken_run(tmp_path, unbroken):
    chance, folder = random.Random(0), tmp_path / CONFIG.signature
    kills = 0
    while kills < 30:
        kill_after(chance.uniform(0.0, 0.006), train_in_child, tmp_path)
        kills += 1
        if status.read(folder).state == "finished":
            break
        assert status.effective(folder) == "killed"
    run_through(train_in_child, tmp_path)
    assert values(folder) == unbroken
    assert len(journal.tail(folder / "metrics.jsonl")[0]) == len(unbroken), "a replayed value was written twice"
    assert not list(folder.rglob("*.tmp"))
    attempts = provenance.read(folder)["attempts"]
    assert [a["attempt"] for a in attempts] == list(range(1, len(attempts) + 1))
    assert kills >= 3


def test_a_second_process_is_refused_while_the_first_runs(tmp_path):
    with begin(tmp_path) as run:
        before = status.read(run.dir).attempt
        with pytest.raises(RunLocked, match=f"process {os.getpid()}"), begin(tmp_path):
            pass
        assert status.read(run.dir).attempt == before
    with begin(tmp_path):
        pass


def test_a_run_taken_over_while_it_was_suspended_stops_and_touches_nothing(tmp_path):
    with pytest.raises(RunLocked, match="node7"), begin(tmp_path) as run:
        other = {"host": "node7", "pid": 1, "started": 1.79e9, "job_id": None, "kernel": "other"}
        (run.dir / "lock" / "000002").write_text(json.dumps(other))
        wait_for(lambda: run._writers.lost)
        before = everything(run.dir)
        run.log(1, {"a": 1.0})
    after = everything(run.dir)
    own = run.dir / "lock" / "000001"
    assert before.pop(own)
    assert after.pop(own)
    assert after == before
    assert lock.holder(run.dir).host == "node7"


def test_a_run_whose_folder_is_removed_says_so_and_makes_nothing(tmp_path):
    with (
        pytest.raises(lock.RunRemoved, match=f"{CONFIG.signature}: has been removed while it ran"),
        begin(tmp_path) as run,
    ):
        shutil.rmtree(run.dir)
        wait_for(lambda: run._writers.lost)
        run.log(1, {"a": 1.0})
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_run_is_refused(tmp_path):
    folder = tmp_path / CONFIG.signature
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 4\n")
    with (
        pytest.raises(UserError, match=rf"config\.yaml: signature = \w+: allowed is {CONFIG.signature}"),
        begin(tmp_path),
    ):
        pass
    (folder / "config.yaml").write_text("")
    (folder / "config.yaml").write_bytes(b"\0\0\0")
    with pytest.raises(UserError, match=r"config\.yaml"), begin(tmp_path):
        pass


@pytest.mark.parametrize("name", ["status.json", "provenance.json"])
def test_a_damaged_status_or_provenance_does_not_stop_a_run(tmp_path, name):
    with begin(tmp_path) as run:
        train(run, until=60)
    (run.dir / name).write_bytes(b"\0" * 100)
    with begin(tmp_path) as run:
        assert (run.latest()[0], run.attempt) == (60, 2)
        train(run)
    assert status.read(run.dir).state == "finished"


def test_a_damaged_checkpoint_is_said_and_the_run_ends_all_the_same(tmp_path, unbroken, capsys):
    for until in (40, 60):
        with begin(tmp_path) as run:
            train(run, until=until)
    newest = max((run.dir / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-10])
    with begin(tmp_path) as run:
        assert run.latest()[0] == 40
        train(run)
    assert f"{newest.name}: damaged" in capsys.readouterr().err
    assert f"{newest.name}: damaged" in (run.dir / "log.txt").read_text()
    assert values(run.dir) == unbroken


def test_a_note_is_not_doubled_where_the_launcher_keeps_the_output(tmp_path):
    def child(report: Connection) -> None:
        with begin(tmp_path) as run, (run.dir / "log.txt").open("ab") as log:
            os.dup2(log.fileno(), 2)
            import sys

            sys.stderr = os.fdopen(2, "w")
            run.note("hello")

    run_through(child)
    assert (tmp_path / CONFIG.signature / "log.txt").read_text().count("hello") == 1


def test_a_full_disk_ends_the_run_with_one_line_and_it_continues_when_there_is_room(tmp_path, unbroken):
    with small_disk(tmp_path / "disk", MEGABYTE) as disk:
        with begin(disk) as run:
            train(run, until=100)
        filler = fill(disk)
        with pytest.raises(StorageError, match="No space left") as caught, begin(disk) as run:
            train(run)
            run.save(STEPS, {})
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 1
        filler.unlink()
        with begin(disk) as run:
            assert run.latest()[0] >= 100
            train(run)
        assert values(run.dir) == unbroken


def test_a_disk_that_fills_up_in_mid_run_is_survived(tmp_path, unbroken):
    with small_disk(tmp_path / "disk", MEGABYTE) as disk:
        with pytest.raises(StorageError, match="No space left") as caught, begin(disk) as run:
            train(run, until=100)
            run._writers.checkpoints.drain()
            filler = fill(disk)
            train(run, size=20_000)
            run._writers.checkpoints.drain()
        assert "\n" not in str(caught.value)
        assert status.effective(run.dir, time.time() + 100) in {"failed", "killed"}
        filler.unlink()
        with begin(disk) as run:
            train(run)
        assert values(run.dir) == unbroken


def test_a_folder_that_turned_read_only_is_one_line_and_can_be_read(tmp_path, unbroken):
    with small_disk(tmp_path / "disk", 4 * MEGABYTE) as disk:
        with begin(disk) as run:
            train(run, until=100)
        mount("-o", "remount,ro", str(disk))
        with pytest.raises(StorageError, match="Read-only file system") as caught, begin(disk):
            pass
        assert "\n" not in str(caught.value)
        assert len(values(run.dir)) == 200
        mount("-o", "remount,rw", str(disk))
        with begin(disk) as run:
            train(run)
        assert values(run.dir) == unbroken
        mount("-o", "remount,ro", str(disk))
        with begin(disk) as run:
            assert run.finished


# ------------------------------------------------------------------------------------------------ status, heart, cost


def test_the_heartbeat_tells_how_far_the_run_is(tmp_path):
    with begin(tmp_path) as run:
        run.progress(phase="train", step=7, steps=9, images_per_s=100.0, threads=1)
        wait_for(lambda: status.read(run.dir).step == 7)
        first = status.read(run.dir)
        assert (first.phase, first.steps, first.images_per_s, first.threads) == ("train", 9, 100.0, 1)
        wait_for(lambda: status.read(run.dir).heartbeat > first.heartbeat)
        wait_for(lambda: status.read(run.dir).train_seconds > first.train_seconds)


def test_seconds_of_training_add_up_over_attempts_and_leave_evaluation_out(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(record, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    with begin(tmp_path) as run:
        for phase, seconds in (("train", 3.0), ("evaluate", 500.0), ("train", 4.0), ("probe", 90.0)):
            run.progress(phase=phase)
            clock.now += seconds
    assert status.read(run.dir).train_seconds == pytest.approx(7.0)
    with begin(tmp_path) as run:
        run.progress(phase="train")
        clock.now += 2.0
    assert status.read(run.dir).train_seconds == pytest.approx(9.0)


def test_a_run_seen_from_outside(tmp_path):
    (process, report), folder = start(train_in_child, tmp_path), tmp_path / CONFIG.signature
    report.recv()
    process.join()
    assert status.effective(tmp_path / "absent") == "pending"
    assert status.effective(folder) == "finished"
    found, now = status.read(folder), time.time()
    for changes, age, expected in [
        ({"host": "node7"}, status.STALE_S - 1, "running"),
        ({"host": "node7"}, status.STALE_S + 1, "killed"),
        ({"pid": process.pid}, 0, "killed"),  # gone, and on this host
        ({"pid": os.getpid()}, 0, "running"),
        ({"pid": os.getpid()}, status.STALE_S + 1, "killed"),
        ({"state": "scheduled"}, 1e6, "scheduled"),
        ({"state": "failed"}, 1e6, "failed"),
    ]:
        seen = {"state": "running", "host": found.host, "heartbeat": now - age, **changes}
        status.write(folder, dataclasses.replace(found, **seen), durable=False)
        assert status.effective(folder, now) == expected, changes


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "30"])
def test_a_heartbeat_that_would_pass_for_dead_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("STUDY_HEARTBEAT_S", text)
    with pytest.raises(UserError, match=f"STUDY_HEARTBEAT_S = {text}: allowed is"), begin(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_without_numbers_says_at_which_step_it_lost_them(tmp_path):
    with begin(tmp_path) as run:
        run.log(1, {"train/loss": 1.0})
        run.log(2, {"train/loss": math.inf, "train/lr": 0.1})
        run.log(3, {"train/loss": math.nan})
        assert run.diverged is None
        run.finish({"knn": math.nan, "linear": 0.5})
    assert run.diverged == 2
    text = (tmp_path / CONFIG.signature / "status.json").read_text()
    tree = json.loads(text, parse_constant=pytest.fail)
    assert tree["diverged"] == 2 and tree["final"] == {"knn": None, "linear": 0.5}
    known = status.read(tmp_path / CONFIG.signature)
    assert math.isnan(known.final["knn"]) and known.diverged == 2


def test_a_reading_that_is_no_number_is_no_divergence_of_a_run_that_ends_with_them(tmp_path):
    with begin(tmp_path) as run:
        run.log(2, {"consistency/cosine_oldest": math.nan})
        run.finish({"knn": 0.5})
    assert run.diverged is None and status.read(tmp_path / CONFIG.signature).diverged is None


def test_an_older_status_without_the_step_diverged_where_its_journal_says_or_else_where_it_stood(tmp_path):
    (tmp_path / "status.json").write_text(
        '{"signature": "a", "state": "finished", "attempt": 1, "step": 7, "final": {"knn": NaN}}'
    )
    assert status.read(tmp_path).diverged == 7
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 4, "time_ms": 5, "metrics": {"a": 1.0}}\n{"step": 5, "time_ms": 5, "metrics": {"a": Infinity}}\n'
    )
    assert status.read(tmp_path).diverged == 5
