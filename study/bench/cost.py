"""Cost against size: milliseconds an image, of the trainer and of its encoder alone, as one thing grows."""

import os
from pathlib import Path
from typing import Any

from study.bench import sides
from study.bench.measure import Bench, take_turns, timed
from study.bench.sides import TINY, config_of
from study.run.files import write_atomic
from study.train.device import configure_torch

STEPS = 4
REPEATS = 3
"""At most: the figure shows a course, no goal hangs on it."""


def cost(bench: Bench) -> None:
    """Vary batch, K, the size of the views and the threads, each from the bench's tiny ResNet."""
    cores = len(os.sched_getaffinity(0)) if bench.device.type == "cpu" else 1
    for batch in (32, 64, 128, 256, 512):
        _point(bench, "batch", batch, optimiser__batch=batch)
    for K in (1024, 4096, 16384, 65536):
        _point(bench, "K", K, dictionary__K=K)
    for size in (16, 32, 48, 64):
        _point(bench, "image size", size, data__size=size)
    for threads in sorted({1, *(2**i for i in range(1, 5) if 2**i <= cores), cores}):
        _point(bench, "threads", threads, threads)


def _point(bench: Bench, axis: str, x: int, threads: int = 1, **changes: Any) -> None:
    configure_torch(bench.device, threads)
    config = config_of(TINY, **changes)
    alone = sides.encoder_alone(config, bench.device)
    with sides.trainer(config, bench.folder / "runs", bench.device) as (take, _):
        seconds = take_turns(
            {"trainer": timed(lambda: take(STEPS)), "encoder": timed(lambda: alone(STEPS))},
            min(bench.repeats, REPEATS),
        )
    for side, found in seconds.items():
        milliseconds = 1000 * found / (STEPS * config.optimiser.batch)
        bench.add(f"{side}, {axis} {x}", milliseconds, "ms/image", side=side, axis=axis, x=x)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """``cost.svg`` and ``cost.png`` from the rows of this group; the same rows give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    from study.report import style

    axes_of = list(dict.fromkeys(row["axis"] for row in rows))
    with rc_context(style.RC):
        figure = Figure(figsize=(7.6, 2.9))
        panels = figure.subplots(1, len(axes_of), sharey=True, squeeze=False)[0]
        for axes, axis in zip(panels, axes_of, strict=True):
            for side, colour, marker in zip(("trainer", "encoder"), style.COLOURS, style.MARKERS, strict=False):
                points = [row for row in rows if (row["axis"], row["side"]) == (axis, side)]
                low, high = ([abs(row["value"] - row["spread"][end]) for row in points] for end in (0, 1))
                axes.errorbar(
                    [row["x"] for row in points],
                    [row["value"] for row in points],
                    yerr=[low, high],
                    color=colour,
                    marker=marker,
                    label={"trainer": "trainer", "encoder": "encoder alone"}[side],
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            ticks = sorted({row["x"] for row in rows if row["axis"] == axis})
            axes.set_xticks(ticks, [f"{x // 1024}k" if x >= 1024 else str(x) for x in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(axis)
        panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panels[0].yaxis.set_major_formatter(FormatStrFormatter("%g"))
        panels[0].yaxis.set_minor_locator(NullLocator())
        panels[0].set_ylabel("ms an image")
        panels[0].legend(frameon=False, fontsize=8)
        machine = rows[0]["machine"]
        style.finish(
            figure,
            "Tiny ResNet, batch 256, K 4096, views of 32 pixels and one thread where nothing else is said; "
            f"median and range of {rows[0]['n']} turns. {machine}.",
        )
        drawn = style.render(figure)
    for kind in ("svg", "png"):
        write_atomic(out / f"cost.{kind}", drawn[kind], durable=False)
