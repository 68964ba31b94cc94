"""An array's folder: the batch script, the configs, and what the worker needs to know.

submitit writes the script's head from the resources and describes the job to the worker; its pickles are not used,
because they find their job only after sbatch has answered, and load whatever code is there by then.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study.run import files
from study.slurm import worker
from study.slurm.cluster import Cluster
from study.slurm.ledger import Array
from study.slurm.state import compress
from study.sweep.grid import Point
from study.tracking import store

RUN = """\
# An attempt that crashed or was killed (134 to 139) starts again here, where the resources are; one that saved itself
# because its time is up (85, or 138 before python could take the signal) goes back to the queue.
for attempt in 1 2 3; do
  {srun}
  status=$?
  case $status in
    134|135|136|137|139) echo "study: attempt $attempt ended with $status" ;;
    *) break ;;
  esac
done
case $status in
  85|138) scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}" ;;
esac
exit $status"""


def write(
    array: Array,
    points: Mapping[str, Point],
    cluster: Cluster,
    *,
    comment: str,
    runs_dir: Path,
    snapshot: Path,
    limit: int | None,
    dependency: str | None,
) -> Path:
    """Write an array's folder.

    Returns:
        The path of the batch script.

    Raises:
        StorageError: it cannot be written.
    """
    folder = array.folder
    with files.storage(folder):
        folder.mkdir(parents=True)
        with (folder / worker.CONFIGS).open("w", encoding="utf-8") as lines:
            for index, signature in array.tasks.items():
                config = points[signature].config.model_dump(mode="json")
                lines.write(json.dumps([index, signature, config], separators=(",", ":")) + "\n")
    job = {"runs_dir": str(runs_dir.absolute()), "cpus": cluster.cpus, "mlflow": cluster.mlflow}
    files.write_atomic(folder / "job.json", json.dumps(job))
    path = folder / "submission.sh"
    files.write_atomic(path, text(array, cluster, comment, snapshot, limit, dependency))
    return path


def text(
    array: Array, cluster: Cluster, comment: str, snapshot: Path, limit: int | None, dependency: str | None
) -> str:
    """The batch script."""
    import submitit

    executor = submitit.SlurmExecutor(folder=array.folder)
    parallel = f"%{limit}" if limit else ""
    options: dict[str, Any] = {
        "array": compress(array.tasks) + parallel,
        "output": f"{array.folder}/%a.log",
        "requeue": True,
        "kill-on-invalid-dep": "yes",
    }
    asked = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "mem": cluster.memory,
        "gpus_per_node": cluster.gpus or None,
        "dependency": dependency,
    }
    executor.update_parameters(
        job_name=array.name,
        comment=comment,
        time=cluster.time,
        nodes=cluster.nodes,
        ntasks_per_node=cluster.tasks_per_node,
        cpus_per_task=cluster.cpus,
        signal_delay_s=cluster.save_s,
        setup=_setup(cluster, snapshot),
        stderr_to_stdout=True,
        use_srun=False,  # ours, below
        wckey=None,
        additional_parameters=options | {key.replace("_", "-"): value for key, value in cluster.sbatch.items()},
        **{key: value for key, value in asked.items() if value is not None},
    )
    srun = ["srun", "--unbuffered", "--kill-on-bad-exit=1", f"--cpus-per-task={cluster.cpus}"]
    # -P: the working directory may be the checkout, and must not hide the snapshot.
    python = [cluster.python or sys.executable, "-P", "-u", "-m", "study.slurm.worker", str(array.folder)]
    command = " ".join([shlex.join(srun), *([cluster.container] if cluster.container else []), shlex.join(python)])
    script: str = executor._make_submission_file_text(RUN.format(srun=command), array.token)
    return script


def _setup(cluster: Cluster, snapshot: Path) -> list[str]:
    data = Path(os.environ.get("STUDY_DATA") or "data").absolute()
    mlflow = [f"export {store.VARIABLE}={shlex.quote(os.environ[store.VARIABLE])}"] if cluster.mlflow else []
    return [
        *(f"module load {shlex.quote(module)}" for module in cluster.modules),
        *cluster.setup,
        f"export PYTHONPATH={shlex.quote(str(snapshot))}${{PYTHONPATH:+:$PYTHONPATH}}",
        f"export STUDY_DATA={shlex.quote(str(data))}",
        f"export OMP_NUM_THREADS={cluster.cpus}",
        *mlflow,
    ]
