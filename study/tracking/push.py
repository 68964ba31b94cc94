"""One run into one experiment of a store: what is missing there is sent, and a note is kept of how far that is.

``<run>/mirror.json`` is the note, for each experiment of each store. It is written after the store has acknowledged,
so what a kill interrupts is sent again, and MLflow keeps equal points once. Where the note is lost, or the journal
does not continue what was sent, the store is compared with the journal: what is missing is added, and a run that holds
anything else is made anew.
"""

import getpass
import hashlib
import json
import os
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study.run import facts, files, journal, provenance
from study.run.facts import Entry, Facts, Point

if TYPE_CHECKING:
    from study.tracking.tracker import Experiment, Known, Tracker

NOTE = "mirror.json"
TRACEBACK = "traceback.txt"
ARTIFACTS = ("config.yaml", "provenance.json", provenance.DIFF, TRACEBACK, "log.txt")
FIGURE = "figures/training.png"


@dataclass
class SyncReport:
    """What a pass did.

    ``error``: why the store could not be served, if so; ``problems``: runs that could not; ``notes``: what else to say.
    """

    runs: int = 0
    created: int = 0
    updated: int = 0
    points: int = 0
    removed: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def complete(self) -> bool:
        """Whether the store now shows all that the folders say."""
        return self.error is None and not self.problems

    def __str__(self) -> str:
        counts = f"{self.runs} runs: {self.created} new, {self.updated} updated, {self.points} points sent"
        return counts + (f", {self.removed} doubled or superseded removed" if self.removed else "")

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


class Push:
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

    def run(self, held: "list[Known] | None") -> bool:
        """Bring the store up to date; ``held``: what it has of this run, or None if the note may be trusted.

        Returns:
            Whether it took everything; a file that failed is a problem of the report, and never stops the numbers.
        """
        if held is None and self.progress is None:
            held = self.tracker.runs(self.experiment, self.known.signature).get(self.known.signature, [])
        compare = self.deep
        if held is not None:
            compare |= self._adopt(held)
        seen = self._seen()
        if self.progress is not None and self.progress.seen == seen and not compare:
            return True
        before = self._noted()
        if self.progress is None:
            self._create()
        self._describe()
        self._points(compare)
        complete = self._files()
        self._state()
        assert self.progress is not None
        self.progress.seen = seen if complete else ""
        self.report.updated += before not in {None, self._noted()}
        self._note()
        return complete

    def _adopt(self, held: "list[Known]") -> bool:
        """Settle on one tracked run, or none; true if its points must be compared with the journal."""
        from study.tracking.tracker import IMPORT, PLAN, STATES, SUPERSEDED

        started, others = self.known.started_ms, {IMPORT, SUPERSEDED}
        ours = [run for run in held if run.origin == PLAN or (run.origin not in others and run.started_ms == started)]
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
        if keep.origin == PLAN:
            assert started is not None
            self.tracker.begin(keep.id, started)
            self.tracker.dataset(keep.id, self.known)
        if self.progress is None or keep.id != noted:
            self.progress = Progress(keep.id, artifacts={TRACEBACK: ""})  # it may show one of an earlier attempt
            return True
        if self.progress.state and STATES[self.progress.state[0]] != keep.state:
            self.progress.state, self.progress.seen = None, ""  # someone else has changed it
        return False

    def _create(self) -> None:
        from study.tracking.tracker import MIRROR

        assert self.known.started_ms is not None
        run_id = self.tracker.create(
            self.experiment, self.known.signature, self.entry.name, self.known.started_ms, MIRROR, _user()
        )
        self.progress = Progress(run_id)
        self.tracker.dataset(run_id, self.known)
        self.report.created += 1

    def _describe(self) -> None:
        assert self.progress is not None
        from study.tracking.tracker import MIRROR, ORIGIN

        labels = tags(self.known, self.entry) | dict(self.known.private) | {"mlflow.user": _user(), ORIGIN: MIRROR}
        digest = _digest(json.dumps([labels, self.known.params], sort_keys=True, default=str))
        if digest != self.progress.described:
            self.tracker.describe(self.progress.run_id, self.known.params, labels)
            self.progress.described = digest

    def _points(self, compare: bool) -> None:
        assert self.progress is not None
        progress = self.progress
        readings, offset = journal.tail(self.journal, progress.offset)
        if not compare and _tail(self.journal, progress.offset) == progress.tail and self._continues(readings):
            fresh = facts.history_points(readings)
            last = {name: float(value) for name, (_, value) in progress.last.items()}
            last |= {point.name: point.value for point in fresh}
            fresh += facts.final_points(self.known, last)
        else:
            fresh = self._missing(facts.points(self.known, journal.read(self.journal)))
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
        from study.tracking.tracker import same

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

    def _files(self) -> bool:
        """Artifacts and the figure; false if one failed."""
        from study.tracking.tracker import Unreachable

        names = [name for name in ARTIFACTS if name != "log.txt" or self.known.state != "running"]
        sends = [partial(self._artifact, name) for name in names]
        if self.known.ended_ms is not None:
            sends.append(partial(self._figure))
        complete = True
        for send in sends:
            try:
                send()
            except Unreachable as error:  # no file will pass, of no run
                problem = f"artifacts: {error}"
                self.report.problems += [problem] if problem not in self.report.problems else []
                return False
            except Exception as error:
                reason = " ".join(str(error).split())[:200]
                self.report.problems.append(f"{self.folder}: {type(error).__name__}: {reason}")
                complete = False
        return complete

    def _artifact(self, name: str) -> None:
        assert self.progress is not None
        path = self.folder / name
        try:
            digest = _digest(path.read_bytes())
        except FileNotFoundError:
            if self.progress.artifacts.pop(name, None) is not None:  # an earlier attempt's
                self.tracker.remove(self.progress.run_id, name)
            return
        if self.progress.artifacts.get(name) != digest:
            self.tracker.upload(self.progress.run_id, path)
            self.progress.artifacts[name] = digest

    def _figure(self) -> None:
        """The curves, drawn once for each end of the run."""
        from study.tracking import curves

        assert self.progress is not None
        end = _digest(repr((self.progress.offset, self.progress.tail, self.known.state)))
        if self.progress.artifacts.get(FIGURE) == end:
            return
        if image := curves.draw(journal.read(self.journal), f"{self.entry.name}: {self.known.state}"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / Path(FIGURE).name
                path.write_bytes(image)
                self.tracker.upload(self.progress.run_id, path, str(Path(FIGURE).parent))
        self.progress.artifacts[FIGURE] = end

    def _state(self) -> None:
        """After all that was measured, so that FINISHED means complete."""
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

    def _noted(self) -> str | None:
        """The note as text: it differs whenever the store was sent anything."""
        return json.dumps(asdict(self.progress), sort_keys=True) if self.progress else None

    def _note(self) -> None:
        assert self.progress is not None
        self.notes[self.experiment.identity] = asdict(self.progress)
        with suppress(files.StorageError):  # a read-only folder: the store is compared again next time
            files.write_atomic(self.folder / NOTE, json.dumps(self.notes, indent=1), durable=False)


def plan(
    tracker: "Tracker",
    experiment: "Experiment",
    waiting: Collection[Entry],
    removed: Collection[str],
    left: Collection[str],
    since_ms: int,
) -> int:
    """Show the points of a sweep that have not begun as SCHEDULED runs, which become theirs when they do.

    Args:
        tracker: the store.
        experiment: of the sweep.
        waiting: the points that have not begun.
        removed: signatures of points that the sweep no longer has; what still waits of them is taken away.
        left: signatures of points whose run a person deleted.
        since_ms: when the sweep was submitted.

    Returns:
        How many runs were made.
    """
    from study.tracking.tracker import ORIGIN, PLAN

    held = tracker.runs(experiment)
    waiting = [entry for entry in waiting if entry.signature not in left]
    for run in (run for signature in removed for run in held.get(signature, [])):
        if run.origin == PLAN:
            tracker.delete(run.id)
    fresh = [entry for entry in waiting if entry.signature not in held]
    for entry in fresh:
        run_id = tracker.create(experiment, entry.signature, entry.name, since_ms, PLAN, _user())
        known = Facts(entry.signature, "pending", 0, 0, None, None, 0.0, None, {}, {}, {})
        tracker.describe(run_id, {}, tags(known, entry) | {ORIGIN: PLAN})
        tracker.state(run_id, "pending", None)
    return len(fresh)


def tags(known: Facts, entry: Entry) -> dict[str, str]:
    """Tags of a run as one experiment shows it."""
    from study.run.facts import param

    place = entry.place
    labels = {f"arm.{axis}": param(value) for axis, value in entry.labels.items()}
    shown = ", ".join(f"{axis} = {param(value)}" for axis, value in entry.labels.items()) or entry.name
    found = {
        "study.signature": known.signature,
        "study.started_ms": None if known.started_ms is None else str(known.started_ms),
        "study.sweep": place.sweep,
        "study.scale": place.scale,
        "study.seed": str(entry.seed),
        "study.floor": entry.floor,
        "study.removed": "true" if entry.removed else None,
        "study.train_seconds": f"{known.train_seconds:.1f}",
        "study.threads": None if known.threads is None else str(known.threads),
        "mlflow.runName": entry.name,
        "mlflow.note.content": f"{place.title}: {entry.floor or shown}, seed {entry.seed}.{_end(known)}",
        "mlflow.source.name": "study train",
        "mlflow.source.type": "PROJECT" if place.scale else "LOCAL",
        "mlflow.source.git.commit": known.tags.get("study.commit"),
        "mlflow.source.git.branch": known.tags.get("study.branch"),
    }
    return labels | dict(known.tags) | {name: value for name, value in found.items() if value}


def _end(known: Facts) -> str:
    """What the state of a run does not say: MLflow knows no end but finished, failed and killed."""
    if facts.DIVERGED not in known.tags:
        return ""
    return (
        f" **Diverged at step {known.tags[facts.DIVERGED]}**: there the loss was no longer a number, and the run ended."
    )


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
