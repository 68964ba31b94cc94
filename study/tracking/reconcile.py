"""A store after an accident: made to say again what the folders say, and what is true of runs that have none."""

import time
from typing import TYPE_CHECKING

from study.run import facts
from study.tracking import store
from study.tracking.mirror import Mirror
from study.tracking.push import SyncReport

if TYPE_CHECKING:
    from study.tracking.tracker import Known, Tracker

SILENT_S = 3600.0
"""A tracked run without a folder here that claims to run, but had no news for so long, is dead."""


def reconcile(mirror: Mirror) -> SyncReport:
    """Compare everything that the folders say with the store, then mend runs that have no folder here.

    Of doubles the one with the most points stays. A run that claims to run without news for an hour becomes KILLED,
    with the time of its last news as its end.
    """
    from study.tracking.tracker import Refused, Unreachable

    report = mirror.sync(deep=True)
    if report.error is not None:
        return report
    here = {folder.name for folder in facts.folders(mirror.runs_dir)} | facts.places(mirror.runs_dir).keys()
    try:
        with store.opened(mirror.store) as tracker:
            for experiment in tracker.experiments().values():
                for signature, held in tracker.runs(experiment).items():
                    if signature not in here:
                        _mend(tracker, held, report)
    except (Unreachable, Refused, store.Busy) as error:
        report.error = mirror.store.fault(str(error)).args[0]
    return report


def _mend(tracker: "Tracker", held: "list[Known]", report: SyncReport) -> None:
    histories = {run.id: tracker.history(run.id) for run in held} if _suspect(held) else {}
    keep = max(held, key=lambda run: len(histories.get(run.id, ())))
    for run in held:
        if run is not keep:
            tracker.delete(run.id)
            report.removed += 1
    if keep.state in {"RUNNING", "SCHEDULED"}:
        news_ms = max((point.time_ms for point in histories[keep.id]), default=keep.started_ms)
        if time.time() - news_ms / 1000 > SILENT_S:
            tracker.state(keep.id, "killed", news_ms)
            report.updated += 1


def _suspect(held: "list[Known]") -> bool:
    return len(held) > 1 or held[0].state in {"RUNNING", "SCHEDULED"}
