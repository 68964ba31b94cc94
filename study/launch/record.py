"""Which points a submitted sweep has, written down in the folder of runs: the mirror and the export read it."""

import json
from pathlib import Path
from typing import Any

from study.errors import UserError
from study.run import files
from study.sweep.grid import Sweep, load


def write(sweep: Sweep, runs_dir: Path) -> Path:
    """Write down, atomically, which points a submitted sweep has; the mirror and the export read it.

    Points of an earlier submission that the grid no longer has are kept under ``removed``.

    Raises:
        StorageError: it cannot be written.
    """
    path = path_of(runs_dir, sweep.id)
    here = {point.signature for point in sweep.points}
    removed = [point for point in points(runs_dir, sweep.id) if point["signature"] not in here]
    text = json.dumps(
        {
            "sweep": sweep.name,
            "scale": sweep.scale,
            "title": sweep.title,
            "description": sweep.description,
            "axes": list(sweep.axes),
            "metric": sweep.metric,
            "path": str(sweep.path),
            "overrides": sweep.overrides,
            "points": [
                {
                    "signature": point.signature,
                    "name": point.name,
                    "labels": point.labels,
                    "seed": point.seed,
                    "floor": point.floor,
                    "after": point.after,
                }
                for point in sweep.points
            ],
            "removed": removed,
        },
        indent=1,
        ensure_ascii=False,
    )
    with files.storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, text + "\n")
    return path


def points(runs_dir: Path, sweep_id: str) -> list[dict[str, Any]]:
    """The points of a sweep as it was last submitted, then those that it once had; none when it never was.

    Raises:
        UserError: the record is damaged.
    """
    tree = _read(path_of(runs_dir, sweep_id))
    return [*tree["points"], *tree["removed"]] if tree else []


def reload(runs_dir: Path, sweep_id: str) -> Sweep | None:
    """The grid of a submitted sweep, from its YAML as that is now; None when it never was submitted.

    Raises:
        UserError: the record is damaged, or the YAML is no longer valid.
    """
    tree = _read(path_of(runs_dir, sweep_id))
    return load(Path(tree["path"]), tree["scale"], tree["overrides"]) if tree else None


def ids(runs_dir: Path) -> list[str]:
    """The sweeps that were submitted."""
    return sorted(path.stem for path in (runs_dir / "sweeps").glob("*.json"))


def path_of(runs_dir: Path, sweep_id: str) -> Path:
    """Where the record of a sweep lies."""
    return runs_dir / "sweeps" / f"{sweep_id}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {"points", "removed", "path", "scale", "overrides"} <= tree.keys():
            return tree
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError):
        pass
    raise UserError(f"{path}: is no record of a sweep; allowed is one that `study sweep submit` wrote")
