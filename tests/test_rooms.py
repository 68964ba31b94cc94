"""What a room may bring along when it is imported: the contracts in pyproject.toml see no import inside a function."""

import subprocess
import sys

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys
room = importlib.import_module("study." + sys.argv[1])
for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
    importlib.import_module(module.name)
print(sorted({"torch", "torchvision", "mlflow"} & set(sys.modules)))
"""


@pytest.mark.parametrize("room", ["cli", "slurm", "launch", "tracking", "report", "sweep", "config"])
def test_a_room_starts_without_torch_and_mlflow(room: str) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, room], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
