"""Runs taken away on purpose: from MLflow, from the exported files, and from the folder of runs, in this order.

The folder goes last, and at once, so that what a kill or a silent store interrupts can be repeated.
"""

import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from study.errors import UserError
from study.run import export, files, listing
from study.run.lock import Lock, RunLocked
from study.tracking import store

TRASH = ".removed"
"""In the folder of runs: where a folder is moved to be deleted."""


@dataclass(frozen=True)
class Found:
    """One run and where it is: ``folder`` is None without one, ``exported`` are the files with a row of it."""

    signature: str
    name: str
    folder: Path | None
    exported: tuple[Path, ...]

    def __str__(self) -> str:
        places = [str(place) for place in (self.folder, *self.exported) if place]
        return f"{self.signature}  {self.name}: {', '.join(places)}, and its tracked runs"


def find(runs: Collection[str], runs_dir: Path, exported: Path) -> list[Found]:
    """The runs with these signatures (or their beginnings, or folders), each once.

    Raises:
        UserError: there is no such run, or more than one, or it is running.
    """
    found: dict[str, Found] = {}
    for run in runs:
        shown = listing.one(run, runs_dir, exported)
        signature = shown["signature"]
        if shown["state"] == "running":
            raise UserError(
                f"command line: RUN = {signature}: is running; allowed is one that has ended or was stopped"
            )
        folder = runs_dir / signature
        paths = tuple(path for path in sorted(exported.glob(f"*{export.RUNS}")) if signature in _signatures(path))
        found[signature] = Found(signature, shown["name"], folder if folder.is_dir() else None, paths)
    return list(found.values())


def remove(found: Collection[Found], runs_dir: Path, exported: Path, target: store.Store) -> int:
    """Remove runs wherever they are.

    Returns:
        How many tracked runs there were.

    Raises:
        UserError: another process holds a run, or the store does not answer; nothing is removed then.
        StorageError: a file or folder cannot be removed; the same call goes on.
    """
    with _held(found):
        tracked = _untrack({one.signature for one in found}, target)
        export.remove(exported, {one.signature for one in found})
        trash = runs_dir / TRASH
        for one in found:
            if one.folder is not None:
                with files.storage(one.folder):
                    trash.mkdir(exist_ok=True)
                    one.folder.rename(trash / one.signature)
    with files.storage(trash):
        if trash.exists():
            shutil.rmtree(trash)
    return tracked


@contextmanager
def _held(found: Collection[Found]) -> Iterator[None]:
    """Nobody can begin one of them meanwhile."""
    with ExitStack() as stack:
        for folder in (one.folder for one in found if one.folder is not None):
            try:
                stack.callback(Lock(folder).release)
            except RunLocked as locked:
                raise UserError(f"{locked}; allowed is a run that has ended or was stopped") from None
        yield


def _untrack(signatures: Collection[str], target: store.Store) -> int:
    from study.tracking.tracker import Refused, Unreachable

    if target.file is not None and not target.file.exists():
        return 0
    try:
        with store.opened(target) as tracker:
            held = [
                run
                for experiment in tracker.experiments().values()
                for signature in signatures
                for runs in tracker.runs(experiment, signature).values()
                for run in runs
            ]
            for run in held:
                tracker.delete(run.id)
            return len(held)
    except (Unreachable, Refused, store.Busy) as error:
        raise target.fault(str(error)) from None


def _signatures(path: Path) -> set[str]:
    return {entry.signature for entry, _ in export.runs(path)}
