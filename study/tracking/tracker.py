"""MLflow, seen by its one writer: few calls, bounded in time, each fault either ``Unreachable`` or ``Refused``."""

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import getproxies

from study.run.facts import Facts, Place, Point, param

T = TypeVar("T")

LIMITS = {
    # MLflow's own patience is 7 retries of up to 120 s, and it repeats `create_run`, which makes a second run.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
PAUSES = (0.3, 1.5)
"""Seconds before a call that may be repeated is repeated."""
BATCH = 1000
PERMANENT = {
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "INVALID_STATE",
    "NOT_FOUND",
    "ENDPOINT_NOT_FOUND",
}
SIGNATURE, ORIGIN, CONTENT, STORE = "study.signature", "study.origin", "study.content", "study.store"
STARTED = "study.started_ms"
IMPORT, MIRROR, PLAN, SUPERSEDED = "import", "mirror", "plan", "superseded"
"""Whence a tracked run is: exported files, a run's folder, or the record of a sweep as long as it has not begun; the
last marks what this program deletes: whatever is deleted without it, a person deleted."""
STATES = {
    "pending": "SCHEDULED",
    "scheduled": "SCHEDULED",
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
}


class Unreachable(Exception):  # noqa: N818
    """The store gives no answer, or none of use; the same call may work later."""


class Refused(Exception):  # noqa: N818
    """The store will never take this."""


@dataclass(frozen=True)
class Experiment:
    """An experiment; ``identity`` is born with it and tells a rebuilt store from the one that it replaces.

    ``deleted``: a person deleted it, and it takes nothing.
    """

    id: str
    identity: str
    deleted: bool = False


@dataclass(frozen=True)
class Known:
    """A run that the store holds; ``metrics`` counts names, ``content`` is the digest of a complete import.

    ``started_ms`` is when it began; of a run that still waits, when it was submitted.
    """

    id: str
    signature: str
    origin: str
    content: str
    state: str
    started_ms: int
    metrics: int


class Tracker:
    """The calls; made by ``store.opened``."""

    def __init__(self, uri: str, artifacts: Path | None) -> None:
        for name, value in LIMITS.items():
            os.environ[name] = value
        for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        self.uri, self.artifacts = uri, artifacts
        self._client = self._call(MlflowClient, uri, uri)
        self._experiments: dict[str, Experiment] = {}
        self._no_files: Unreachable | None = None
        self.close()  # MLflow keeps connections for the life of a process, and the file may be another one by now

    @classmethod
    def open(cls, uri: str, artifacts: Path | None) -> "Tracker":
        """Connect; makes or upgrades a sqlite store, so the caller holds its lock.

        Raises:
            Unreachable: no answer, or a refusal.
        """
        if uri.startswith("sqlite:"):
            _upgrade(uri)
        tracker = cls(uri, artifacts)
        try:
            tracker._call(tracker._client.search_experiments, max_results=1)
        except Refused as error:
            raise Unreachable(str(error)) from error
        return tracker

    def close(self) -> None:
        """Let go of a sqlite file; the next call opens what is there then."""
        engine = getattr(self._client._tracking_client.store, "engine", None)
        if engine is not None:
            engine.dispose()

    # ------------------------------------------------------------------------------------------------ experiments

    def experiment(self, place: Place, *, restore: bool = False) -> Experiment:
        """The experiment of a place, made if need be; its description and views follow the place.

        One that a person deleted is brought back if told to ``restore``.
        """
        if place.name in self._experiments:
            return self._experiments[place.name]
        from study.tracking import view

        found = self._call(self._client.get_experiment_by_name, place.name)
        wanted = {
            "mlflow.note.content": f"**{place.title}**\n\n{place.description}".strip(),
            "mlflow.experimentKind": "custom_model_development",
            "study.sweep": place.sweep,
            "study.scale": place.scale,
            **view.tags(place),
        }
        if found is None:
            location = (self.artifacts / place.name).as_uri() if self.artifacts else None
            tags = wanted | {STORE: uuid.uuid4().hex}
            with suppress(Refused):  # another machine's writer was faster
                self._call(self._client.create_experiment, place.name, location, tags, repeat=False)
            found = self._call(self._client.get_experiment_by_name, place.name)
        elif found.lifecycle_stage == "deleted":
            if not restore:
                return Experiment(found.experiment_id, found.tags.get(STORE, ""), deleted=True)
            self._call(self._client.restore_experiment, found.experiment_id)
        if STORE not in found.tags:  # made by hand
            wanted[STORE] = uuid.uuid4().hex
        for name, value in wanted.items():
            if found.tags.get(name) != value:
                self._call(self._client.set_experiment_tag, found.experiment_id, name, value)
        made = Experiment(found.experiment_id, wanted.get(STORE) or found.tags[STORE])
        self._experiments[place.name] = made
        return made

    def experiments(self) -> dict[str, Experiment]:
        """All experiments of this program's making, by name."""
        found: dict[str, Experiment] = {}
        token = None
        while True:
            page = self._call(self._client.search_experiments, max_results=BATCH, page_token=token)
            found |= {one.name: Experiment(one.experiment_id, one.tags[STORE]) for one in page if STORE in one.tags}
            token = page.token
            if not token:
                return found

    # ------------------------------------------------------------------------------------------------------- runs

    def runs(self, experiment: Experiment, signature: str | None = None) -> dict[str, list[Known]]:
        """The runs of an experiment (or of one signature in it) by signature, each list with the oldest first."""
        return self._search(experiment, f"tags.`{SIGNATURE}` = '{signature}'" if signature else "")

    def deleted(self, experiment: Experiment) -> dict[str, list[Known]]:
        """The runs of an experiment that a person deleted, in the same form."""
        return self._search(experiment, f"tags.`{ORIGIN}` != '{SUPERSEDED}'", deleted=True)

    def _search(self, experiment: Experiment, where: str, *, deleted: bool = False) -> dict[str, list[Known]]:
        from mlflow.entities import ViewType

        found: dict[str, list[Known]] = {}
        token = None
        while True:
            page = self._call(
                self._client.search_runs,
                [experiment.id],
                filter_string=where,
                run_view_type=ViewType.DELETED_ONLY if deleted else ViewType.ACTIVE_ONLY,
                max_results=BATCH,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
            for run in page:
                tags = run.data.tags
                if SIGNATURE in tags:
                    known = Known(
                        run.info.run_id,
                        tags[SIGNATURE],
                        tags.get(ORIGIN, ""),
                        tags.get(CONTENT, ""),
                        run.info.status,
                        int(tags.get(STARTED, run.info.start_time)),
                        len(run.data.metrics),
                    )
                    found.setdefault(known.signature, []).append(known)
            token = page.token
            if not token:
                return found

    def create(self, experiment: Experiment, signature: str, name: str, started_ms: int, origin: str, user: str) -> str:
        """Make a run. Never repeated by itself: if the answer is lost, look for the signature first."""
        tags = {SIGNATURE: signature, ORIGIN: origin, "mlflow.user": user}
        run = self._call(self._client.create_run, experiment.id, started_ms, tags, name, repeat=False)
        return str(run.info.run_id)

    def delete(self, run_id: str) -> None:
        """Take a run out of sight, marked as no person's doing."""
        self._call(self._client.set_tag, run_id, ORIGIN, SUPERSEDED)
        self._call(self._client.delete_run, run_id)

    def restore(self, run_id: str) -> None:
        """Bring a deleted run back as it was."""
        self._call(self._client.restore_run, run_id)

    def describe(self, run_id: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Set params and tags, a hundred a call."""
        from mlflow.entities import Param, RunTag

        texts = [Param(name, param(value)) for name, value in sorted(params.items())]
        labels = [RunTag(name, value[:5000]) for name, value in sorted(tags.items())]
        for start in range(0, max(len(texts), len(labels)), 100):
            self._batch(run_id, params=texts[start : start + 100], tags=labels[start : start + 100])

    def dataset(self, run_id: str, known: Facts) -> None:
        """Say which images a run was trained on."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        name = str(known.params.get("data.name", ""))
        count = param(known.params.get("data.train_images"))
        digest = known.tags.get("study.images", f"first-{count}" if count != "null" else "all")[:36]
        data = Dataset(name, digest, "local", f"study data get {name}")
        inputs = [DatasetInput(data, [InputTag("mlflow.data.context", "training")])]
        self._call(self._client.log_inputs, run_id, inputs)

    def log(self, run_id: str, points: Sequence[Point]) -> None:
        """Store points with their own times; storing one again changes nothing."""
        from mlflow.entities import Metric

        for start in range(0, len(points), BATCH):
            part = points[start : start + BATCH]
            self._batch(run_id, metrics=[Metric(point.name, point.value, point.time_ms, point.step) for point in part])

    def history(self, run_id: str) -> list[Point]:
        """All points of a run, complete (page by page, never sampled)."""
        run = self._call(self._client.get_run, run_id)
        found: list[Point] = []
        for name in sorted(run.data.metrics):
            for metric in self._call(self._client.get_metric_history, run_id, name):
                found.append(Point(name, metric.step, metric.value, metric.timestamp))
        return found

    def state(self, run_id: str, state: str, ended_ms: int | None) -> None:
        """Set the status; a run that goes on has no end, which 0 says since MLflow cannot unset it."""
        from mlflow.entities import RunStatus

        status = RunStatus.from_string(STATES[state])
        self._call(self._client._tracking_client.store.update_run_info, run_id, status, ended_ms or 0, None)

    def begin(self, run_id: str, started_ms: int) -> None:
        """Give a run that was made while it waited its true start.

        A server has no call for that: there the run keeps the time of its submission, and the tag ``study.started_ms``
        says when it began.
        """
        engine = getattr(self._client._tracking_client.store, "engine", None)
        if engine is None:
            return
        from sqlalchemy import text

        def write() -> None:
            with engine.begin() as database:
                command = text("UPDATE runs SET start_time = :start WHERE run_uuid = :run")
                database.execute(command, {"start": started_ms, "run": run_id})

        self._call(write)

    def upload(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Store a file under its own name in the run's artifacts: at the top, or in a folder there.

        Raises:
            Unreachable: files find no place; then at once for all that follow, whose numbers are not to wait for it.
        """
        if self._no_files is not None:
            raise self._no_files
        try:
            self._call(self._client.log_artifact, run_id, str(path), folder)
        except Unreachable as error:
            self._no_files = error
            raise

    def remove(self, run_id: str, artifact: str) -> None:
        """Remove a file from the run's artifacts, if it is there."""
        self._call(lambda: self._client._tracking_client._get_artifact_repo(run_id).delete_artifacts(artifact))

    # --------------------------------------------------------------------------------------------------- plumbing

    def _batch(self, run_id: str, **entities: Any) -> None:
        self._call(self._client.log_batch, run_id, **entities)

    def _call(self, function: Callable[..., T], *arguments: Any, repeat: bool = True, **named: Any) -> T:
        for pause in (*PAUSES, None) if repeat else (None,):
            try:
                return function(*arguments, **named)
            except Exception as error:
                if not _passing(error):
                    raise Refused(_line(error)) from error
                if pause is None:
                    raise Unreachable(_line(error)) from error
                time.sleep(pause)
        raise AssertionError("unreachable")


def _passing(error: Exception) -> bool:
    """Whether the same call may work later. Raises the error again if it is a fault of this program."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    if isinstance(error, MlflowException):
        return error.error_code not in PERMANENT
    if isinstance(error, OSError | SQLAlchemyError):  # requests' errors are OSErrors
        return True
    raise error


def _line(error: Exception) -> str:
    """The fault in one line, with what helps."""
    text = " ".join(str(error).split())
    if "Invalid Host header" in text:  # what MLflow itself says
        return "the server refuses this Host header (403); start it with --allowed-hosts and the host:port of the URI"
    if answer := re.search(r"error code (401|403|407)\b.*?(?:Response body: '(.*)')?$", text):
        said = " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", answer[2] or "").split())[:120]
        proxy = "; a proxy is set, and no_proxy with the server's host goes past it" if getproxies() else ""
        return f"the server, or a proxy before it, refuses ({answer[1]}){': ' if said else ''}{said}{proxy}"
    if "database or disk is full" in text or "No space left" in text:
        return "the disk is full; what is missing there follows from the runs once there is room"
    for sign, meaning in (
        ("Connection refused", "no server answers there (connection refused); start `mlflow server`"),
        ("timed out", "the server does not answer in time"),
        ("timeout", "the server does not answer in time"),
        ("Name or service not known", "no such host"),
        ("Failed to resolve", "no such host"),
        ("429", "the server asks to come back later (429)"),
    ):
        if sign in text:
            return meaning
    return text[:300]


def _upgrade(uri: str) -> None:
    """Make or upgrade the tables of a sqlite store."""
    from mlflow.exceptions import MlflowException
    from mlflow.store.db import utils
    from sqlalchemy.exc import SQLAlchemyError

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    try:
        engine = utils.create_sqlalchemy_engine_with_retry(uri)
        utils._safe_initialize_tables(engine)
        if utils._get_schema_version(engine) != utils._get_latest_schema_revision():
            utils._upgrade_db(engine)
        engine.dispose()
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise Unreachable(_line(error)) from error


def same(wanted: Iterable[Point], held: Iterable[Point]) -> tuple[list[Point], bool]:
    """What the store still lacks, and whether it holds nothing that is not wanted."""
    have = {point.key for point in held}
    want = {point.key: point for point in wanted}
    return [point for key, point in want.items() if key not in have], have <= want.keys()
