"""Settings of every test: one thread each, and no tracker but the test's own."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ.pop("MLFLOW_TRACKING_URI", None)
# `make test &` leaves Ctrl-C ignored, here and in every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _subnormals() -> Iterator[None]:
    """The trainer has the processor flush subnormals to zero; hypothesis, in the same process, wants them back."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
