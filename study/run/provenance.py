"""Where a run came from: code, command, versions, machine, job; one entry for each attempt at it."""

import hashlib
import json
import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import study
from study.config import schema
from study.run import files

FILE, DIFF = "provenance.json", "provenance.diff"
SNAPSHOT = ".study-snapshot.json"
"""Beside the package where the code is a copy: ``code()`` as it was when the copy was made. ``STUDY_SNAPSHOT`` names
another file."""

LONGEST_DIFF = 2**20
MOST_UNTRACKED = 200
PACKAGES = ("torch", "torchvision", "mlflow", "numpy", "submitit", "moco-study")

_CODE = (".", ":(exclude)results")
"""What numbers come from: a report that was made again leaves the code clean."""

_ROOT = Path(study.__file__).resolve().parent.parent


def collect(command: Sequence[str]) -> dict[str, Any]:
    """What made this attempt. Never raises: what cannot be found out is None.

    ``diff`` is text, for a file of its own; the rest is plain JSON.
    """
    return {
        **code(),
        "numerics": schema.NUMERICS,
        "command": list(command),
        "versions": versions(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job_id": job_id(),
        "slurm": {name: value for name, value in sorted(os.environ.items()) if name in _SLURM},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": _gpus(),
    }


def code() -> dict[str, Any]:
    """Commit, branch, dirty flag, untracked files and diff of the code that runs, wherever it is called from."""
    unknown: dict[str, Any] = {"commit": None, "branch": None, "dirty": None, "untracked": [], "diff": None}
    snapshot = os.environ.get("STUDY_SNAPSHOT")
    with suppress(OSError, ValueError):
        found = json.loads(Path(snapshot or _ROOT / SNAPSHOT).read_bytes())
        if isinstance(found, dict):
            return {key: found.get(key, default) for key, default in unknown.items()}
    with suppress(OSError, subprocess.SubprocessError):
        _git("ls-files", "--error-unmatch", "study/__init__.py")  # fails where another project's checkout is around it
        lines = _git("status", "--porcelain=v2", "--branch", "--untracked-files=all", "--", *_CODE).splitlines()
        head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
        untracked = [line[2:] for line in lines if line.startswith("? ")]
        dirty = any(line[0] in "12u" for line in lines if line)
        commit = None if head.get("branch.oid") == "(initial)" else head.get("branch.oid")
        diff = _git("diff", "--no-ext-diff", "--no-color", commit, "--", *_CODE) if dirty and commit else None
        if diff is not None and len(diff) > LONGEST_DIFF:
            diff = f"{diff[:LONGEST_DIFF]}\n(cut: {len(diff)} characters in all)\n"
        return {
            "commit": commit,
            "branch": head.get("branch.head"),
            "dirty": dirty,
            "untracked": untracked[:MOST_UNTRACKED],
            "diff": diff,
        }
    return unknown


def _git(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set in a hook
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # many jobs look at one checkout
    done = subprocess.run(
        ["git", "-c", f"safe.directory={_ROOT}", "-C", str(_ROOT), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        check=True,
    )
    return done.stdout.decode(errors="replace")


def versions() -> dict[str, str]:
    """Python's version and those of the installed packages that matter, without importing them."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


_SLURM = {
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NODELIST",
    "SLURM_CLUSTER_NAME",
}


def job_id() -> str | None:
    """The scheduler's name for this job, ``<array>_<task>`` in an array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def _cpu() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None


def _gpus() -> list[str]:
    """Names of the machine's NVIDIA GPUs, as the driver tells them."""
    names = []
    with suppress(OSError):
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            lines = path.read_text().splitlines()
            names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return names


def fingerprint(origin: dict[str, Any]) -> str | None:
    """The code in one word: the commit, and a hash of the diff if there is one."""
    if origin["commit"] is None:
        return None
    changed = hashlib.sha256(origin["diff"].encode()).hexdigest()[:8] if origin["diff"] else ""
    return f"{origin['commit']}+{changed}" if changed else str(origin["commit"])


def write(folder: Path, origin: dict[str, Any]) -> None:
    """Keep an attempt's origin: the diff as provenance.diff, the rest as provenance.json.

    Raises:
        StorageError: it could not be written.
    """
    diff = origin.get("diff")
    if diff is None:
        (folder / DIFF).unlink(missing_ok=True)
    elif diff != DIFF:
        files.write_atomic(folder / DIFF, diff)
    kept = {**origin, "diff": None if diff is None else DIFF}
    files.write_atomic(folder / FILE, json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def read(folder: Path) -> dict[str, Any]:
    """``provenance.json`` of the run in ``folder``; empty if there is none, or none that can be read.

    The top level describes the newest attempt; ``attempts`` lists them all, oldest first, as {attempt, host, pid,
    job_id, numerics, code, started, ended, state} with Unix seconds.
    """
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
