"""A scheduler that only remembers: sbatch, squeue, sacct, scontrol, scancel, sacctmgr and srun for a test's PATH.

Its memory is ``$FAKE_SLURM/memory.json`` (see `Fake` in tests/test_slurm_fake.py); each call is a line of
``$FAKE_SLURM/calls.jsonl``. No job ever runs: a test sets the states.
"""

import fcntl
import json
import os
import re
import sys
from pathlib import Path

HOME = Path(os.environ["FAKE_SLURM"])


def expand(indices: str) -> list[int]:
    found: list[int] = []
    for part in indices.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def sbatch(memory: dict, arguments: list[str]) -> int:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", Path(arguments[-1]).read_text(), re.M))
    answers = memory["sbatch"]
    answer = answers.pop(0) if answers else "accept"
    if answer == "refuse":
        print("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy", file=sys.stderr)
        return 1
    if answer == "unreachable":
        print("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", file=sys.stderr)
        return 1
    memory["last"] += 1
    job = {
        "id": memory["last"],
        "name": options["job-name"],
        "tasks": dict.fromkeys(expand(options["array"]), "PENDING"),
    }
    memory["jobs"].append(job)
    if answer == "lose":
        print("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", file=sys.stderr)
        return 1
    print(job["id"])
    return 0


def squeue(memory: dict, arguments: list[str]) -> int:
    if memory["controller"] == "down":
        print("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    assert "--format=%j|%F|%K|%T|%r" in arguments and "--states=all" in arguments
    print("\n".join(memory["foreign"]))
    show(
        memory,
        arguments,
        lambda job, states: states not in memory["forgotten"],
        lambda job, i, state: f"{job['name']}|{job['id']}|{i}|{state}|{memory['reason']}",
    )
    return 0


def sacct(memory: dict, arguments: list[str]) -> int:
    if not memory["accounting"]:
        print("Slurm accounting storage is disabled", file=sys.stderr)
        return 1
    show(
        memory, arguments, lambda job, states: True, lambda job, i, state: f"{job['name']}|{job['id']}_{i}|{state}|1:0"
    )
    return 0


def show(memory, arguments, wanted, line) -> None:
    names = next((a.partition("=")[2].split(",") for a in arguments if a.startswith("--name=")), None)
    for job in memory["jobs"]:
        if names is None or job["name"] in names:
            for i, state in job["tasks"].items():
                if wanted(job, state):
                    print(line(job, i, state))


def scontrol(memory: dict, arguments: list[str]) -> int:
    if memory["controller"] == "down":
        print("slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)", file=sys.stderr)
        return 1
    if arguments[:2] == ["show", "config"]:
        print(f"Configuration data as of now\nMaxArraySize = {memory['max_array_size']}\nSchedulerParameters = x")
    elif arguments[1:] == ["show", "partition"]:
        print(
            "PartitionName=short Default=YES MaxTime=02:00:00 State=UP\nPartitionName=long MaxTime=UNLIMITED State=UP"
        )
    else:
        assert arguments[0] == "requeue"
    return 0


def scancel(memory: dict, arguments: list[str]) -> int:
    job_id, _, indices = arguments[0].partition("_")
    job = next(job for job in memory["jobs"] if job["id"] == int(job_id))
    for i in expand(indices.strip("[]")):
        job["tasks"].pop(str(i))  # as the real one forgets a task that had not started
    return 0


def sacctmgr(memory: dict, arguments: list[str]) -> int:
    print("\n".join(["", *memory["max_submit_jobs"]]))
    return 0 if memory["accounting"] else 1


def srun(memory: dict, arguments: list[str]) -> int:
    return memory["srun"].pop(0)


def main(program: str, arguments: list[str]) -> int:
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        memory = json.loads((HOME / "memory.json").read_text())
        with (HOME / "calls.jsonl").open("a") as calls:
            slurm = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SBATCH_"))}
            calls.write(json.dumps([program, arguments, slurm]) + "\n")
        code = globals()[program](memory, arguments)
        (HOME / "memory.json").write_text(json.dumps(memory))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).name, sys.argv[2:]))
