"""The pool with real processes: threads, faults, signals, a dead parent, two launchers, dependencies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sweep_files import write

from study.launch import local, plan, progress, record
from study.launch.pool import Options
from study.run import status
from study.run.lock import Lock
from study.sweep.grid import Sweep, load

HELPERS = Path(__file__).parents[1] / "helpers"
FAKE = (sys.executable, str(HELPERS / "pool_trainer.py"))
TWO = "axes: {m: [0, 0.5]}\n"
THREE = "axes: {m: [0, 0.5, 0.9]}\n"
LAUNCHER = """
import sys
from pathlib import Path
from study.launch import local, plan, record
from study.sweep.grid import load
from study.launch.pool import Options
sweep, runs_dir = load(Path(sys.argv[1]), "tiny"), Path(sys.argv[2])
record.write(sweep, runs_dir)
options = Options(2, wait="wait" in sys.argv, trainer=sys.argv[3:5])
sys.exit(local.launch(plan.make(sweep, runs_dir), runs_dir, options, mirror=False))
"""


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def run(sweep: Sweep, runs_dir: Path, workers: int = 2, threads: int = 1, wait: bool = False) -> int:
    record.write(sweep, runs_dir)
    return local.launch(
        plan.make(sweep, runs_dir), runs_dir, Options(workers, threads, wait, trainer=FAKE), mirror=False
    )


def states(sweep: Sweep, runs_dir: Path) -> dict[str, str]:
    return {row.point.name: row.state for row in plan.make(sweep, runs_dir).rows}


def faults(runs_dir: Path, **by_m: str) -> None:
    runs_dir.mkdir(exist_ok=True)
    (runs_dir / "faults.json").write_text(json.dumps({key.replace("_", "."): fault for key, fault in by_m.items()}))


def trained(runs_dir: Path) -> list[dict[str, Any]]:
    path = runs_dir / "trained.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts launchers as processes of their own; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LAUNCHER, str(path), str(tmp_path / "runs"), *FAKE, *words]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    (tmp_path / "runs" / "go").touch()
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    for child in trained(tmp_path / "runs"):
        with suppress(ProcessLookupError):
            os.kill(child["pid"], signal.SIGKILL)


def test_each_point_is_trained_once_with_its_threads_set_and_its_log_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, runs = load(write(tmp_path, TWO), "tiny"), tmp_path / "runs"
    assert run(sweep, runs, threads=3) == 0
    assert set(states(sweep, runs).values()) == {"done"}
    assert Counter(child["omp"] for child in trained(runs)) == {"3": 2}
    for point in sweep.points:
        assert f"training {point.signature}" in (runs / point.signature / "log.txt").read_text()
    capsys.readouterr()
    assert run(sweep, runs) == 0
    assert len(trained(runs)) == 2
    assert capsys.readouterr().err == "", "the plan says that there is nothing to run"


def test_a_failed_point_is_listed_with_its_error_and_the_others_are_unharmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, runs = load(write(tmp_path, THREE), "tiny"), tmp_path / "runs"
    faults(runs, **{"0_0": "crash", "0_5": "die"})
    assert run(sweep, runs) == 1
    assert states(sweep, runs) == {"m=0 seed=0": "failed", "m=0.5 seed=0": "missing", "m=0.9 seed=0": "done"}
    said = capsys.readouterr().err
    assert "ValueError: the loss is a pineapple" in said
    assert "last words" in said
    faults(runs)
    assert run(sweep, runs) == 0


def test_a_folder_that_cannot_be_used_fails_its_point_alone(tmp_path: Path) -> None:
    sweep, runs = load(write(tmp_path, TWO), "tiny"), tmp_path / "runs"
    runs.mkdir()
    (runs / sweep.points[0].signature).write_text("in the way")
    assert run(sweep, runs) == 1
    assert states(sweep, runs)["m=0.5 seed=0"] == "done"


def test_ctrl_c_lets_the_children_save_exits_130_and_the_same_command_continues(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    path, runs = write(tmp_path, THREE), tmp_path / "runs"
    faults(runs, **{"0_0": "hang", "0_5": "hang"})
    process = launcher(path)
    until(lambda: len(trained(runs)) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    sweep = load(path, "tiny")
    assert [status.read(runs / point.signature) is None for point in sweep.points] == [False, False, True]
    assert not any(alive(child["pid"]) for child in trained(runs))
    seen = status.read(runs / sweep.points[0].signature)
    assert seen is not None
    assert seen.state == "killed"
    faults(runs)
    assert run(sweep, runs) == 0
    assert set(states(sweep, runs).values()) == {"done"}


def test_a_second_ctrl_c_kills_what_does_not_stop(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    runs = tmp_path / "runs"
    faults(runs, **{"0_0": "deaf", "0_5": "hang"})
    process = launcher(write(tmp_path, TWO))
    children = until(lambda: len(found := trained(runs)) == 2 and found)
    process.send_signal(signal.SIGINT)
    until(lambda: sum(alive(child["pid"]) for child in children) == 1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert not any(alive(child["pid"]) for child in children)
    assert "2 stopped\n" in process.communicate()[1]


@pytest.mark.parametrize("killed", [True, False])
def test_a_point_that_says_it_was_saved_is_stopped_however_it_ends(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]], killed: bool
) -> None:
    path, runs = write(tmp_path, TWO), tmp_path / "runs"
    faults(runs, **{"0_0": "slow", "0_5": "slow"})
    process = launcher(path)
    until(lambda: len(trained(runs)) == 2)
    process.send_signal(signal.SIGINT)
    saved = [runs / point.signature / "log.txt" for point in load(path, "tiny").points]
    until(lambda: all("to be continued" in log.read_text() for log in saved))
    if killed:
        process.send_signal(signal.SIGINT)
    else:
        (runs / "go").touch()
    assert process.wait(20) == 130
    said = process.communicate()[1]
    assert "2 stopped\n" in said
    assert "failed" not in said


def test_the_children_end_when_their_launcher_is_killed(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    path, runs = write(tmp_path, TWO), tmp_path / "runs"
    faults(runs, **{"0_0": "hang", "0_5": "hang"})
    process = launcher(path)
    children = until(lambda: len(found := trained(runs)) == 2 and found)
    process.kill()
    until(lambda: not any(alive(child["pid"]) for child in children))
    assert set(states(load(path, "tiny"), runs).values()) == {"missing"}


def test_two_launchers_at_once_train_no_point_twice(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    path, runs = write(tmp_path, "axes: {m: [0, 0.5, 0.9, 0.99]}\n"), tmp_path / "runs"
    faults(runs, **{"0_0": "hang", "0_9": "hang"})
    both = [launcher(path, "wait"), launcher(path, "wait")]
    until(lambda: len(trained(runs)) >= 3)
    (runs / "go").touch()
    assert [process.wait(30) for process in both] == [0, 0]
    assert Counter(child["signature"] for child in trained(runs)) == {
        point.signature: 1 for point in load(path, "tiny").points
    }


def test_a_point_that_stops_elsewhere_is_taken_over_by_who_waits(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    path, runs = write(tmp_path, TWO), tmp_path / "runs"
    faults(runs, **{"0_0": "hang", "0_5": "hang"})
    first = launcher(path)
    until(lambda: len(trained(runs)) == 2)
    faults(runs)
    second, brief = launcher(path, "wait"), launcher(path)
    assert brief.wait(20) == 0
    assert "elsewhere" in brief.communicate()[1]
    assert second.poll() is None
    first.kill()
    assert second.wait(30) == 0
    assert "2 done\n" in second.communicate()[1]
    assert set(states(load(path, "tiny"), runs).values()) == {"done"}


@pytest.mark.parametrize("shows", [True, False])
def test_a_point_found_locked_is_in_other_hands_if_something_runs_there_and_failed_if_nothing_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shows: bool
) -> None:
    sweep, runs = load(write(tmp_path, TWO), "tiny"), tmp_path / "runs"
    record.write(sweep, runs)
    made = plan.make(sweep, runs)
    folder = runs / sweep.points[0].signature
    folder.mkdir()
    lock = Lock(folder)
    if shows:
        here = status.Status(folder.name, "running", 1, host=socket.gethostname(), pid=os.getpid())
        here.heartbeat = time.time()
        status.write(folder, here, durable=False)
    assert local.launch(made, runs, Options(2, trainer=FAKE), mirror=False) == (0 if shows else 1)
    said = capsys.readouterr().err
    assert ("elsewhere: another process runs it" if shows else "another process holds it, and nothing runs") in said
    assert [child["signature"] for child in trained(runs)] == [sweep.points[1].signature]
    lock.release()


def test_a_probe_waits_for_its_pretraining_and_is_blocked_when_that_fails(tmp_path: Path) -> None:
    sweep, runs = load(write(tmp_path, TWO + "base: {probe: {epochs: 1}}\n"), "tiny"), tmp_path / "runs"
    faults(runs, **{"0_0": "crash"})
    assert run(sweep, runs, workers=4) == 1
    assert states(sweep, runs) == {
        "m=0 seed=0": "failed",
        "m=0 seed=0 probe": "blocked",
        "m=0.5 seed=0": "done",
        "m=0.5 seed=0 probe": "done",
    }
    order = [child["signature"] for child in trained(runs)]
    good, probe = sweep.points[2], sweep.points[3]
    assert order.index(good.signature) < order.index(probe.signature)
    faults(runs)
    assert run(sweep, runs) == 0


def test_the_count_includes_the_points_that_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second launcher that waits for the points of a killed first one counts them in its total, too."""
    sweep, runs = load(write(tmp_path, TWO), "tiny"), tmp_path / "runs"
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    record.write(sweep, runs)
    folder = runs / sweep.points[0].signature
    folder.mkdir(parents=True)
    with subprocess.Popen(["sleep", "2"]) as orphan:  # gone after a while: its point is taken over
        running = status.Status(folder.name, "running", 1, host=socket.gethostname(), pid=orphan.pid)
        running.heartbeat = time.time()
        status.write(folder, running, durable=False)
        reaper = threading.Thread(target=orphan.wait)
        reaper.start()
        assert run(sweep, runs, wait=True) == 0
        reaper.join()
    counted = set(re.findall(r"(\d+) of (\d+) points", capsys.readouterr().err))
    assert counted <= {("0", "2"), ("1", "2"), ("2", "2")}
    assert ("1", "2") in counted


def test_a_launcher_can_be_stopped_from_outside(tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]) -> None:
    path, runs = write(tmp_path, THREE), tmp_path / "runs"
    faults(runs, **{"0_0": "hang", "0_5": "hang"})
    process = launcher(path)
    until(lambda: len(trained(runs)) == 2)
    signatures = {point.signature for point in load(path, "tiny").points}
    assert local.running_here(runs, signatures) == {child["signature"]: child["pid"] for child in trained(runs)}
    assert local.stop_launchers(runs, "small-tiny") == 1
    assert process.wait(20) == 143
    assert local.stop_launchers(runs, "small-tiny") == 0
    assert len(trained(runs)) == 2
    assert list((runs / "sweeps").glob("*.launcher")) == []
