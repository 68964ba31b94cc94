import fcntl
import json
import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from run_fixture import kill_after, start

from study.run import files, lock
from study.run.lock import Lock, RunLocked, RunRemoved
from study.run.status import STALE_S


def generation(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "lock").iterdir())


def held_elsewhere(folder: Path, number: int, age: float, **changes: object) -> Path:
    """The file of a holder on another machine whose heart beat ``age`` seconds ago."""
    holder = {"host": "node7", "pid": 4242, "started": 1.79e9, "job_id": "31_2", "kernel": "other"} | changes
    path = folder / "lock" / f"{number:06d}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(holder))
    os.utime(path, (time.time() - age,) * 2)
    return path


def try_to_hold(report: Connection, folder: Path, at: float) -> None:
    time.sleep(max(0.0, at - time.time()))
    try:
        held = Lock(folder)
    except RunLocked as locked:
        report.send(("refused", locked.holder and locked.holder.pid))
        return
    report.send(("held", os.getpid()))
    time.sleep(30)
    held.release()


def hold(report: Connection, folder: Path) -> None:
    held = Lock(folder)
    report.send(os.getpid())
    time.sleep(30)
    held.release()


def hold_with_a_worker(report: Connection, folder: Path) -> None:
    held = Lock(folder)
    worker = os.fork()
    if worker == 0:
        report.close()
        time.sleep(30)
        os._exit(0)
    report.send(worker)
    time.sleep(30)
    held.release()


def test_a_second_process_is_told_who_holds_the_run(tmp_path):
    process, report = start(hold, tmp_path)
    pid = report.recv()
    with pytest.raises(RunLocked, match=rf"process {pid} on {socket.gethostname()}, since 20") as caught:
        Lock(tmp_path)
    assert caught.value.exit_code == 0
    assert "\n" not in str(caught.value)
    process.kill()
    process.join()


def test_a_lock_given_back_is_free(tmp_path):
    for _ in range(3):
        Lock(tmp_path).release()
    assert generation(tmp_path) == [3]
    assert lock.holder(tmp_path) is None


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path):
    (pid,) = kill_after(0, hold, tmp_path)
    assert lock.holder(tmp_path).pid == pid
    held = Lock(tmp_path)
    assert lock.holder(tmp_path).pid == os.getpid()
    assert generation(tmp_path) == [2]
    held.release()


def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path):
    (worker,) = kill_after(0, hold_with_a_worker, tmp_path)
    os.kill(worker, 0)
    try:
        Lock(tmp_path).release()
    finally:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("before", ["nothing", "given back", "dead", "dead on another machine"])
def test_of_many_that_start_at_once_one_gets_the_run(tmp_path, before):
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        if before == "given back":
            Lock(folder).release()
        if before == "dead":
            kill_after(0, hold, folder)
        if before == "dead on another machine":
            held_elsewhere(folder, 1, STALE_S + 5)
        at = time.time() + 0.05
        begun = [start(try_to_hold, folder, at) for _ in range(6)]
        answers = [report.recv() for _, report in begun]
        for process, _ in begun:
            process.kill()
            process.join()
        winners = [pid for answer, pid in answers if answer == "held"]
        assert len(winners) == 1, answers
        assert {pid for _, pid in answers} == {winners[0]}, "a refused one was told of another holder"


def test_a_holder_on_another_machine_is_judged_by_its_heartbeat(tmp_path):
    held_elsewhere(tmp_path, 3, STALE_S - 5)
    with pytest.raises(RunLocked, match=r"process 4242 on node7, job 31_2"):
        Lock(tmp_path)
    held_elsewhere(tmp_path, 3, STALE_S + 5)
    Lock(tmp_path).release()
    assert generation(tmp_path) == [4]


def test_clocks_of_the_machines_do_not_matter(tmp_path, monkeypatch):
    held_elsewhere(tmp_path, 1, 0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    with pytest.raises(RunLocked):
        Lock(tmp_path)


def test_a_beating_holder_stays_fresh(tmp_path):
    held = Lock(tmp_path)
    path = tmp_path / "lock" / "000001"
    os.utime(path, (1.0, 1.0))
    held.beat()
    assert time.time() - path.stat().st_mtime < 5
    held.release()


def test_without_flock_the_heartbeat_decides_on_the_same_machine_too(tmp_path, monkeypatch):
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    held = Lock(tmp_path)
    with pytest.raises(RunLocked):
        Lock(tmp_path)
    os.utime(tmp_path / "lock" / "000001", (time.time() - STALE_S - 5,) * 2)
    second = Lock(tmp_path)
    with pytest.raises(RunLocked):
        held.beat()
    held.release()
    second.release()


def test_a_holder_that_was_taken_for_dead_notices_and_disturbs_nobody(tmp_path):
    suspended = Lock(tmp_path)
    taker = held_elsewhere(tmp_path, 2, 0)
    with pytest.raises(RunLocked, match="node7"):
        suspended.beat()
    taker.rename(held_elsewhere(tmp_path, 3, 0))
    (tmp_path / "lock" / "000001").unlink()
    with pytest.raises(RunLocked, match="node7"):
        suspended.beat()
    suspended.release()
    assert lock.holder(tmp_path).host == "node7"


def test_a_slow_starter_does_not_take_the_place_of_those_who_came_and_went(tmp_path, monkeypatch):
    held_elsewhere(tmp_path, 1, STALE_S + 5)
    judge, others = Lock._alive, []

    def slow(self: Lock, path: Path) -> bool:
        alive = judge(self, path)
        if not others:  # found dead; meanwhile one takes it over and gives it back, and another takes it
            monkeypatch.setattr(Lock, "_alive", judge)
            Lock(tmp_path).release()
            others.append(Lock(tmp_path))
        return alive

    monkeypatch.setattr(Lock, "_alive", slow)
    with pytest.raises(RunLocked, match=f"process {os.getpid()}"):
        Lock(tmp_path)
    others[0].beat()
    assert generation(tmp_path) == [3]
    others[0].release()


def test_what_killed_starters_left_is_removed_and_what_starters_write_is_not(tmp_path):
    Lock(tmp_path).release()
    old, new = files.temporary(tmp_path / "lock" / "lock"), files.temporary(tmp_path / "lock" / "lock")
    old.write_text("")
    os.utime(old, (time.time() - STALE_S - 5,) * 2)
    new.write_text("")
    Lock(tmp_path).release()
    assert not old.exists()
    assert new.exists()


def test_a_folder_that_is_half_removed_is_not_taken_for_another_process(tmp_path):
    """rmtree takes the lock away before the folder."""
    held = Lock(tmp_path)
    for file in (tmp_path / "lock").iterdir():
        file.unlink()
    with pytest.raises(RunRemoved):
        held.beat()


def test_a_lock_that_a_power_cut_left_empty_is_free(tmp_path):
    held_elsewhere(tmp_path, 5, 0).write_bytes(b"")
    Lock(tmp_path).release()
