"""One run in this process: the trainer, and beside it the mirror that pushes what it records to MLflow."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from study.config.schema import Config

if TYPE_CHECKING:
    from study.train.trainer import Outcome

HURRIED_S = 10.0
"""Seconds that MLflow may take after a run that was stopped: its job is about to be taken away."""


def run(
    config: Config,
    runs_dir: Path,
    *,
    threads: int | None = None,
    mlflow: bool = False,
    device: str = "auto",
    compile: bool = False,
    checkpoint_every: float = 60.0,
) -> "Outcome":
    """Train the run that ``config`` defines, or continue it. Nothing has imported torch yet where ``threads`` is set.

    Args:
        config: the run.
        runs_dir: where runs live.
        threads: of the CPU; as many as the run began with, else all cores, when None.
        mlflow: push to the store beside the training; what it could not take is said on stderr, and costs the run
            nothing.
        device: ``cpu``, ``cuda``, ``cuda:1`` or ``auto``.
        compile: the encoders, with torch.compile.
        checkpoint_every: seconds between checkpoints.

    Raises:
        UserError: as `study.train.trainer.train` does.
    """
    if threads is not None:
        # Before torch is imported, so that every library of this process agrees.
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(threads)
    from study.train.trainer import Runtime, train

    runtime = Runtime(
        runs_dir=runs_dir,
        device=device,
        threads=threads,
        compile=compile,
        checkpoint_every=checkpoint_every,
        command=tuple(sys.argv),
    )
    mirror = None
    if mlflow:
        from study.tracking.mirror import start_mirror

        mirror = start_mirror(runs_dir)
    outcome = None
    try:
        outcome = train(config, runtime)
    finally:
        if mirror is not None:
            report = mirror.stop() if outcome is not None and outcome.exit_code == 0 else mirror.stop(HURRIED_S)
            if not report.complete:
                print(f"study: MLflow: {report.error or '; '.join(report.problems)}", file=sys.stderr)
    return outcome
