"""By hand, for minutes: on a Slurm that preempts, kills, requeues and restarts, a sweep gives the bytes of a quiet one.

    .venv/bin/python tests/slurm_acceptance.py [--epochs N] [--folder DIR]

The momentum ablation at scale smoke, long enough to be disturbed, three times: in the local pool; on a real one-node
Slurm; and there with two points preempted by a higher partition, one requeued by hand, one killed with -9, and the
controller restarted. Each time it is exported and reported by itself. A line a check; exit code 1 if one fails. It
needs root on Debian or Ubuntu, `study` installed, and the images of `study data get fashion-mnist`.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from study.run import status
from study.run.status import Status
from study.slurm import daemons, onenode

ROOT = Path(__file__).parents[1]
SWEEP = ROOT / "sweeps" / "momentum.yaml"
ARMS, POINTS = 5, 7  # the others are floors, over before they could be disturbed
CPUS = 6
PREEMPTING = CPUS - ARMS + 2
"""Cores that the urgent job takes: the free one, and those of two arms."""

failed: list[str] = []


def check(name: str, good: bool, figure: str) -> None:
    print(f"{'ok  ' if good else 'FAIL'} {name}: {figure}", flush=True)
    if not good:
        failed.append(name)


def study(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """`study` in a folder of its own, its output in a file there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "out.txt").open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", "study", *words], cwd=folder, stdout=out, stderr=out)


def submit(folder: Path, cluster: str, epochs: int) -> subprocess.Popen[bytes]:
    words = ["--scale", "smoke", "--cluster", cluster, "--wait", "--workers", "2", f"optimiser.epochs={epochs}"]
    return study(folder, "sweep", "submit", str(SWEEP), *words)


def finish(name: str, folder: Path, sweep: subprocess.Popen[bytes], began: float) -> dict[str, bytes]:
    """Wait for a sweep, export and report it.

    Returns:
        Name → bytes of what must not depend on where and how it ran.
    """
    code = sweep.wait()
    check(f"{name}: submit --wait", code == 0, f"exit code {code} after {time.monotonic() - began:.0f} s")
    for words in (["runs", "export"], ["report", "--sweeps", str(ROOT / "sweeps")]):
        code = study(folder, *words).wait()
        if code:
            raise SystemExit(f"{name}: study {words[0]}: exit code {code}; see {folder}/out.txt")
    results = folder / "results" / "smoke"
    paths = [results / "claims.json", *sorted((results / "tables").iterdir())]
    tracked = tracked_runs(folder)
    check(f"{name}: MLflow", tracked == ["FINISHED"] * POINTS, f"{len(tracked)} runs, {' '.join(sorted(set(tracked)))}")
    return {str(path.relative_to(results)): path.read_bytes() for path in paths}


def tracked_runs(folder: Path) -> list[str]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    found = client.search_experiments(filter_string="name = 'momentum-smoke'")
    return [run.info.status for run in client.search_runs([experiment.experiment_id for experiment in found])]


def known(folder: Path) -> dict[str, Status]:
    """Signature → status, of the arms; the floors train no step."""
    found = {path.parent.name: status.read(path.parent) for path in (folder / "runs").glob("*/status.json")}
    return {signature: own for signature, own in found.items() if own is not None and own.steps}


def until(what: str, done: Callable[[], object], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"not seen within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def slurm(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def disturb(folder: Path, conf: Path) -> None:
    """One point after the other, each while it trains."""

    def steady() -> list[str]:
        """Arms that train, in their first attempt."""
        return [
            s for s, own in known(folder).items() if status.seen(own) == "running" and own.attempt == 1 and own.step
        ]

    until("the floors are over", lambda: len(slurm("squeue", "--noheader", "--array").splitlines()) == ARMS)
    until("every arm trains", lambda: len(steady()) == ARMS)
    slurm("sbatch", "--partition=urgent", f"--cpus-per-task={PREEMPTING}", "--output=/dev/null", "--wrap=sleep 2")
    until("two points preempted", lambda: sum(own.state == "scheduled" for own in known(folder).values()) == 2)
    preempted = [own for own in known(folder).values() if own.state == "scheduled"]
    check(
        "preempted", len(preempted) == 2, f"two points, saved at steps {' and '.join(str(o.step) for o in preempted)}"
    )
    killed, requeued = (known(folder)[signature] for signature in steady()[:2])
    os.kill(killed.pid, signal.SIGKILL)
    check("kill -9", True, f"process {killed.pid} near step {killed.step}")
    assert requeued.job_id
    slurm("scontrol", "requeue", requeued.job_id)
    check("requeued by hand", True, f"job {requeued.job_id} near step {requeued.step}")
    daemons.stop(conf.parent, "slurmctld")
    onenode.up(conf.parent)
    check("controller", True, "restarted")


@contextmanager
def cluster() -> Iterator[Path]:
    state = Path(f"/var/tmp/study-slurm-acceptance-{os.getpid()}")  # munge and mysql must be able to enter it
    try:
        conf = onenode.up(state, cpus=CPUS)
        os.environ["SLURM_CONF"] = str(conf)
        yield conf
    finally:
        onenode.down(state)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100, help="8 steps each (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="keep what is made here (default: a temporary folder)")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="slurm-acceptance-"))
    os.environ.setdefault("STUDY_DATA", str(ROOT / "data"))
    os.environ.pop("MLFLOW_TRACKING_URI", None)

    began = time.monotonic()
    local = finish("local", folder / "local", submit(folder / "local", "local", arguments.epochs), began)
    for name in local:
        print(f"       {name}: {len(local[name])} bytes")
    with cluster() as conf:
        for name in ("quiet", "disturbed"):
            began = time.monotonic()
            sweep = submit(folder / name, "slurm", arguments.epochs)
            try:
                if name == "disturbed":
                    disturb(folder / name, conf)
                found = finish(name, folder / name, sweep, began)
            finally:
                sweep.kill()
            attempts = sorted(own.attempt for own in known(folder / name).values())
            again = 4 if name == "disturbed" else 0
            check(f"{name}: attempts", attempts == [1] * (ARMS - again) + [2] * again, " ".join(map(str, attempts)))
            differing = [file for file in local.keys() | found.keys() if local.get(file) != found.get(file)]
            check(f"{name}: tables and claims", not differing, f"{len(local)} files, differing: {differing or 'none'}")
    if arguments.folder is None and not failed:
        shutil.rmtree(folder)
    print(f"{len(failed)} checks failed" + (f"; see {folder}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
