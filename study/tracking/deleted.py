"""What a person deleted in MLflow: left alone, said once, and brought back when asked.

MLflow keeps what is deleted until its own `mlflow gc`; only a store that was purged or made anew forgets the wish.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from study.run import files

if TYPE_CHECKING:
    from study.run.facts import Place
    from study.tracking.tracker import Experiment, Tracker

TOLD = "mlflow-deleted.json"
"""In the folder of runs: ids of what was said to stay deleted."""


class Deleted:
    """The wishes that one pass over a store meets.

    Args:
        folder: of runs, where it is kept what was said before.
        restore: bring everything back instead.
        command: that would bring it back.
    """

    def __init__(self, folder: Path, *, restore: bool, command: str) -> None:
        self._told, self._restore, self._command = folder / TOLD, restore, command
        self._left: dict[str, set[str]] = {}
        self._found: dict[str, dict[str, str]] = {}  # experiment's name -> id -> what it is

    def experiment(self, tracker: "Tracker", place: "Place") -> "Experiment":
        """The experiment of a place; what a person deleted of it is known from here on, or is back."""
        experiment = tracker.experiment(place, restore=self._restore)
        if experiment.id in self._left:
            return experiment
        self._left[experiment.id] = set()
        if experiment.deleted:
            self._found[place.name] = {experiment.id: "the experiment"}
            return experiment
        deleted = tracker.deleted(experiment)
        active = tracker.runs(experiment) if deleted else {}
        gone = {run.id: name for name, runs in deleted.items() if name not in active for run in runs}
        if self._restore:
            for run_id in gone:
                tracker.restore(run_id)
        else:
            self._left[experiment.id], self._found[place.name] = set(gone.values()), gone
        return experiment

    def of(self, experiment: "Experiment") -> set[str]:
        """Signatures of the runs that are to stay out of an experiment."""
        return self._left.get(experiment.id, set())

    def notes(self) -> list[str]:
        """What was found and not said before, a line an experiment."""
        try:
            told = set(json.loads(self._told.read_bytes()))
        except (OSError, ValueError, TypeError):
            told = set()
        said = []
        for name, found in sorted(self._found.items()):
            if new := {what for id_, what in found.items() if id_ not in told}:
                what = min(new) if len(new) == 1 else f"{len(new)} runs"
                said.append(
                    f"{name}: left deleted, as in MLflow: {what}; `{self._command}` brings back what was deleted"
                )
        now = {id_ for found in self._found.values() for id_ in found}
        if said or (self._restore and told):
            with suppress(files.StorageError):  # a read-only folder: it is said again
                files.write_atomic(self._told, json.dumps(sorted(now if self._restore else now | told)) + "\n")
        return said
