"""A small sweep in a folder of its own, for the tests of the grid, the plan and the launcher."""

from pathlib import Path
from textwrap import dedent
from typing import Any

from study.sweep.grid import Sweep, load

SCALE = """\
data: {name: fashion-mnist, train_images: 512, size: 32, eval_crop: 1.0}
encoder: {arch: tiny, width: 8, bn: plain, bn_splits: 1}
dictionary: {K: 64}
optimiser: {batch: 64, epochs: 2}
"""


def write(folder: Path, text: str, scale: str = SCALE) -> Path:
    """``small.yaml`` with the scale ``tiny`` beside it; the keys that every sweep needs are added."""
    (folder / "scales").mkdir(parents=True, exist_ok=True)
    (folder / "scales" / "tiny.yaml").write_text(scale)
    path = folder / "small.yaml"
    path.write_text("name: small\ntitle: A small sweep\n" + dedent(text))
    return path


def sweep(folder: Path, text: str, **overrides: Any) -> Sweep:
    return load(write(folder, text), "tiny", overrides)
