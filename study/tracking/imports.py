"""Exported runs into a store: a reader of the committed files browses them as if the runs were here."""

import hashlib
import json
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from study.run import export, facts
from study.run.facts import Entry, Facts
from study.run.journal import Reading
from study.tracking import store
from study.tracking.deleted import Deleted
from study.tracking.push import SyncReport, tags

if TYPE_CHECKING:
    from study.tracking.tracker import Experiment, Known, Tracker

USER = "imported"


def fill(folder: Path, target: store.Store, *, restore: bool = False) -> SyncReport:
    """Put all exported runs into a store; a second time changes nothing.

    A run that the mirror has put there from its own folder stands: the folder is the truth.

    Args:
        folder: what ``study runs export`` wrote.
        target: as ``store.resolve`` gives it.
        restore: bring back what a person deleted in MLflow, which is left alone otherwise.

    Raises:
        UserError: no such files, a damaged one, or a store that cannot work.
    """
    from study.tracking.tracker import Refused, Unreachable

    report = SyncReport()
    files = export.exported(folder)
    deleted = Deleted(target.runs_dir, restore=restore, command="study runs import --restore")
    try:
        with store.opened(target) as tracker:
            for file in files:
                runs = export.read(file)
                experiment = deleted.experiment(tracker, runs[0][0].place) if runs else None
                if experiment is None or experiment.deleted:
                    continue
                held = tracker.runs(experiment)
                for entry, known, readings in runs:
                    report.runs += 1
                    if entry.signature in deleted.of(experiment):
                        continue
                    try:
                        _fill_one(tracker, experiment, entry, known, readings, held.get(entry.signature, []), report)
                    except Refused as error:
                        report.problems.append(f"{file}: {entry.signature}: {error}")
            report.notes += deleted.notes()
    except (Unreachable, Refused, store.Busy) as error:
        report.error = target.fault(str(error)).args[0]
    return report


def _fill_one(
    tracker: "Tracker",
    experiment: "Experiment",
    entry: Entry,
    known: Facts,
    readings: list[Reading],
    held: "list[Known]",
    report: SyncReport,
) -> None:
    from study.tracking.tracker import CONTENT, IMPORT, PLAN, same

    if known.started_ms is None:
        return
    content = _digest(entry, known, readings)
    own = any(run.origin not in {IMPORT, PLAN} for run in held)
    imported = sorted((run for run in held if run.origin == IMPORT), key=lambda run: run.content != content)
    keep = imported[0] if imported and not own and imported[0].started_ms == known.started_ms else None
    for run in (run for run in held if run.origin in {IMPORT, PLAN}):
        if run is not keep:
            tracker.delete(run.id)
            report.removed += 1
    if own or (keep is not None and keep.content == content):
        return
    wanted = facts.points(known, readings)
    missing, clean = same(wanted, tracker.history(keep.id)) if keep else (wanted, True)
    if keep is not None and not clean:
        tracker.delete(keep.id)
        report.removed += 1
        keep, missing = None, wanted
    if keep is None:
        run_id = tracker.create(experiment, entry.signature, entry.name, known.started_ms, IMPORT, USER)
        report.created += 1
        tracker.dataset(run_id, known)
    else:
        run_id = keep.id
        report.updated += 1
    tracker.describe(run_id, known.params, tags(known, entry) | {"mlflow.user": USER})
    tracker.log(run_id, missing)
    report.points += len(missing)
    tracker.state(run_id, known.state, known.ended_ms)
    tracker.describe(run_id, {}, {CONTENT: content})  # last: what a kill leaves unfinished is taken up again


def _digest(entry: Entry, known: Facts, readings: list[Reading]) -> str:
    whole = json.dumps([entry.name, dict(entry.labels), entry.floor, astuple(known), readings], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
