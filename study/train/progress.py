"""What a person sees of one run while it works, and what its status says."""

import sys
import time
from contextlib import suppress
from types import TracebackType

from study.run.record import RunRecord

LINE_EVERY = 15.0
"""Seconds between two lines where the output is a file."""


class Progress:
    """A bar with images/s and ETA on a terminal, a line now and then in a log; the run's status in both.

    Args:
        run: whose status is kept up to date.
        phase: ``train``, ``evaluate`` or ``probe``.
        first: steps that an earlier attempt has done.
        steps: all of them.
        batch: images a step; 0 when steps are not what is counted.
    """

    def __init__(self, run: RunRecord, phase: str, first: int, steps: int, batch: int = 0) -> None:
        self.run, self.phase, self.first, self.steps, self.batch = run, phase, first, steps, batch
        self.began = self.shown = time.monotonic()
        self.bar = None
        run.progress(phase=phase, step=first, steps=steps, images_per_s=0.0)
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                TextColumn("{task.description:<8}"),
                BarColumn(),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.task = self.bar.add_task(phase, total=1.0, count="")

    def __enter__(self) -> "Progress":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int) -> None:
        """``step`` steps are done."""
        now = time.monotonic()
        images_per_s = (step - self.first) * self.batch / max(now - self.began, 1e-9)
        self.run.progress(phase=self.phase, step=step, steps=self.steps, images_per_s=images_per_s)
        if self.bar is not None:
            self.bar.update(
                self.task, completed=step / self.steps, count=f"step {step}/{self.steps}  {images_per_s:,.0f} images/s"
            )
        elif now - self.shown > LINE_EVERY or step == self.steps:
            self.shown = now
            left = (self.steps - step) * (now - self.began) / max(step - self.first, 1)
            line = f"{self.phase} step {step}/{self.steps}  {images_per_s:,.0f} images/s  {left:.0f} s left"
            with suppress(OSError):  # a log on a full disk: journal and checkpoint say so in the run's own words
                print(line, file=sys.stderr)

    def tick(self, share: float) -> None:
        """A share (0 to 1) of work that is not counted in steps is done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=share, count=f"{share:.0%}")
