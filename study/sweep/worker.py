"""What runs inside a job: ``python -m study.sweep.worker FOLDER`` trains the point that the array's index stands for.

The batch script (`study.sweep.slurm_script`) starts one of these a process, from the snapshot of the code. The exit
status is the trainer's, and the trainer continues from its last checkpoint, so that it does not matter why a job
starts again.
"""

import json
import os
import signal
import sys
from pathlib import Path

from study.run import files

CONFIGS = "configs.jsonl"
"""One line a task of the array: [index, signature, config]."""

REQUEUE = 85
"""The trainer's exit status after SIGUSR2: it has saved, and asks for another turn."""


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
    config = _config(folder, int(os.environ["SLURM_ARRAY_TASK_ID"]))

    from study.cli import main as study

    command = ["train", str(config), "--runs-dir", settings["runs_dir"], "--threads", str(settings["cpus"])]
    sys.argv = ["study", *command]  # what the run notes as its command
    return study(command)


def _config(folder: Path, index: int) -> Path:
    """Write the config of one task to a file of its own, once."""
    with (folder / CONFIGS).open(encoding="utf-8") as lines:
        signature, config = next(rest for i, *rest in map(json.loads, lines) if i == index)
    path = folder / f"{signature}.json"
    if not path.exists():
        files.write_atomic(path, json.dumps(config))
    return path


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
