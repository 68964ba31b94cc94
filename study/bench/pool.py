"""Processes beside each other: which use of the cores trains a grid faster, and what a large queue costs in memory."""

import os

from study.bench.child import Child
from study.bench.measure import Bench, take_turns

STEPS = 16


def pool(bench: Bench) -> None:
    """As many single-thread runs side by side as there are cores ÷ one run on all cores, in images/s."""
    cores = len(os.sched_getaffinity(0))
    single = [Child(bench.folder / "runs", 1, f"seed={100 + i}") for i in range(cores)]
    whole = Child(bench.folder / "runs", cores, f"seed={100 + cores}")

    def together(children: list[Child]) -> float:
        for child in children:
            child.ask(STEPS)
        return max([child.seconds() for child in children])

    seconds = take_turns({"side": lambda: together(single), "whole": lambda: together([whole])}, bench.repeats)
    for child in (*single, whole):
        child.end()
    bench.add(
        f"{cores} runs of one thread side by side ÷ one run of {cores} threads",
        cores * seconds["whole"] / seconds["side"],
        "",
        note="images/s of all; the local pool runs points side by side with one thread each",
    )


def memory(bench: Bench) -> None:
    """Most memory of a process that trains and saves, the queue's own bytes taken off: K 65536 ÷ K 4096."""
    ratios = []
    for repeat in range(bench.repeats):
        peaks = []
        for K in (65536, 4096):
            child = Child(bench.folder / "runs", 1, f"dictionary.K={K}", f"seed={200 + repeat}", checkpoint_every=0.0)
            child.ask(6)
            child.seconds()
            peaks.append(child.end() - K * 128 * 4)
        ratios.append(peaks[0] / peaks[1])
    bench.add("peak memory, K 65536 ÷ K 4096, beyond the queue", ratios, "", at_most=1.3)
