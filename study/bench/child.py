"""The trainer in a process of its own: ``python -m study.bench.child FOLDER THREADS CHECKPOINT_S key=value …``.

It says ``ready``, then takes as many steps as each line of its input asks for and answers with the seconds; at the end
of its input it says how many bytes it held at most.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path


class Child:
    """That process, from outside."""

    def __init__(self, folder: Path, threads: int, *changes: str, checkpoint_every: float = 60.0) -> None:
        command = [
            sys.executable,
            "-m",
            "study.bench.child",
            str(folder),
            str(threads),
            str(checkpoint_every),
            *changes,
        ]
        # Each library of the child must agree on the threads before it is imported.
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def ask(self, steps: int) -> None:
        """Start so many steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()

    def seconds(self) -> float:
        """Wait for the steps that were asked for."""
        return float(self._answer())

    def end(self) -> int:
        """End it; the most bytes that it held."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        peak = int(self._answer())
        self._process.wait()
        return peak

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a trainer of the bench ended with exit code {self._process.wait()}")
        return line.strip()


def main(folder: str, threads: str, checkpoint_every: str, *changes: str) -> None:
    """Serve standard input."""
    from study.bench import sides
    from study.config.reading import merge, parse_overrides, resolve
    from study.train.device import configure_torch, pick_device

    device = pick_device("auto")
    configure_torch(device, int(threads))
    config = resolve(merge(sides.TINY, parse_overrides(changes)), "bench")
    with sides.trainer(config, Path(folder), device, checkpoint_every=float(checkpoint_every)) as (take, _):
        take(2)
        print("ready", flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            take(int(line))
            print(time.perf_counter() - began, flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
