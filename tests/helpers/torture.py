"""What issue B promises, shown with accidents on purpose: real processes, real images, a real MLflow.

    python tests/helpers/torture.py [kills | server | crowd | disk …] [--json]

kills   50 kill -9 and some TERM, INT, USR2 at random moments of real training, the mirror killed now and then as well.
server  an `mlflow server` killed and started three times during a sweep, and an undisturbed sweep beside it, six times.
crowd   32 processes that finish at once, each with a mirror of its own, into one store that does not exist yet.
disk    a full disk, a failing one that forgets what was not synced, a torn journal, a damaged checkpoint, a clock set
        back.

Without a name, all of them: about twenty minutes on two idle cores. Figures are printed; exit code 1 if a promise
was broken, and then the folder is kept.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from itertools import count
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import yaml
from accidents import ENVIRONMENT, LONG, MECHANISMS, ROOT, STUDY, Server, Trainee, Watcher, paces, tracked_points
from troubles import disk

from study.run import files, record, status
from study.sweep.grid import scale_overlay
from study.tracking import store
from study.tracking.mirror import Mirror

Figures = dict[str, Any]

POLITE = {signal.SIGTERM: (143, "killed"), signal.SIGINT: (130, "killed"), signal.SIGUSR2: (85, "scheduled")}
"""Signals that ask: the exit code and the state that they lead to."""
SLOWER = 1.03
"""What a server that comes and goes may cost a step."""


# ------------------------------------------------------------------------------------------------------------- kills


def kills(
    folder: Path,
    hard: int = 50,
    polite: int = 9,
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    length: Sequence[str] = LONG,
) -> Figures:
    """Kill training at random moments of its life until ``hard`` kill -9 and ``polite`` others have struck."""
    chance, runs = random.Random(0), folder / "killed"
    kept = store.resolve(runs)
    struck: Counter[str] = Counter()
    hit: Counter[str] = Counter()
    differing: dict[str, list[str]] = {}
    wrong: list[str] = []
    with Watcher(runs, kept.uri) as watcher:
        for number, mechanism in enumerate(mechanisms):
            due = [signal.SIGKILL] * len(range(number, hard, len(mechanisms)))
            due += [list(POLITE)[i % len(POLITE)] for i in range(number, polite, len(mechanisms))]
            chance.shuffle(due)
            for seed in count():
                overrides = (*MECHANISMS[mechanism], *length, f"seed={seed}")
                whole, broken = Trainee(folder / "unbroken", overrides), Trainee(runs, overrides)
                began = time.time()
                whole.finish()
                known = status.read(whole.folder)
                assert known is not None and known.steps
                for at in sorted(chance.uniform(-0.15, 1.1) * known.steps for _ in due):
                    late = chance.uniform(0.0, known.started - began if at < 0 else 0.3 if at < known.steps else 1.0)
                    moment = _strike(broken, due[-1], min(at, known.steps), late, wrong)
                    if moment is None:
                        break  # it was faster; the rest is for another seed
                    hit[moment] += 1
                    hit["saving"] += bool(list(broken.folder.glob(f"checkpoints/{files.TEMPORARY}")))
                    struck[due.pop().name] += 1
                    if struck.total() % 10 == 0:
                        watcher.kill()
                        watcher.start()
                broken.finish()
                if names := broken.differs(whole):
                    differing[f"{mechanism} seed={seed}"] = names
                if not due:
                    break
        watcher.stop()
    counts = tracked_points(kept.uri, runs)
    return {
        "signals": dict(struck),
        "hit": dict(hit),
        "runs": counts["runs"],
        "runs not bit-equal": differing,
        "wrong exits": wrong,
        "MLflow": counts,
        "passed": not differing and not wrong and _exact(counts),
    }


def _strike(broken: Trainee, sent: signal.Signals, at: float, late: float, wrong: list[str]) -> str | None:
    """A new attempt that is sent a signal so many seconds after a step, or after its start if that is negative.

    Returns:
        What it was doing; None if it had finished before.
    """
    process = broken.start()
    if at >= 0:
        broken.reached(process, at)
    time.sleep(late)
    if process.poll() is not None:
        process.communicate()
        return None
    moment = status.read(broken.folder)
    process.send_signal(sent)
    said, known = process.communicate()[1], status.read(broken.folder)
    if moment is None or moment.pid != process.pid or moment.phase is None:
        return "start"  # it did not listen to signals yet
    assert known is not None
    ended = process.returncode, known.state
    if sent != signal.SIGKILL and ended not in {POLITE[sent], (0, "finished")}:  # or the last step had been done
        wrong.append(f"{sent.name}: {ended}, not {POLITE[sent]}: {said}")
    return moment.phase


def _exact(counts: Mapping[str, int]) -> bool:
    return counts["points"] > 0 and not any(counts[name] for name in ("lost", "doubled", "not FINISHED", "in Default"))


# ------------------------------------------------------------------------------------------------------------ server


def server(folder: Path, pairs: int = 6, points: int = 3, epochs: int = 6) -> Figures:
    """Pairs of sweeps at the same time, a core each: the server of one is killed three times, that of the other stays.

    Side by side, since a shared machine has slow minutes that both meet. The start of a server costs more than its
    absence could, so beside the undisturbed sweep another one, which nobody uses, is killed and started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sweep = folder / "torture.yaml"
    shutil.copytree(ROOT / "sweeps" / "scales", folder / "scales")
    tree = {
        "name": "torture",
        "title": "A server that comes and goes",
        "base": {"data.train_images": 5120, "optimiser.epochs": epochs, "evaluation.linear_epochs": 0},
        "axes": {"m": [0.99]},
        "seeds": {"quick": list(range(points))},
    }
    sweep.write_text(yaml.safe_dump(tree))
    steps = points * epochs * 5120 // int(scale_overlay("quick")["optimiser"]["batch"])

    def run(name: str, disturbed: bool) -> tuple[dict[str, int], list[float], list[float]]:
        """What MLflow has in the end; ms a step of each run, without and with its waits for a free core."""
        runs = folder / name
        used, unused = (store.resolve(folder / "stores" / kind / name) for kind in ("used", "unused"))
        with Server(used) as there, nullcontext(there) if disturbed else Server(unused) as victim, paces(runs) as seen:
            command = (*STUDY, "sweep", "submit", str(sweep), "--scale", "quick", "--runs-dir", str(runs))
            environment = ENVIRONMENT | {store.VARIABLE: there.uri}
            with (folder / f"{name}.log").open("ab") as log:
                launcher = subprocess.Popen(
                    (*command, "--workers", "1"), cwd=ROOT, env=environment, stdout=log, stderr=log
                )
            for down in (1, 3, 5):
                _until(runs, launcher, steps * down / 8)
                victim.kill()
                _until(runs, launcher, steps * (down + 1) / 8)
                victim.start()
            assert launcher.wait() == 0, (folder / f"{name}.log").read_text()
            counts = tracked_points(there.uri, runs)
        ended = [known for path in runs.glob("*/status.json") if (known := status.read(path.parent))]
        return (
            counts,
            [1000 * (pace.seconds - pace.waited) / pace.steps for pace in seen.values()],
            [1000 * known.train_seconds / known.step for known in ended],
        )

    kinds = {"quiet": False, "disturbed": True}
    with ThreadPoolExecutor(2) as pool:
        done = [
            dict(zip(kinds, pool.map(lambda kind, i=i: run(f"{i}-{kind}", kinds[kind]), kinds), strict=True))
            for i in range(pairs)
        ]
    ratios = [statistics.mean(pair["disturbed"][1]) / statistics.mean(pair["quiet"][1]) for pair in done]
    counts = [each[kind][0] for each in done for kind in kinds]
    return {
        "sweeps": 2 * pairs,
        "server kills": 3 * pairs,
        "ms a step": {kind: _spread([x for pair in done for x in pair[kind][1]]) for kind in kinds},
        "ms a step with the waits for a free core": {
            kind: _spread([x for pair in done for x in pair[kind][2]]) for kind in kinds
        },
        "disturbed ÷ quiet of each pair": [round(ratio, 3) for ratio in ratios],
        "their mean": round(statistics.mean(ratios), 4),
        "its standard error": round(statistics.stdev(ratios) / math.sqrt(pairs), 4),
        "MLflow": {name: sum(each[name] for each in counts) for name in counts[0]},
        "passed": statistics.mean(ratios) <= SLOWER and all(map(_exact, counts)),
    }


def _until(runs: Path, launcher: "subprocess.Popen[bytes]", steps: float) -> None:
    """Wait until all runs together have done so many steps."""
    while launcher.poll() is None:
        if sum(known.step for path in runs.glob("*/status.json") if (known := status.read(path.parent))) >= steps:
            return
        time.sleep(0.05)


def _spread(values: Sequence[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 2) for name, value in named.items()}


# ------------------------------------------------------------------------------------------------------------- crowd


def crowd(folder: Path, number: int = 32) -> Figures:
    """Processes that finish at once and mirror at once, into a store that is not there."""
    import_module("mlflow.tracking")
    context = multiprocessing.get_context("fork")  # so that they meet, and not each when its imports are done
    barrier, results = context.Barrier(number), context.Queue()
    began = time.monotonic()
    crowd = [context.Process(target=_one_of_a_crowd, args=(folder, i, barrier, results)) for i in range(number)]
    for process in crowd:
        process.start()
    reports = [json.loads(results.get(timeout=600)) for _ in crowd]
    for process in crowd:
        process.join()
    counts = tracked_points(store.resolve(folder).uri, folder)
    complete = sum(report["error"] is None and not report["problems"] for report in reports)
    return {
        "processes": number,
        "mirrors that served all": complete,
        "seconds": round(time.monotonic() - began, 1),
        "MLflow": counts,
        "passed": counts["runs"] == number and _exact(counts),
    }


def _one_of_a_crowd(runs_dir: Path, seed: int, barrier: Barrier, results: "multiprocessing.Queue[str]") -> None:
    config = Trainee(runs_dir, (f"seed={seed}",)).config
    with record.start(runs_dir, config, command=["torture"]) as run:
        for step in range(1, 41):
            run.log(step, {"train/loss": 8.0 / step, "train/lr": 0.03, "train/accuracy": seed / step})
        run.log(40, {"knn": seed / 64})
        barrier.wait()
        run.finish({"knn": seed / 64})
    results.put(Mirror(runs_dir).sync().json())


# -------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    parts = {part.__name__: part for part in (kills, server, crowd, disk)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--json", action="store_true", help="for a program to read")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"{', '.join(unknown)}: allowed is {', '.join(parts)}")
    os.environ.update(ENVIRONMENT)
    os.environ.pop(store.VARIABLE, None)
    folder = Path(tempfile.mkdtemp(prefix="study-torture-"))
    found = {}
    for name in arguments.parts or parts:
        began = time.monotonic()
        found[name] = parts[name](folder / name)
        if not arguments.json:
            seconds = time.monotonic() - began
            print(f"{name}: {'passed' if found[name]['passed'] else 'FAILED'} after {seconds:.0f} s", flush=True)
            print(yaml.safe_dump(found[name], sort_keys=False, width=110), flush=True)
    if arguments.json:
        print(json.dumps(found, indent=1))
    passed = all(figures["passed"] for figures in found.values())
    if passed:
        shutil.rmtree(folder)
    else:
        print(f"kept: {folder}", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
