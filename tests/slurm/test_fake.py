"""The launcher on a scheduler that only remembers: what the real one cannot show, or not in time."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slurm_points
from hypothesis import given
from hypothesis import strategies as st

from study.cli import main as cli
from study.errors import UserError
from study.launch import plan, single, watch
from study.run import status
from study.run.lock import Holder, Lock, RunLocked
from study.run.status import STALE_S, Status
from study.slurm import ledger as ledgers
from study.slurm import send, snapshot, worker
from study.slurm import state as slurm_state
from study.slurm import submit as slurm
from study.sweep.grid import Sweep
from study.tracking import store

FAKE = Path(__file__).parents[1] / "helpers" / "fake_slurm"

# squeue(1), "JOB STATE CODES"
LIVE = [
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("SPECIAL_EXIT", "RESV_DEL_HOLD", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"),
]
OVER = [
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
]


class Fake:
    """The scheduler's memory, as its programs read and write it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.set(
            last=0, jobs=[], sbatch=[], srun=[], foreign=[], forgotten=[], reason="None", controller="up",
            accounting=True, max_array_size=1001, max_submit_jobs=[],
        )  # fmt: skip

    def memory(self) -> dict[str, Any]:
        path = self.home / "memory.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def set(self, **values: Any) -> None:
        (self.home / "memory.json").write_text(json.dumps(self.memory() | values))

    def state(self, state: str) -> None:
        """The state of every task of every job."""
        self.set(jobs=[job | {"tasks": dict.fromkeys(job["tasks"], state)} for job in self.memory()["jobs"]])

    def calls(self, program: str) -> list[tuple[list[str], dict[str, str]]]:
        path = self.home / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(arguments, env) for name, arguments, env in map(json.loads, lines) if name == program]

    def sizes(self) -> list[int]:
        return [len(job["tasks"]) for job in self.memory()["jobs"]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_PYTHON", sys.executable)
    monkeypatch.setenv("PATH", f"{FAKE}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(send, "ANSWER_S", 0.0)
    monkeypatch.setattr("study.slurm.jobs.ANSWER_S", 0.0)
    monkeypatch.chdir(tmp_path)
    return Fake(tmp_path / "fake")


def states(runs: Path, sweep: Sweep) -> list[str]:
    jobs = {point: (job.state, job.reason) for point, job in slurm.jobs(runs, sweep).items()}
    return [row.state for row in plan.make(sweep, runs, jobs).rows]


def scripts(runs: Path) -> list[str]:
    """The batch scripts in the order of their submission."""
    return [(array.folder / "submission.sh").read_text() for array in ledgers.arrays(runs)]


def option(script: str, name: str) -> str | None:
    match = re.search(rf"^#SBATCH --{name}=(.*)$", script, re.M)
    return match[1] if match else None


def tell(runs: Path, signature: str, state: str) -> None:
    (runs / signature).mkdir(parents=True, exist_ok=True)
    status.write(runs / signature, Status(signature, state, attempt=1, heartbeat=time.time()), durable=False)


# ------------------------------------------------------------------------------------------------------------ states


def test_no_live_state_is_over(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, len(LIVE)), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    fake.set(jobs=[job | {"tasks": dict(zip(job["tasks"], LIVE, strict=True))} for job in fake.memory()["jobs"]])
    assert set(states(runs, sweep)) <= {"pending", "running"}
    for point in sweep.points:
        tell(runs, point.signature, "scheduled")
    assert set(states(runs, sweep)) <= {"pending", "running"}, "between two attempts"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    assert fake.sizes() == [len(LIVE)]


def test_every_state_that_is_over_leads_to_another_try(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, len(OVER)), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    fake.set(jobs=[job | {"tasks": dict(zip(job["tasks"], OVER, strict=True))} for job in fake.memory()["jobs"]])
    assert set(states(runs, sweep)) <= {"failed", "missing"}
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    assert fake.sizes() == [len(OVER)] * 2


@pytest.mark.parametrize("forgotten", [[], OVER], ids=["in the queue", "in the accounting"])
def test_only_a_point_that_is_over_by_itself_has_failed(fake: Fake, tmp_path: Path, forgotten: list[str]) -> None:
    """What was ended from outside, before the trainer began, did nothing wrong: it is missing, as if never sent."""
    sweep, runs = slurm_points.sweep(tmp_path, len(OVER)), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    fake.set(jobs=[job | {"tasks": dict(zip(job["tasks"], OVER, strict=True))} for job in fake.memory()["jobs"]])
    fake.set(forgotten=forgotten)
    found = dict(zip(OVER, states(runs, sweep), strict=True))
    from_outside = {"CANCELLED", "NODE_FAIL", "PREEMPTED", "REVOKED"}
    assert found == {word: "missing" if word in from_outside else "failed" for word in OVER}


def test_a_point_runs_as_long_as_its_job_has_its_nodes(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, len(LIVE)), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    fake.set(jobs=[job | {"tasks": dict(zip(job["tasks"], LIVE, strict=True))} for job in fake.memory()["jobs"]])
    waits = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
    assert dict(zip(LIVE, states(runs, sweep), strict=True)) == {
        word: "pending" if word in waits else "running" for word in LIVE
    }


def test_a_state_that_nobody_knows_is_unknown(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 1), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    fake.state("DREAMING")
    assert states(runs, sweep) == ["unknown"]
    with pytest.raises(UserError, match="DREAMING"):
        slurm.submit(sweep, sweep.points, runs_dir=runs)


def test_a_failed_query_means_unknown_and_submits_nothing(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 3), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    tell(runs, sweep.points[0].signature, "finished")
    fake.set(controller="down")
    assert states(runs, sweep) == ["done", "unknown", "unknown"]
    for call in (slurm.submit, lambda *_, **k: slurm.cancel(sweep, **k)):
        with pytest.raises(UserError, match="Unable to contact"):
            call(sweep, sweep.points, runs_dir=runs)
    assert fake.sizes() == [3]


def test_foreign_jobs_and_odd_ids_are_read_and_ignored(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 2), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    name = ledgers.arrays(runs)[0].name
    fake.set(
        foreign=["other|4|3-4%1|PENDING|None", f"{name}|9|N/A|RUNNING|None", "4_[3-4%1]", "", f"{name}|9|1-...|FAILED"]
    )
    assert states(runs, sweep) == ["pending", "pending"]
    assert fake.calls("squeue")[-1][1]["SLURM_BITSTR_LEN"] == "0", "so that long lists are not cut off"


@given(st.sets(st.integers(0, 5000)))
def test_index_lists_are_read_as_they_are_written(indices: set[int]) -> None:
    assert set(slurm_state.expand(slurm_state.compress(indices))) == indices


@pytest.mark.parametrize(
    ("text", "found"), [("3-4%1", [3, 4]), ("0-8:4,9", [0, 4, 8, 9]), ("N/A", []), ("1,3-5,...", [1, 3, 4, 5])]
)
def test_every_form_of_an_index_list_is_read(text: str, found: list[int]) -> None:
    assert list(slurm_state.expand(text)) == found


@pytest.mark.parametrize("accounting", [True, False])
def test_a_job_that_the_queue_has_forgotten_is_explained(fake: Fake, tmp_path: Path, accounting: bool) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 2), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    fake.state("OUT_OF_MEMORY")
    fake.set(forgotten=["OUT_OF_MEMORY"], accounting=accounting)
    tell(runs, sweep.points[1].signature, "finished")
    jobs = slurm.jobs(runs, sweep)
    assert states(runs, sweep) == ["failed", "done"]
    assert ("OUT_OF_MEMORY" if accounting else "gone") in jobs[sweep.points[0].signature].reason
    assert sweep.points[1].signature not in jobs, "its own word is enough"


# -------------------------------------------------------------------------------------------------------- submitting


def test_chunks_keep_to_the_sizes_and_share_the_parallel_limit(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 12), tmp_path / "runs"
    fake.set(max_array_size=5)
    (tmp_path / "cluster.yaml").write_text("parallel: 4\n")
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert [option(script, "array") for script in scripts(runs)] == ["0-4%2", "0-4%1", "0-1%1"]
    folders = {array.folder for array in ledgers.arrays(runs)}
    assert len(folders) == 3 and all((folder / "configs.jsonl").exists() for folder in folders)
    fake.set(max_submit_jobs=["3"])
    other = slurm_points.sweep(tmp_path, 4, name="other", probes=1)
    assert [len(chunk.tasks) for chunk in send.split(other.points, {}, runs, send.array_size(slurm.limits()))] == [
        3,
        1,
        3,
        1,
    ]


@given(st.integers(1, 40), st.integers(1, 12))
def test_arrays_that_may_run_together_never_exceed_the_limit(arrays: int, limit: int) -> None:
    lanes = send.lanes(arrays, limit)
    first = [share for share, behind in lanes if behind is None]
    assert sum(first) == limit or (len(first) == arrays and sum(first) == limit)
    for share, behind in lanes:
        assert behind is None or lanes[behind][0] == share, "it takes the place of the one before it"
    behinds = [behind for _, behind in lanes if behind is not None]
    assert len(set(behinds)) == len(behinds), "two never wait for the same place"


def test_a_refusal_lists_what_went_and_the_next_call_sends_the_rest(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 12), tmp_path / "runs"
    fake.set(max_array_size=5, sbatch=["accept", "refuse"])
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 1
    assert "QOS policy" in (said := capsys.readouterr().err) and "arrays that went: 1 (5 points)" in said
    assert states(runs, sweep) == ["pending"] * 5 + ["missing"] * 7
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert fake.sizes() == [5, 5, 2]


@pytest.mark.parametrize("forgotten", [[], ["COMPLETED"]])
def test_a_lost_answer_is_adopted_by_name(fake: Fake, tmp_path: Path, forgotten: list[str]) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 7), tmp_path / "runs"
    fake.set(max_array_size=5, sbatch=["lose"])
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 1
    assert states(runs, sweep) == ["pending"] * 5 + ["missing"] * 2, "found by name before it is adopted"
    if forgotten:  # ended since, and left the queue: the accounting has it
        fake.state("COMPLETED")
        fake.set(forgotten=forgotten)
        for point in sweep.points[:5]:
            tell(runs, point.signature, "finished")
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert fake.sizes() == [5, 2]
    assert [array.job for array in ledgers.arrays(runs)] == ["1", "2"]


def test_a_jobs_name_begins_with_its_sweep_and_jobs_of_an_older_ledger_are_found(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 2, name="mo,m|n t"), tmp_path / "runs"
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    (job,) = fake.memory()["jobs"]
    assert re.fullmatch(r"mo-m-n-t-smoke\.[0-9a-f]{12}", job["name"])
    assert states(runs, sweep) == ["pending"] * 2
    ledger = ledgers.path_of(runs, sweep.id)
    intent, answer = map(json.loads, ledger.read_text().splitlines())
    del intent["name"]  # as it was written before jobs were named after their sweep
    for lines in ([intent, answer], [intent]):  # the second: its answer was lost
        ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fake.set(jobs=[job | {"name": f"study-{intent['token']}"}])
        assert states(runs, sweep) == ["pending"] * 2
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert fake.sizes() == [2]


def test_a_submission_that_never_arrived_is_sent_again(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 2), tmp_path / "runs"
    fake.set(sbatch=["unreachable"])
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 1
    assert states(runs, sweep) == ["missing"] * 2
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert fake.sizes() == [2]


def test_dying_at_any_write_neither_loses_a_point_nor_sends_it_twice(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 7), tmp_path / "runs"
    fake.set(max_array_size=3)
    real = ledgers._append
    for survive in range(7):  # three arrays, two lines each: die before each of them, and then not at all
        left = survive

        def append(path: Path, event: dict[str, Any]) -> None:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            real(path, event)

        monkeypatch.setattr(ledgers, "_append", append)
        try:
            slurm.submit(sweep, sweep.points, runs_dir=runs)
        except KeyboardInterrupt:
            continue
    monkeypatch.setattr(ledgers, "_append", real)
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    sent = [point for array in ledgers.arrays(runs) if array.job for point in array.tasks.values()]
    assert sorted(sent) == sorted(point.signature for point in sweep.points)
    assert sum(fake.sizes()) == 7


def test_a_torn_line_of_the_ledger_is_survived(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 2), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    ledger = ledgers.path_of(runs, sweep.id)
    ledger.write_bytes(ledger.read_bytes()[:-9])  # the answer
    assert states(runs, sweep) == ["pending"] * 2
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert fake.sizes() == [2]
    assert ledgers.arrays(runs)[0].job == "1"


def test_two_submissions_at_once_send_each_point_once(fake: Fake, tmp_path: Path) -> None:
    slurm_points.sweep(tmp_path, 6)
    code = (
        "import sys, time; from pathlib import Path; from study.sweep import grid\n"
        "from study.slurm import snapshot, submit as slurm\n"
        "s = grid.load(Path('try.yaml'), 'smoke'); Path(sys.argv[1]).touch()\n"
        "take = snapshot.take; snapshot.take = lambda runs: (time.sleep(0.5), take(runs))[1]\n"
        "while not Path('go').exists(): time.sleep(0.001)\n"
        "sys.exit(slurm.submit(s, s.points, runs_dir=Path('runs')))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, name], cwd=tmp_path) for name in ("a", "b")]
    while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert [process.wait() for process in both] == [0, 0]
    assert fake.sizes() == [6]


def test_points_of_another_sweep_are_not_sent_again(fake: Fake, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        sweep = slurm_points.sweep(tmp_path, 3, name=name)
        assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert fake.sizes() == [3]
    assert states(runs, sweep) == ["pending"] * 3


def test_submitting_from_inside_a_job_leaks_nothing(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    sweep = slurm_points.sweep(tmp_path, 1)
    slurm.submit(sweep, sweep.points, runs_dir=tmp_path / "runs")
    assert fake.calls("sbatch")[0][1] == {"SLURM_CONF": "/etc/slurm/slurm.conf"}
    assert os.environ["SLURM_JOB_ID"] == "7"


def test_many_points_are_asked_for(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, slurm.ASK_ABOVE + 1), tmp_path / "runs"
    with pytest.raises(UserError, match="--yes"):
        slurm.submit(sweep, sweep.points, runs_dir=runs)
    assert not fake.calls("sbatch") and not runs.exists()
    assert slurm.submit(sweep, sweep.points, runs_dir=runs, dry_run=True) == 0
    assert not fake.calls("sbatch") and not runs.exists()
    assert slurm.submit(sweep, sweep.points, runs_dir=runs, yes=True) == 0


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("partition: gpu", "partition = gpu: allowed is short, long"),
        ("time: 3:00", "time = 180 minutes: allowed is at most 120"),
    ],
)
def test_what_the_cluster_does_not_allow_is_said_before_anything_is_sent(
    fake: Fake, tmp_path: Path, line: str, fault: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(line)
    sweep = slurm_points.sweep(tmp_path, 1)
    with pytest.raises(UserError, match=fault):
        slurm.submit(sweep, sweep.points, runs_dir=tmp_path / "runs")
    assert not fake.calls("sbatch")


def test_without_slurm_there_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sweep = slurm_points.sweep(tmp_path, 1)
    with pytest.raises(UserError, match="scontrol: not on the PATH"):
        slurm.submit(sweep, sweep.points, runs_dir=tmp_path / "runs")


# ------------------------------------------------------------------------------------------- what a job is asked to do


def test_resources_of_several_nodes_and_gpus(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(
        "{partition: long, account: lab, qos: high, constraint: a100, nodes: 2, gpus: 8, cpus: 6, memory: 500G,"
        " time: 1-00:00, modules: [cuda/12], setup: ['export A=b'], container: apptainer exec study.sif,"
        " python: /opt/python, sbatch: {exclude: 'node[1-3]', exclusive: true}}"
    )
    sweep, runs = slurm_points.sweep(tmp_path, 1), tmp_path / "my runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    (script,) = scripts(runs)
    asked = {
        "partition": "long", "account": "lab", "qos": "high", "constraint": "a100", "nodes": "2", "gpus-per-node": "8",
        "ntasks-per-node": "8", "cpus-per-task": "6", "mem": "500G", "time": "1440", "signal": "USR2@90",
        "exclude": "'node[1-3]'", "kill-on-invalid-dep": "yes", "wckey": None, "dependency": None,
    }  # fmt: skip
    assert {name: option(script, name) for name in asked} == asked
    assert "#SBATCH --requeue\n" in script and "#SBATCH --exclusive\n" in script
    assert "module load cuda/12\nexport A=b\n" in script
    assert re.search(
        r"srun --unbuffered --kill-on-bad-exit=1 --cpus-per-task=6 apptainer exec study.sif /opt/python -P -u"
        r" -m study.slurm.worker '.*/my runs/sweeps/", script
    )  # fmt: skip
    assert f"export STUDY_DATA={tmp_path}/data\n" in script, "the job does not depend on its working directory"


def test_a_short_time_gets_a_short_warning(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("time: 2")
    sweep, runs = slurm_points.sweep(tmp_path, 1), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    assert option(scripts(runs)[0], "signal") == "USR2@30"


@pytest.mark.parametrize(
    ("codes", "code", "requeued"),
    [
        ([0], 0, 0),
        ([3], 3, 0),
        ([137, 0], 0, 0),
        ([139, 137, 134], 134, 0),
        ([85], 85, 1),
        ([137, 85], 85, 1),
        ([143], 143, 0),
    ],
)
def test_the_exit_status_of_a_job_is_the_trainers(
    fake: Fake, tmp_path: Path, codes: list[int], code: int, requeued: int
) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 1), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    fake.set(srun=codes)
    (array,) = ledgers.arrays(runs)
    env = os.environ | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    done = subprocess.run(["bash", str(array.folder / "submission.sh")], env=env, capture_output=True, check=False)
    assert done.returncode == code
    calls = [arguments for arguments, _ in fake.calls("scontrol") if arguments[0] == "requeue"]
    assert calls == [["requeue", "7_2"]] * requeued, "the task, never the array"
    assert fake.memory()["srun"] == []


def held(folder: Path, job: str) -> Path:
    """A run that a process of another node took a moment ago."""
    (folder / "lock").mkdir(parents=True)
    path = folder / "lock" / "000001"
    path.write_text(json.dumps(asdict(Holder("node7", 4242, time.time(), job, "another kernel"))))
    return path


def test_an_attempt_whose_node_was_lost_is_outlasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            os.utime(lock, (time.time() - STALE_S - 1,) * 2)

    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    lock = held(tmp_path / "run", "7_2")
    worker.outlast_earlier_attempt(tmp_path / "run")
    assert len(waited) == 3
    lock = held(tmp_path / "other", "8_2")
    worker.outlast_earlier_attempt(tmp_path / "other")
    assert len(waited) == 3, "another job trains it"
    with pytest.raises(RunLocked):
        Lock(tmp_path / "other")


def test_a_second_job_of_a_running_point_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = slurm_points.sweep(tmp_path, 1)
    config, runs = sweep.points[0].config, tmp_path / "runs"
    held(runs / config.signature, "8_2")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    monkeypatch.setattr("study.train.trainer.prepare", lambda *_: (None, None))  # the images
    assert cli.main(["train", str(tmp_path / "config.json"), "--runs-dir", str(runs), "--device", "cpu"]) == 0
    assert "held by process 4242 on node7, job 8_2" in capsys.readouterr().err
    assert status.read(runs / config.signature) is None


def test_a_probe_waits_for_its_own_pretraining(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 3, probes=2), tmp_path / "runs"
    first = [point for point in sweep.points if point.after is None]
    assert slurm.submit(sweep, first[:2], runs_dir=runs) == 0  # seeds 0 and 1 are queued already
    tell(runs, first[0].signature, "finished")
    fake.set(jobs=[job | {"tasks": {"0": "COMPLETED", "1": "RUNNING"}} for job in fake.memory()["jobs"]])
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    known = ledgers.latest(ledgers.arrays(runs))
    for point in sweep.points:
        array, index = known[point.signature]
        dependency = option((array.folder / "submission.sh").read_text(), "dependency")
        if point.after is None or point.after == first[0].signature:
            assert dependency is None
        else:
            before, its_index = known[point.after]
            assert dependency == f"aftercorr:{before.job}"
            assert index == its_index, "aftercorr compares indices"


def test_a_probe_of_a_pretraining_that_nobody_runs_is_not_sent(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 1, probes=1), tmp_path / "runs"
    tell(runs, sweep.points[0].signature, "failed")
    assert slurm.submit(sweep, sweep.points[1:], runs_dir=runs) == 0
    assert "blocked" in capsys.readouterr().err
    assert not fake.calls("sbatch")


def test_the_snapshot_is_the_code_with_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = slurm_points.package(tmp_path, monkeypatch)
    first = snapshot.take(tmp_path / "runs")
    assert snapshot.take(tmp_path / "runs") == first, "the same code is kept once"
    assert "commit" in json.loads((first / ".study-snapshot.json").read_text())
    (first / "study" / "errors.py").write_text("")  # lost in a power cut
    assert snapshot.take(tmp_path / "runs") == first
    assert (first / "study" / "errors.py").read_text()
    (copy / "errors.py").write_text("# edited")
    assert snapshot.take(tmp_path / "runs") != first
    assert (first / "study" / "errors.py").read_text() != "# edited"


# ------------------------------------------------------------------------------------------------------- following


def submit_and_wait(*words: str) -> list[str]:
    return ["sweep", "submit", "try.yaml", "--scale", "smoke", "--cluster", "slurm", "--wait", "--no-mirror", *words]


@pytest.mark.parametrize(("last", "code"), [("finished", 0), ("failed", 1), ("killed", 1)])
def test_submit_wait_follows_to_the_end_with_one_query_a_look(
    fake: Fake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    last: str,
    code: int,
) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 2), tmp_path / "runs"
    first, second = (point.signature for point in sweep.points)
    looks: list[int] = []

    def between_two_looks(_: float) -> None:
        looks.append(len(fake.calls("squeue")))
        if len(looks) == 1:
            fake.state("RUNNING")
        elif len(looks) == 2:
            fake.set(controller="down")
        elif len(looks) == 3:
            fake.set(controller="up")
            tell(runs, first, "finished")
            tell(runs, second, last)
            fake.state("COMPLETED")

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=between_two_looks))
    assert cli.main(submit_and_wait()) == code
    assert [after - before for before, after in itertools.pairwise(looks)] == [1, 1]
    said = capsys.readouterr().out
    shown = [said.index(line) for line in ("2 pending", "2 running", "2 unknown")]
    assert shown == sorted(shown), "a silent controller is waited for"
    assert said.endswith("\n")


def test_ctrl_c_while_waiting_leaves_the_jobs_alone_and_says_so(fake: Fake, tmp_path: Path) -> None:
    slurm_points.sweep(tmp_path, 2)
    command = [sys.executable, "-m", "study", *submit_and_wait()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("2 pending") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the jobs go on" in said
    assert fake.sizes() == [2] and not fake.calls("scancel")


def test_a_plan_says_what_the_cluster_allows(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm_points.sweep(tmp_path, 12)
    fake.set(max_array_size=5, max_submit_jobs=["3"])
    (tmp_path / "cluster.yaml").write_text("parallel: 4\n")
    assert cli.main(["sweep", "plan", "try.yaml", "--scale", "smoke", "--cluster", "slurm", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cost"]["workers"] == 4
    assert told["cluster"]["partitions"] == {"short": 120, "long": None}
    assert cli.main(["sweep", "plan", "try.yaml", "--scale", "smoke", "--cluster", "slurm"]) == 0
    assert (
        "arrays of 5 points, 3 jobs at once; partitions: short (default, at most 120 minutes), long (no time limit)"
        in capsys.readouterr().out
    )


def test_what_is_refused_leaves_no_trace(fake: Fake, tmp_path: Path) -> None:
    slurm_points.sweep(tmp_path, 1)
    (tmp_path / "cluster.yaml").write_text("partition: gpu\n")
    assert cli.main(submit_and_wait()) == 2
    assert not (tmp_path / "runs").exists()


def test_jobs_push_to_a_server_themselves_only_where_there_is_one(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 1), tmp_path / "runs"
    (tmp_path / "cluster.yaml").write_text("mlflow: true\n")
    with pytest.raises(UserError, match=r"mlflow = true: allowed with MLFLOW_TRACKING_URI = http"):
        slurm.submit(sweep, sweep.points, runs_dir=runs)
    assert not runs.exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.lab:5000")
    monkeypatch.setattr(store, "preflight", lambda found, cluster: None)  # no such host here
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert "export MLFLOW_TRACKING_URI=http://mlflow.lab:5000\n" in scripts(runs)[0]

    asked: list[bool] = []
    trained = SimpleNamespace(exit_code=0)
    monkeypatch.setattr(single, "run", lambda *_, mlflow, **__: asked.append(mlflow) or trained)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setattr("submitit.JobEnvironment", lambda: SimpleNamespace(num_tasks=1, global_rank=0))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert worker.main(next(runs.glob("sweeps/*.jobs/*/job.json")).parent) == 0
    assert asked == [True]


# -------------------------------------------------------------------------------------------------- cancelling, size


def test_cancelling_takes_back_points_and_marks_those_between_two_attempts(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 3), tmp_path / "runs"
    slurm.submit(sweep, sweep.points, runs_dir=runs)
    first, second, _ = (point.signature for point in sweep.points)
    tell(runs, first, "scheduled")
    assert slurm.cancel(sweep, runs_dir=runs, signatures=[first, second]) == 0
    assert fake.calls("scancel")[0][0] == ["1_[0-1]"]
    assert (own := status.read(runs / first)) is not None and own.state == "killed" and own.ended
    assert states(runs, sweep) == ["missing", "missing", "pending"]
    assert slurm.submit(sweep, sweep.points, runs_dir=runs) == 0
    assert fake.sizes() == [1, 2]


def test_a_queued_point_that_left_the_grid_is_reported_and_cancelled_only_when_asked(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    removed = slurm_points.sweep(tmp_path, 2).points[1].signature
    submit = ["sweep", "submit", "try.yaml", "--scale", "smoke", "--cluster", "slurm", "--no-mirror"]
    assert cli.main(submit) == 0
    slurm_points.sweep(tmp_path, 1)
    assert cli.main(submit) == 0
    assert cli.main(["sweep", "status", "try.yaml", "--scale", "smoke", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["removed"] == [{"signature": removed, "name": "seed=1", "state": "pending"}]
    assert fake.sizes() == [2] and not fake.calls("scancel")
    assert cli.main(["sweep", "cancel", removed]) == 0
    assert fake.calls("scancel")[0][0] == ["1_[1]"]


def test_ten_thousand_points_are_ten_arrays_and_one_question(fake: Fake, tmp_path: Path) -> None:
    sweep, runs = slurm_points.sweep(tmp_path, 10_000), tmp_path / "runs"
    assert slurm.submit(sweep, sweep.points, runs_dir=runs, yes=True) == 0
    assert fake.sizes() == [1001] * 9 + [991]
    before = len(fake.calls("squeue"))
    assert set(states(runs, sweep)) == {"pending"}
    assert len(fake.calls("squeue")) == before + 1
    assert not fake.calls("sacct")
