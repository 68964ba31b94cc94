"""The launcher on a real one-node Slurm: what only the real one can show."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_points
from slurm_points import behave, steps

from study.launch import plan, watch
from study.run import status
from study.slurm import daemons, onenode, send
from study.slurm import state as slurm_state
from study.slurm import submit as slurm
from study.sweep.grid import Sweep

pytestmark = pytest.mark.slurm

MAX_ARRAY_SIZE = 5
SHORT_STEPS = 310  # the second look comes within 31 s
CPUS = 8  # the points of these tests sleep most of the time


def cluster(accounting: bool) -> Iterator[Path]:
    state = Path(f"/var/tmp/study-slurm-test-{os.getpid()}-{accounting:d}")  # munge and mysql must be able to enter it
    try:
        yield onenode.up(state, accounting=accounting, max_array_size=MAX_ARRAY_SIZE, cpus=CPUS)
    except onenode.CannotInstallError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))
    finally:
        onenode.down(state)


@pytest.fixture(scope="module")
def with_accounting() -> Iterator[Path]:
    yield from cluster(True)


@pytest.fixture(scope="module")
def without_accounting() -> Iterator[Path]:
    yield from cluster(False)


@pytest.fixture(scope="module")
def short_time(with_accounting: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sweep]:
    """A point whose job may take a minute, running beside the other tests: Slurm looks at time limits twice a minute,
    and may send the signal up to a minute early."""
    folder = tmp_path_factory.mktemp("short")
    sweep = slurm_points.sweep(folder, 1)
    resources = folder / "cluster.yaml"
    resources.write_text("time: 1\nsignal_s: 55\n")
    with pytest.MonkeyPatch.context() as monkeypatch:
        runs = prepare(folder, with_accounting, monkeypatch)
        behave(runs, {sweep.points[0].signature: {"steps": SHORT_STEPS}})
        assert slurm.submit(sweep, sweep.points, runs_dir=runs, cluster_config=resources) == 0
    return runs, sweep


@pytest.fixture
def runs(tmp_path: Path, with_accounting: Path, short_time: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepare(tmp_path, with_accounting, monkeypatch)


def prepare(tmp_path: Path, conf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setattr(watch, "LOOK_S", 0.3)
    monkeypatch.chdir(tmp_path)
    slurm_points.package(tmp_path, monkeypatch)
    runs_dir = tmp_path / "runs"
    behave(runs_dir, {})
    return runs_dir


def until(done: Callable[[], object], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {slurm_says('squeue', '--states=all')}"
        time.sleep(0.1)


def planned(runs: Path, sweep: Sweep) -> plan.Plan:
    return plan.make(sweep, runs, {point: (job.state, job.reason) for point, job in slurm.jobs(runs, sweep).items()})


def states(runs: Path, sweep: Sweep) -> list[str]:
    return [row.state for row in planned(runs, sweep).rows]


def finished(runs: Path, sweep: Sweep) -> bool:
    return set(states(runs, sweep)) == {"done"}


def wait(runs: Path, sweep: Sweep) -> list[str]:
    """As `submit --wait` does."""
    return [row.state for row in watch.watch(lambda: planned(runs, sweep)).rows]


def sent(runs: Path) -> int:
    """Arrays in the queue's memory that belong to this folder of runs."""
    from study.slurm import ledger

    names = {array.name for array in ledger.arrays(runs)}
    return len({task.array for task in slurm_state.queue(names).values()})


def attempt(runs: Path, signature: str) -> int:
    own = status.read(runs / signature)
    return own.attempt if own else 0


def stepped(runs: Path, signature: str, count: int = 2) -> bool:
    path = runs / signature / "steps.txt"
    return path.exists() and len(path.read_text().split()) >= count


def slurm_says(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def job_of(runs: Path, sweep: Sweep, i: int = 0) -> str:
    job = slurm.jobs(runs, sweep)[sweep.points[i].signature]
    assert job.id
    return job.id


def test_twelve_points_are_three_arrays_that_run_the_code_of_their_submission(runs: Path, tmp_path: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 12)
    behave(runs, {sweep.points[0].signature: {"fail_at": 1}})
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    (tmp_path / "code/study/launch/single.py").write_text(
        "raise SystemExit('the code was edited after the submission')"
    )
    assert sent(runs) == 3
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0, "all are in Slurm's hands"
    assert sent(runs) == 3
    until(lambda: not {"pending", "running"} & set(states(runs, sweep)))
    assert states(runs, sweep) == ["failed"] + ["done"] * 11, "one failed point does not hide the others"
    assert all(steps(runs, point.signature) == [0, 1, 2] for point in sweep.points[1:]), "each ran once"
    job = status.read(runs / sweep.points[0].signature)
    assert job and job.job_id
    until(lambda: "1:0" in slurm_says("sacct", "-n", "-X", "-P", "-j", job.job_id, "-o", "ExitCode"))


def test_a_preempted_point_saves_at_the_step_and_continues(runs: Path, tmp_path: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 1)
    point = sweep.points[0].signature
    behave(runs, {point: {"steps": 30}})
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    until(lambda: stepped(runs, point))
    urgent = ["sbatch", "--parsable", "--partition=urgent", f"--cpus-per-task={CPUS}", "--output=/dev/null"]
    slurm_says(*urgent, "--wrap=sleep 1")
    until(lambda: (own := status.read(runs / point)) is not None and own.state == "scheduled")
    assert states(runs, sweep) in (["pending"], ["running"]), "not missing: Slurm has it"
    until(lambda: finished(runs, sweep))
    assert steps(runs, point) == list(range(30)), "no step twice and none left out"
    assert attempt(runs, point) == 2


def test_a_point_requeued_by_hand_continues(runs: Path, tmp_path: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 1)
    point = sweep.points[0].signature
    behave(runs, {point: {"steps": 20}})
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    until(lambda: stepped(runs, point))
    slurm_says("scontrol", "requeue", job_of(runs, sweep))
    until(lambda: finished(runs, sweep))
    assert steps(runs, point) == list(range(20))
    assert attempt(runs, point) == 2


def test_a_killed_trainer_is_started_again_in_its_job(runs: Path, tmp_path: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 1)
    point = sweep.points[0].signature
    behave(runs, {point: {"crash_at": 1}})
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert wait(runs, sweep) == ["done"]
    assert steps(runs, point) == [0, 1, 2]
    assert attempt(runs, point) == 2


def test_a_point_outlives_its_node(runs: Path, tmp_path: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 1)
    point = sweep.points[0].signature
    behave(runs, {point: {"steps": 20}})
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    until(lambda: stepped(runs, point))
    node = slurm_says("sinfo", "-h", "-o", "%n")
    slurm_says("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    until(lambda: states(runs, sweep) == ["pending"])  # the node comes back by itself: its slurmd answers
    until(lambda: finished(runs, sweep))
    assert sorted(set(steps(runs, point))) == list(range(20))
    assert attempt(runs, point) == 2


def test_a_controller_that_is_restarted_loses_nothing(runs: Path, tmp_path: Path, with_accounting: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 3)
    behave(runs, {point.signature: {"steps": 60} for point in sweep.points[:2]})
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    until(lambda: stepped(runs, sweep.points[0].signature))
    daemons.stop(with_accounting.parent, "slurmctld")
    onenode.up(with_accounting.parent)
    until(lambda: finished(runs, sweep))
    for point, count in zip(sweep.points, (60, 60, 3), strict=True):
        assert steps(runs, point.signature) == list(range(count))
        assert attempt(runs, point.signature) == 1


def test_a_probe_waits_for_its_pretraining_and_is_blocked_when_that_fails(runs: Path, tmp_path: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 2, probes=2)
    failing, *its_probes = (point.signature for point in sweep.points[:3])
    behave(runs, {failing: {"fail_at": 0}})
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert wait(runs, sweep) == ["failed", "blocked", "blocked", "done", "done", "done"]
    ended = [(runs / point.signature / "status.json").stat().st_mtime for point in sweep.points[3:]]
    assert ended[0] < min(ended[1:]), "after its pre-training"
    behave(runs, {})
    rest = [row.point for row in planned(runs, sweep).to_run]
    assert [point.signature for point in rest] == [failing, *its_probes]
    assert slurm.submit(sweep, rest, runs_dir=runs) == 0
    assert set(wait(runs, sweep)) == {"done"}


def test_cancelled_points_end_as_killed(runs: Path, tmp_path: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 4)
    behave(runs, {point.signature: {"steps": 200} for point in sweep.points})
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    until(lambda: stepped(runs, sweep.points[0].signature))
    assert slurm.cancel(sweep, runs_dir=runs, signatures=[sweep.points[0].signature, sweep.points[3].signature]) == 0
    until(lambda: (own := status.read(runs / sweep.points[0].signature)) is not None and own.state == "killed")
    until(lambda: states(runs, sweep)[0] == states(runs, sweep)[3] == "missing")
    assert {"running", "pending"} >= set(states(runs, sweep)[1:3]), "the others go on"
    assert slurm.cancel(sweep, runs_dir=runs) == 0
    until(lambda: set(states(runs, sweep)) == {"missing"})


def test_a_lost_answer_is_adopted(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = slurm_points.sweep(tmp_path, 2)
    wrapper = tmp_path / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\n/usr/bin/sbatch "$@" > /dev/null\nkill -9 $$\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}")
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 1
    wrapper.unlink()
    monkeypatch.setattr(send, "ANSWER_S", 0.0)
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert wait(runs, sweep) == ["done", "done"]
    assert sent(runs) == 1
    assert all(steps(runs, point.signature) == [0, 1, 2] for point in sweep.points)


def test_two_processes_a_point_find_each_other(runs: Path, tmp_path: Path) -> None:
    sweep = slurm_points.sweep(tmp_path, 1)
    point = sweep.points[0].signature
    behave(runs, {point: {"gloo": True}})
    resources = tmp_path / "cluster.yaml"
    resources.write_text("tasks: 2\n")
    assert slurm.submit(sweep, sweep.points, runs_dir=runs, cluster_config=resources) == 0
    assert wait(runs, sweep) == ["done"]
    assert [(runs / point / f"rank{rank}").read_text() for rank in (0, 1)] == ["3 2 0", "3 2 1"]


def test_a_short_time_limit_saves_and_continues(
    short_time: tuple[Path, Sweep], with_accounting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(with_accounting))
    runs, sweep = short_time
    until(lambda: finished(runs, sweep))
    point = sweep.points[0].signature
    assert "SIGUSR2" in (runs / point / "signals.txt").read_text()
    assert sorted(set(steps(runs, point))) == list(range(SHORT_STEPS))
    assert attempt(runs, point) >= 2


def test_without_accounting_the_states_are_right(
    tmp_path: Path, without_accounting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = prepare(tmp_path, without_accounting, monkeypatch)
    sweep = slurm_points.sweep(tmp_path, 3)
    behave(runs, {sweep.points[0].signature: {"fail_at": 0}, sweep.points[1].signature: {"steps": 20}})
    with pytest.raises(slurm_state.Unanswered):
        slurm_state.accounting({"any"}, 0.0)
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    assert set(states(runs, sweep)) <= {"pending", "running"}
    until(lambda: states(runs, sweep) == ["failed", "running", "done"])
    until(lambda: states(runs, sweep) == ["failed", "done", "done"])


def test_make_slurm_with_other_settings_is_refused_while_it_runs(without_accounting: Path) -> None:
    command = [sys.executable, "-m", "study.slurm.onenode", "up", "--state", str(without_accounting.parent)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().endswith("slurm.conf")
    refused = subprocess.run([*command, "--max-array-size", "9"], check=False, capture_output=True, text=True)
    assert refused.returncode == 2 and "make slurm-down first" in refused.stderr


def test_make_slurm_down_stops_what_it_started_and_nothing_else(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    conf = tmp_path / "slurm.conf"
    try:
        conf.write_text("ClusterName=somebody-else's\n")
        onenode.down(tmp_path)
        assert conf.exists()
        conf.write_text(onenode.MADE_BY)
        (tmp_path / "slurmd.pid").write_text(f"{sleeper.pid} 12345\n")  # the number now belongs to another process
        onenode.down(tmp_path)
        assert sleeper.poll() is None
        assert not tmp_path.exists()
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
