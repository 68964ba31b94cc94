"""The mirror: what the folders of runs say, shown in MLflow, by one writer that can be killed at any moment.

A folder is the truth. Each run has one tracked run in each experiment that it belongs to, found by the tag
``study.signature``; a point of a submitted sweep that has not begun has one there, too. What
``study.tracking.push`` sends of a run is noted in its folder.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import UserError
from study.run import facts
from study.run.facts import Entry, Place
from study.tracking import store
from study.tracking.deleted import Deleted
from study.tracking.push import Push, SyncReport, plan

if TYPE_CHECKING:
    from study.tracking.tracker import Known, Tracker

INTERVAL_S = 5.0
LONGEST_INTERVAL_S = 60.0
STOP_S = 600.0


class Mirror:
    """Pushes a folder of runs to a store.

    Args:
        runs_dir: the folder of runs.
        uri: the store; by default that of ``store.resolve``.
        into: the folder whose default store is meant, if not ``runs_dir`` itself (a copy, an archive).
    """

    def __init__(self, runs_dir: Path, uri: str | None = None, *, into: Path | None = None) -> None:
        self.runs_dir = runs_dir.resolve()
        self.store = store.resolve(into or runs_dir, uri)
        self._params: dict[Path, dict[str, Any]] = {}
        self._settled: dict[Path, Any] = {}  # how the folders of ended runs looked when all of them was sent
        self._planned: dict[Place, Any] = {}  # the points that have not begun, as the store shows them
        self._deleted: Deleted | None = None  # what a person deleted, as of the last pass that trusted no note
        self._trusting = False  # notes are checked against the store at first, and after any fault

    def sync(self, *, deep: bool = False, restore: bool = False) -> SyncReport:
        """One pass over all runs. Never raises what a store, a network or a damaged folder can cause.

        What a person deleted in MLflow is left alone.

        Args:
            deep: trust no note: compare every point of every run with the store.
            restore: bring back what a person deleted.
        """
        from study.tracking.tracker import Refused, Unreachable

        report = SyncReport()
        if deep or restore or not self._trusting or self._deleted is None:
            self._settled.clear()
            self._planned.clear()
            command = "study runs sync --restore"
            self._trusting, self._deleted = False, Deleted(self.store.runs_dir, restore=restore, command=command)
        trusting, self._trusting = self._trusting, False
        try:
            with store.opened(self.store) as tracker:
                self._trusting = self._pass(tracker, report, self._deleted, trusting, deep)
                report.notes += self._deleted.notes()
        except (Unreachable, Refused, store.Busy) as error:
            report.error = self.store.fault(str(error)).args[0]
        except UserError as error:
            report.error = str(error)
        return report

    def watch(self, stop: threading.Event, interval: float = INTERVAL_S) -> SyncReport:
        """Pass after pass until ``stop`` is set, then a last one that checks everything; its report.

        While the store does not answer, the passes become rarer, up to one a minute.
        """
        pause = interval
        notes: list[str] = []
        while not stop.wait(pause):
            report = self.sync()
            notes += report.notes
            pause = interval if report.error is None else min(2 * pause, LONGEST_INTERVAL_S)
        self._trusting = False
        report = self.sync()
        report.notes[:0] = notes
        return report

    def _pass(self, tracker: "Tracker", report: SyncReport, deleted: Deleted, trusting: bool, deep: bool) -> bool:
        """Serve all runs; true if the store took everything."""
        from study.tracking.tracker import Refused, Unreachable

        places = facts.places(self.runs_dir)
        held: dict[str, dict[str, list[Known]]] = {}
        accepted = True
        begun = set()
        for folder in facts.folders(self.runs_dir):
            report.runs += 1
            begun.add(folder.name)
            try:
                looks = _looks(folder, places.get(folder.name))
                if self._settled.get(folder) == looks:
                    continue
                if folder not in self._params:
                    self._params[folder] = facts.params(folder)
                known = facts.read(folder, self._params[folder])
                if known.started_ms is None:
                    begun.remove(folder.name)
                    continue
                complete = True
                for entry in places.get(folder.name) or [facts.lone(folder.name, known.params)]:
                    experiment = deleted.experiment(tracker, entry.place)
                    if experiment.deleted or entry.signature in deleted.of(experiment):
                        continue
                    if not trusting and experiment.id not in held:
                        held[experiment.id] = tracker.runs(experiment)
                    push = Push(tracker, experiment, folder, entry, known, report, deep)
                    complete &= push.run(held[experiment.id].get(folder.name, []) if experiment.id in held else None)
                if known.ended_ms is not None and complete:
                    self._settled[folder] = looks
            except Unreachable:
                raise
            except Refused as error:
                accepted = False
                report.problems.append(f"{folder}: {error}")
            except UserError as error:
                report.problems.append(f"{folder}: {error}")
            except Exception as error:  # whatever is wrong with one folder, the others are shown
                report.problems.append(f"{folder}: {type(error).__name__}: {error}")
        self._plan(tracker, report, deleted, [entry for entries in places.values() for entry in entries], begun)
        return accepted

    def _plan(
        self, tracker: "Tracker", report: SyncReport, deleted: Deleted, entries: list[Entry], begun: set[str]
    ) -> None:
        """Show what has not begun, where that has changed."""
        points: dict[Place, list[Entry]] = {}
        for entry in entries:
            points.setdefault(entry.place, []).append(entry)
        for place, those in points.items():
            waiting = [entry for entry in those if not entry.removed and entry.signature not in begun]
            removed = [entry.signature for entry in those if entry.removed]
            wanted = [entry.signature for entry in waiting], removed
            if self._planned.get(place) != wanted:
                submitted = (self.runs_dir / "sweeps" / f"{place.name}.json").stat().st_mtime
                experiment = deleted.experiment(tracker, place)
                if not experiment.deleted:
                    left = deleted.of(experiment)
                    report.created += plan(tracker, experiment, waiting, removed, left, round(submitted * 1000))
                self._planned[place] = wanted


def _looks(folder: Path, entries: list[Entry] | None) -> Any:
    """Changes whenever the run, or what the sweeps say of it, changes."""
    sources = [folder / name for name in ("metrics.jsonl", "status.json", "provenance.json")]
    sizes = [(path.stat().st_mtime_ns, path.stat().st_size) for path in sources if path.exists()]
    return sizes, entries


# ---------------------------------------------------------------------------------------------- beside a launcher


class Beside:
    """A mirror in a process of its own, at low priority; it ends with its parent, whatever happens to that."""

    def __init__(self, runs_dir: Path, uri: str | None, interval: float) -> None:
        runs_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "study.tracking.mirror", str(runs_dir), uri or "", str(interval)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is the launcher's; the mirror ends when its input does
            text=True,
        )
        self._report: SyncReport | None = None

    @property
    def pid(self) -> int:
        """The process that mirrors."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """It has ended, although nobody asked."""
        return self._report is None and self._process.poll() is not None

    def stop(self, timeout: float = STOP_S) -> SyncReport:
        """Ask for a last complete pass and wait for it; a second call gives the same report.

        Args:
            timeout: seconds after which the mirror is killed; a later ``study runs sync`` does the rest.
        """
        if self._report is None:
            self._report = self._stop(timeout)
        return self._report

    def _stop(self, timeout: float) -> SyncReport:
        try:
            out, _ = self._process.communicate(timeout=timeout)
            return SyncReport(**json.loads(out.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return SyncReport(error=f"the mirror was not done after {timeout:.0f} s; `study runs sync` goes on")
        except (ValueError, IndexError, TypeError):
            return SyncReport(error="the mirror ended early; `study runs sync` goes on")


def start_mirror(runs_dir: Path, uri: str | None = None, interval: float = INTERVAL_S) -> Beside:
    """Mirror a folder of runs in the background until ``stop`` is called on the result."""
    return Beside(runs_dir, uri, interval)


def _main(runs_dir: str, uri: str, interval: str) -> None:
    os.nice(10)
    stop = threading.Event()

    def until_input_ends() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=until_input_ends, daemon=True).start()
    report = Mirror(Path(runs_dir), uri or None).watch(stop, float(interval))
    # Who was to read it may have been killed. A file of its own leaves nothing behind to be flushed at the exit.
    with suppress(BrokenPipeError), open(sys.stdout.fileno(), "w", closefd=False) as out:
        out.write(report.json() + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
