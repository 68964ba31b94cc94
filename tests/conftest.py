"""Settings of every test: one thread each, and no tracker but the test's own."""

import os
import sys
from collections.abc import Iterator

import pytest

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture(autouse=True)
def _subnormals() -> Iterator[None]:
    """The trainer has the processor flush subnormals to zero; hypothesis, in the same process, wants them back."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
