"""Settings of every test: a shell without settings, one thread each, and no tracker but the test's own."""

import locale
import os
import signal
import sys
from collections.abc import Iterator

import pytest

OF_A_SHELL = {
    *("LANG", "LANGUAGE", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("PYTHONUTF8", "PYTHONIOENCODING", "PYTHONWARNINGS", "PYTHONOPTIMIZE", "MPLBACKEND", "MATPLOTLIBRC"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
}
OF_A_KIND = (
    *("STUDY_", "MLFLOW_", "SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SUBMITIT_", "LC_", "GIT_", "DVC_"),
    *("OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "NUMBA_"),
)
OF_THE_TESTS = {"STUDY_SCREENSHOTS"}


def forget_the_shell() -> None:
    """What a user exports must not change a test's answer: not here, and not in the processes that tests start.

    It happens on import, before a test's file reads its environment, and before xdist starts its workers.
    """
    for name in set(os.environ) - OF_THE_TESTS:
        if name in OF_A_SHELL or name.startswith(OF_A_KIND):
            del os.environ[name]
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # of files that tests read here; a child gets it by itself
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


forget_the_shell()
# `make test &` leaves Ctrl-C ignored, here and in every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _subnormals() -> Iterator[None]:
    """The trainer has the processor flush subnormals to zero; hypothesis, in the same process, wants them back."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
