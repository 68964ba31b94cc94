"""Stands in for ``study.launch.single`` in the snapshot of a test: the trainer's contract with its job, without torch.

``<runs_dir>/behaviour.json`` maps a signature to {"steps": n, "fail_at": step, "crash_at": step, "gloo": true}. Each
step takes 0.1 s and appends its number to ``steps.txt``; stopping saves the step in ``checkpoint`` and the
signal's name in ``signals.txt``.
"""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from study.config.schema import Config
from study.run import status
from study.run.provenance import job_id
from study.run.status import Status

EXIT = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR2": 85}
STOP: list[str] = []


def run(config: Config, runs_dir: Path, *, threads: int, mlflow: bool) -> SimpleNamespace:
    return SimpleNamespace(exit_code=main(config.signature, runs_dir))


def main(signature: str, runs_dir: Path) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda n, _: STOP.append(signal.Signals(n).name))
    behaviour = json.loads((runs_dir / "behaviour.json").read_text()).get(signature, {})
    folder = runs_dir / signature
    folder.mkdir(exist_ok=True)
    if behaviour.get("gloo"):
        gloo(folder)
        if os.environ["RANK"] != "0":
            return 0
    return train(folder, signature, behaviour)


def train(folder: Path, signature: str, behaviour: dict) -> int:
    before = status.read(folder)
    if before and before.state == "finished":
        return 0
    now = Status(
        signature, "running", attempt=before.attempt + 1 if before else 1, steps=behaviour.get("steps", 3),
        host=os.uname().nodename, pid=os.getpid(), job_id=job_id(), heartbeat=time.time(), started=time.time(),
    )  # fmt: skip
    checkpoint = folder / "checkpoint"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for step in range(first, now.steps or 0):
        status.write(folder, replace(now, step=step, heartbeat=time.time()), durable=False)
        time.sleep(0.1)
        with (folder / "steps.txt").open("a") as file:
            file.write(f"{step}\n")
        if behaviour.get("fail_at") == step:
            status.write(folder, replace(now, state="failed", error="ValueError: asked for"), durable=False)
            return 1
        if behaviour.get("crash_at") == step and now.attempt == 1:
            checkpoint.write_text(str(step + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        if STOP:
            checkpoint.write_text(str(step + 1))
            (folder / "signals.txt").open("a").write(f"{STOP[0]}\n")
            state = "scheduled" if STOP[0] == "SIGUSR2" else "killed"
            status.write(folder, replace(now, state=state, step=step + 1), durable=False)
            return EXIT[STOP[0]]
    status.write(folder, replace(now, state="finished", step=now.steps or 0, ended=time.time()), durable=False)
    return 0


def gloo(folder: Path) -> None:
    """Two ranks add up their numbers, started from the environment that the worker made."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    (folder / f"rank{os.environ['RANK']}").write_text(
        f"{int(total)} {os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']}"
    )
    dist.destroy_process_group()
