"""The mirror: what the folders of runs say, shown in MLflow, by one writer that can be killed at any moment.

A folder is the truth. Each run has one tracked run in each experiment that it belongs to, found by the tag
``study.signature``. ``<run>/mirror.json`` notes, for each experiment of each store, how far that is; it is written
after the store has acknowledged, so what a kill interrupts is sent again, and MLflow keeps equal points once. Where the
note is lost, or the journal does not continue what was sent, the store is compared with the journal: what is missing
is added, and a run that holds anything else is made anew.
"""

import getpass
import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.errors import UserError
from study.run import files, journal, provenance, store, tracked
from study.run.tracked import Entry, Facts, Point

if TYPE_CHECKING:
    from study.run.tracker import Experiment, Known, Tracker

NOTE = "mirror.json"
ARTIFACTS = ("config.yaml", "provenance.json", provenance.DIFF, "traceback.txt", "log.txt")
INTERVAL_S = 5.0
LONGEST_INTERVAL_S = 60.0
STOP_S = 600.0


@dataclass
class SyncReport:
    """What a pass did. ``error``: why the store could not be served, if so; ``problems``: runs that could not."""

    runs: int = 0
    created: int = 0
    updated: int = 0
    points: int = 0
    removed: int = 0
    problems: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the store now shows all that the folders say."""
        return self.error is None and not self.problems

    def __str__(self) -> str:
        counts = f"{self.runs} runs: {self.created} new, {self.updated} updated, {self.points} points sent"
        return counts + (f", {self.removed} doubles removed" if self.removed else "")

    def json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class Progress:
    """How much of a run one experiment has: the journal up to ``offset``, and the last value of each metric."""

    run_id: str
    offset: int = 0
    tail: str = ""
    last: dict[str, tuple[int, str]] = field(default_factory=dict)
    described: str = ""
    artifacts: dict[str, str] = field(default_factory=dict)
    state: tuple[str, int | None] | None = None
    seen: str = ""


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
        self._trusting = False  # notes are checked against the store at first, and after any fault

    def sync(self, *, deep: bool = False) -> SyncReport:
        """One pass over all runs. Never raises what a store, a network or a damaged folder can cause.

        Args:
            deep: trust no note: compare every point of every run with the store.
        """
        from study.run.tracker import Refused, Unreachable

        report = SyncReport()
        if deep or not self._trusting:
            self._settled.clear()
        trusting, self._trusting = self._trusting, False
        try:
            with store.opened(self.store) as tracker:
                self._trusting = self._pass(tracker, report, trusting, deep)
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
        while not stop.wait(pause):
            served = self.sync().error is None
            pause = interval if served else min(2 * pause, LONGEST_INTERVAL_S)
        self._trusting = False
        return self.sync()

    def _pass(self, tracker: "Tracker", report: SyncReport, trusting: bool, deep: bool) -> bool:
        """Serve all runs; true if the store took everything."""
        from study.run.tracker import Refused, Unreachable

        places = tracked.places(self.runs_dir)
        held: dict[str, dict[str, list[Known]]] = {}
        accepted = True
        for folder in tracked.folders(self.runs_dir):
            report.runs += 1
            try:
                looks = _looks(folder, places.get(folder.name))
                if self._settled.get(folder) == looks:
                    continue
                if folder not in self._params:
                    self._params[folder] = tracked.params(folder)
                known = tracked.facts(folder, self._params[folder])
                for entry in places.get(folder.name) or [tracked.lone(folder.name, known.params)]:
                    experiment = tracker.experiment(entry.place)
                    if not trusting and experiment.id not in held:
                        held[experiment.id] = tracker.runs(experiment)
                    push = _Push(tracker, experiment, folder, entry, known, report, deep)
                    push.run(held[experiment.id].get(folder.name, []) if experiment.id in held else None)
                if known.ended_ms is not None:
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
        return accepted


class _Push:
    """One run into one experiment."""

    def __init__(
        self,
        tracker: "Tracker",
        experiment: "Experiment",
        folder: Path,
        entry: Entry,
        known: Facts,
        report: SyncReport,
        deep: bool,
    ) -> None:
        self.tracker, self.experiment, self.folder, self.entry = tracker, experiment, folder, entry
        self.known, self.report, self.deep = known, report, deep
        self.journal = folder / "metrics.jsonl"
        self.notes = _read_notes(folder)
        noted = self.notes.get(experiment.identity)
        self.progress = Progress(**noted) if noted else None

    def run(self, held: "list[Known] | None") -> None:
        """Bring the store up to date; ``held``: what it has of this run, or None if the note may be trusted."""
        if self.known.started_ms is None:
            return  # nothing has happened yet
        if held is None and self.progress is None:
            held = self.tracker.runs(self.experiment, self.known.signature).get(self.known.signature, [])
        compare = self.deep
        if held is not None:
            compare |= self._adopt(held)
        seen = self._seen()
        if self.progress is not None and self.progress.seen == seen and not compare:
            return
        self.report.updated += self.progress is not None
        if self.progress is None:
            self._create()
        self._describe()
        self._points(compare)
        self._artifacts()
        self._state()
        assert self.progress is not None
        self.progress.seen = seen
        self._note()

    def _adopt(self, held: "list[Known]") -> bool:
        """Settle on one tracked run, or none; true if its points must be compared with the journal."""
        from study.run.tracker import IMPORT

        ours = [run for run in held if run.origin != IMPORT and run.started_ms == self.known.started_ms]
        noted = self.progress.run_id if self.progress else None
        keep = next((run for run in ours if run.id == noted), None) or max(
            ours, key=lambda run: run.metrics, default=None
        )
        for run in held:
            if run is not keep:
                self.tracker.delete(run.id)
                self.report.removed += 1
        if keep is None:
            self.progress = None
            return False
        if self.progress is None or keep.id != noted:
            self.progress = Progress(keep.id)
            return True
        from study.run.tracker import STATES

        if self.progress.state and STATES[self.progress.state[0]] != keep.state:
            self.progress.state, self.progress.seen = None, ""  # someone else has changed it
        return False

    def _create(self) -> None:
        from study.run.tracker import MIRROR

        assert self.known.started_ms is not None
        run_id = self.tracker.create(
            self.experiment, self.known.signature, self.entry.name, self.known.started_ms, MIRROR, _user()
        )
        self.progress = Progress(run_id)
        self.tracker.dataset(run_id, self.known)
        self.report.created += 1

    def _describe(self) -> None:
        assert self.progress is not None
        labels = tags(self.known, self.entry) | dict(self.known.private) | {"mlflow.user": _user()}
        digest = _digest(json.dumps([labels, self.known.params], sort_keys=True, default=str))
        if digest != self.progress.described:
            self.tracker.describe(self.progress.run_id, self.known.params, labels)
            self.progress.described = digest

    def _points(self, compare: bool) -> None:
        assert self.progress is not None
        progress = self.progress
        readings, offset = journal.tail(self.journal, progress.offset)
        if not compare and _tail(self.journal, progress.offset) == progress.tail and self._continues(readings):
            fresh = [Point(reading.name, reading.step, reading.value, reading.time_ms) for reading in readings]
            last = {name: float(value) for name, (_, value) in progress.last.items()}
            last |= {reading.name: reading.value for reading in readings}
            fresh += tracked.final_points(self.known, last)
        else:
            fresh = self._missing(tracked.points(self.known, journal.read(self.journal)))
        self.tracker.log(self.progress.run_id, fresh)
        self.report.points += len(fresh)
        self.progress.offset, self.progress.tail = offset, _tail(self.journal, offset)
        for point in fresh:
            self.progress.last[point.name] = (point.step, repr(point.value))
        self._note()

    def _continues(self, readings: list[journal.Reading]) -> bool:
        """Whether every reading is later than what was sent of its metric."""
        assert self.progress is not None
        last = {name: step for name, (step, _) in self.progress.last.items()}
        for reading in readings:
            if reading.step <= last.get(reading.name, -1):
                return False
            last[reading.name] = reading.step
        return True

    def _missing(self, wanted: list[Point]) -> list[Point]:
        """What the tracked run lacks; it is made anew if it holds a value that was superseded."""
        from study.run.tracker import same

        assert self.progress is not None
        missing, clean = same(wanted, self.tracker.history(self.progress.run_id))
        if not clean:
            self.tracker.delete(self.progress.run_id)
            self.report.removed += 1
            self._create()
            self._describe()
            missing = wanted
        self.progress.last = {point.name: (point.step, repr(point.value)) for point in wanted}
        return missing

    def _artifacts(self) -> None:
        assert self.progress is not None
        for name in ARTIFACTS:
            path = self.folder / name
            if name == "log.txt" and self.known.state == "running":
                continue
            with suppress(FileNotFoundError):
                digest = _digest(path.read_bytes())
                if self.progress.artifacts.get(name) != digest:
                    self.tracker.upload(self.progress.run_id, path)
                    self.progress.artifacts[name] = digest

    def _state(self) -> None:
        """Last, so that FINISHED means complete."""
        assert self.progress is not None
        wanted = (self.known.state, self.known.ended_ms)
        if self.progress.state is None or tuple(self.progress.state) != wanted:
            self.tracker.state(self.progress.run_id, *wanted)
            self.progress.state = wanted

    def _seen(self) -> str:
        """What the folder looked like: a run that still looks so needs nothing."""
        size = self.journal.stat().st_size if self.journal.exists() else 0
        end = _tail(self.journal, size)
        return _digest(repr((size, end, self.known.state, self.known.ended_ms, self.known.attempt, self.entry)))

    def _note(self) -> None:
        assert self.progress is not None
        self.notes[self.experiment.identity] = asdict(self.progress)
        with suppress(files.StorageError):  # a read-only folder: the store is compared again next time
            files.write_atomic(self.folder / NOTE, json.dumps(self.notes, indent=1), durable=False)


def tags(known: Facts, entry: Entry) -> dict[str, str]:
    """Tags of a run as one experiment shows it."""
    from study.run.tracked import param

    place = entry.place
    labels = {f"arm.{axis}": param(value) for axis, value in entry.labels.items()}
    shown = ", ".join(f"{axis} = {param(value)}" for axis, value in entry.labels.items()) or entry.name
    found = {
        "study.signature": known.signature,
        "study.sweep": place.sweep,
        "study.scale": place.scale,
        "study.seed": str(entry.seed),
        "study.floor": entry.floor,
        "study.removed": "true" if entry.removed else None,
        "study.train_seconds": f"{known.train_seconds:.1f}",
        "study.threads": None if known.threads is None else str(known.threads),
        "mlflow.note.content": f"{place.title}: {entry.floor or shown}, seed {entry.seed}.",
        "mlflow.source.name": "study train",
        "mlflow.source.type": "PROJECT" if place.scale else "LOCAL",
        "mlflow.source.git.commit": known.tags.get("study.commit"),
        "mlflow.source.git.branch": known.tags.get("study.branch"),
    }
    return labels | dict(known.tags) | {name: value for name, value in found.items() if value}


def _looks(folder: Path, entries: list[Entry] | None) -> Any:
    """Changes whenever the run, or what the sweeps say of it, changes."""
    sources = [folder / name for name in ("metrics.jsonl", "status.json", "provenance.json")]
    sizes = [(path.stat().st_mtime_ns, path.stat().st_size) for path in sources if path.exists()]
    return sizes, entries


def _read_notes(folder: Path) -> dict[str, Any]:
    try:
        notes = json.loads((folder / NOTE).read_bytes())
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _tail(path: Path, offset: int) -> str:
    """A hash of the 4 KiB before ``offset``: the journal still is the one that was sent."""
    if not offset:
        return ""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, offset - 4096))
        return _digest(file.read(min(offset, 4096)))
    return ""


def _digest(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for this uid
        return str(os.getuid())


# ---------------------------------------------------------------------------------------------- beside a launcher


class Beside:
    """A mirror in a process of its own, at low priority; it ends with its parent, whatever happens to that."""

    def __init__(self, runs_dir: Path, uri: str | None, interval: float) -> None:
        runs_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "study.run.mirror", str(runs_dir), uri or "", str(interval)]
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
    print(report.json(), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
