"""Processes that outlive us, each known by its number and its start time, which no later process shares."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from study.errors import UserError

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PATIENCE_S = 30.0


def start(state: Path, name: str, command: list[str], env: dict[str, str], user: str | None = None) -> None:
    """Start a daemon in a session of its own unless it runs, and note its process id and start time."""
    if running(state, name):
        return
    program = shutil.which(command[0], path=PATH)
    assert program is not None, f"{command[0]} was installed above"
    with (state / f"{name}.out").open("ab") as out:
        process = subprocess.Popen(
            [program, *command[1:]], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True, user=user, group=user, extra_groups=[] if user else None, cwd="/",
        )  # fmt: skip
    (state / f"{name}.pid").write_text(f"{process.pid} {start_time(process.pid)}\n")


def running(state: Path, name: str) -> int | None:
    """The process id of a daemon that we started, unless it ended (or its number went to another process)."""
    try:
        pid, started = (state / f"{name}.pid").read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if start_time(int(pid)) == started else None


def start_time(pid: int) -> str | None:
    """When a process began, in clock ticks since the boot, or None when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def stop(state: Path, name: str) -> None:
    pid = running(state, name)
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while running(state, name):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def until(state: Path, name: str, done: Callable[[], bool]) -> None:
    """Wait for something that a daemon does."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if not running(state, name) or time.monotonic() > deadline:
            raise UserError(f"make slurm: {name}: did not start; see its logs in {state}")
        time.sleep(0.1)
