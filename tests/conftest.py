"""Settings of every test: one thread each, and no tracker but the test's own."""

import os

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ.pop("MLFLOW_TRACKING_URI", None)
