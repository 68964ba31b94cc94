"""Stands in for ``study train`` in the tests of the pool: the real lock and status, no torch, and faults on demand.

``python pool_trainer.py CONFIG --runs-dir DIR --threads N``; DIR/faults.json is {point's m: fault}. It notes each
training in DIR/trained.jsonl.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from study.config.reading import read_yaml, resolve
from study.run import status
from study.run.lock import Lock, RunLocked


def main() -> int:
    config = resolve(read_yaml(Path(sys.argv[1])), sys.argv[1])
    runs_dir = Path(sys.argv[3])
    folder = runs_dir / config.signature
    try:
        lock = Lock(folder)
    except RunLocked as locked:
        print(locked)
        return 0
    before = status.read(folder)
    if before is not None and before.state == "finished":
        return 0
    faults = runs_dir / "faults.json"
    fault = json.loads(faults.read_text()).get(str(config.m)) if faults.exists() else None
    now = status.Status(
        config.signature, "running", 1, "train", 1, 8, 64.0, socket.gethostname(), os.getpid(), started=time.time()
    )
    now.threads = int(sys.argv[5])

    def write(state: str, error: str | None = None) -> None:
        now.state, now.error, now.heartbeat = state, error, time.time()
        status.write(folder, now, durable=False)

    def stop(number: int, frame: FrameType | None) -> None:
        write("killed")
        if fault == "slow":  # the state is noted, the process does not leave: it is killed, or its exit code is odd
            print("saved, to be continued", flush=True)
            while not (runs_dir / "go").exists():
                time.sleep(0.05)
            sys.exit(3)
        sys.exit(143)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if fault == "deaf" else stop)
    with (runs_dir / "trained.jsonl").open("a") as file:
        file.write(
            json.dumps({"signature": config.signature, "pid": os.getpid(), "omp": os.environ["OMP_NUM_THREADS"]}) + "\n"
        )
    write("running")
    print(f"training {config.signature}", flush=True)
    if fault == "crash":
        write("failed", "ValueError: the loss is a pineapple")
        return 1
    if fault == "die":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("hang", "deaf", "slow"):
        while not (runs_dir / "go").exists():
            time.sleep(0.05)
    now.step, now.final, now.train_seconds = 8, {"knn": 0.5}, 4.0
    write("finished")
    lock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
