"""What runs inside a job: ``python -m study.slurm.worker FOLDER`` trains the point that the array's index stands for.

The batch script (`study.slurm.script`) starts one of these a process, from the snapshot of the code. The exit
status is the trainer's, and the trainer continues from its last checkpoint, so that it does not matter why a job
starts again.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from study.config.reading import read_yaml, resolve
from study.errors import UserError
from study.run import files, provenance
from study.run.lock import Lock, RunLocked
from study.run.status import STALE_S

CONFIGS = "configs.jsonl"
"""One line a task of the array: [index, signature, config]."""

REQUEUE = 85
"""The trainer's exit status after SIGUSR2: it has saved, and asks for another turn."""

RETRY_S = 2.0


def main(folder: Path) -> int:
    """Train the point of this task.

    Args:
        folder: the array's folder, which holds its configs and ``job.json``.

    Returns:
        The trainer's exit status.
    """
    # Until the trainer's own handler is there, nothing is lost by leaving at once.
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(REQUEUE))
    import submitit

    environment = submitit.JobEnvironment()
    if environment.num_tasks > 1:
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    settings = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    signature, config = _config(folder, int(os.environ["SLURM_ARRAY_TASK_ID"]))
    if environment.global_rank == 0:
        outlast_earlier_attempt(Path(settings["runs_dir"]) / signature)

    from study.launch import single

    runs_dir, cpus = settings["runs_dir"], settings["cpus"]
    # What the run notes as its command: the one that a person would repeat it with.
    sys.argv = ["study", "train", str(config), "--runs-dir", runs_dir, "--threads", str(cpus)]
    mlflow = settings["mlflow"] and environment.global_rank == 0
    try:
        return single.run(
            resolve(read_yaml(config), str(config)), Path(runs_dir), threads=cpus, mlflow=mlflow
        ).exit_code
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        return error.exit_code


def outlast_earlier_attempt(folder: Path) -> None:
    """Wait while an earlier attempt of this very job seems to hold the run in ``folder``.

    When its node was lost it is dead, but from another node its heartbeat passes for alive a while. The trainer would
    leave the run to it, and nobody would train the point.
    """
    deadline = time.monotonic() + 2 * STALE_S
    while folder.exists() and time.monotonic() < deadline:
        try:
            Lock(folder).release()
            return
        except RunLocked as locked:
            if locked.holder is None or locked.holder.job_id != provenance.job_id():
                return
        time.sleep(RETRY_S)


def _config(folder: Path, index: int) -> tuple[str, Path]:
    """Signature of one task, and its config in a file of its own, which is written once."""
    with (folder / CONFIGS).open(encoding="utf-8") as lines:
        signature, config = next(rest for i, *rest in map(json.loads, lines) if i == index)
    path = folder / f"{signature}.json"
    if not path.exists():
        files.write_atomic(path, json.dumps(config))
    return signature, path


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
