"""Which MLflow store the runs are shown in, and whether it can take them.

The default is a sqlite file beside the runs, by its absolute path; ``MLFLOW_TRACKING_URI`` names another. Whatever is
wrong with a store is one line before anything is submitted, and a new store is made (or an old one upgraded) once,
under a lock: several processes at once break it.
"""

import fcntl
import importlib.util
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from study.errors import UserError

if TYPE_CHECKING:
    from study.tracking.tracker import Tracker

VARIABLE = "MLFLOW_TRACKING_URI"
ALLOWED = "sqlite:////absolute/path.db, postgresql://… or http(s)://host:port"
ROOM = 64 * 2**20
"""Free bytes that a sqlite store wants at the start."""
WAIT_S = 600.0
"""Longest wait for another writer of the same store: a first pass over a thousand runs takes minutes."""
PREFLIGHT_WAIT_S = 5.0


class Busy(Exception):  # noqa: N818  # no error: another process does the work
    """Another process has been writing the store for longer than one was ready to wait."""


@dataclass(frozen=True)
class Store:
    """A tracking URI, the folder of runs that it belongs to, and who named it (for error lines)."""

    uri: str
    runs_dir: Path
    source: str

    @property
    def file(self) -> Path | None:
        """The sqlite file, if it is one."""
        return Path(self.uri.removeprefix("sqlite:///")) if self.uri.startswith("sqlite:///") else None

    @property
    def artifacts(self) -> Path | None:
        """Where artifacts go; None if a server decides."""
        if self.uri.startswith(("http://", "https://")):
            return None
        return (self.file.parent if self.file else self.runs_dir) / "mlflow-artifacts"

    def fault(self, problem: str) -> UserError:
        """One line that names the store and its problem."""
        return UserError(f"{self.source} = {self.uri}: {problem}")


def resolve(runs_dir: Path, uri: str | None = None) -> Store:
    """The store of a folder of runs: ``uri``, else ``MLFLOW_TRACKING_URI``, else sqlite in that folder."""
    runs_dir = runs_dir.resolve()
    if uri:
        return Store(uri, runs_dir, "--uri")
    if named := os.environ.get(VARIABLE):
        return Store(named, runs_dir, VARIABLE)
    return Store(f"sqlite:///{runs_dir / 'mlflow.db'}", runs_dir, "store")


def check(store: Store, cluster: Literal["local", "slurm"] = "local") -> None:
    """Refuse what cannot work, without asking the store.

    Args:
        store: as ``resolve`` gives it.
        cluster: where the jobs run; with ``slurm`` the store must mean the same on every machine.

    Raises:
        UserError: one line.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise UserError("mlflow is not installed; allowed is an environment with moco-study[report]")
    scheme, _, rest = store.uri.partition(":")
    if scheme in {"http", "https"}:
        host = urlsplit(store.uri).hostname or ""
        if cluster == "slurm" and (host in {"localhost", "::1", ""} or host.startswith("127.")):
            raise store.fault("names another machine on every node; allowed with --cluster slurm is a host's own name")
    elif scheme == "sqlite":
        file = store.file
        if file is None or not file.is_absolute():
            raise store.fault("depends on the working directory; allowed is sqlite:////absolute/path.db")
        room = next(folder for folder in file.parents if folder.is_dir())
        usage = shutil.disk_usage(room)
        # A file system without a size, like /proc, takes no files.
        if not usage.total or not os.access(room, os.W_OK) or (file.exists() and not os.access(file, os.W_OK)):
            raise store.fault("cannot be written; allowed is a place with write permission")
        if usage.free < ROOM:
            raise store.fault(f"the disk is full; allowed is {ROOM >> 20} MB of free space, or another {VARIABLE}")
    elif scheme.partition("+")[0] not in {"postgresql", "mysql", "mssql"} or not rest.startswith("//"):
        reason = "MLflow 3 has no file store" if scheme == "file" or ":" not in store.uri else "no store of ours"
        raise store.fault(f"{reason}; allowed is {ALLOWED}")


def preflight(store: Store, cluster: Literal["local", "slurm"] = "local") -> None:
    """Make sure, before anything is submitted, that the store is there, new enough, and answers.

    Raises:
        UserError: one line that says what is wrong and what is allowed.
    """
    from study.tracking.tracker import Unreachable

    try:
        with opened(store, cluster, PREFLIGHT_WAIT_S):
            pass
    except Busy:
        return  # the store works: another process writes it
    except Unreachable as error:
        raise store.fault(str(error)) from None


@contextmanager
def opened(
    store: Store, cluster: Literal["local", "slurm"] = "local", wait: float | None = None
) -> "Iterator[Tracker]":
    """The store as its one writer: checked, made or upgraded if need be, and locked until the context is left.

    Raises:
        UserError: the store cannot work.
        Unreachable: it does not answer now.
        Busy: another process is writing it.
    """
    from study.tracking.tracker import Tracker, Unreachable

    check(store, cluster)
    try:
        with _lock(store, WAIT_S if wait is None else wait):
            if store.file is not None:
                _follow(store.file, store.artifacts)
            with closing(Tracker.open(store.uri, store.artifacts)) as tracker:
                yield tracker
    except (OSError, sqlite3.Error) as error:
        raise Unreachable(" ".join(str(error).split())) from error


@contextmanager
def _lock(store: Store, wait: float) -> Iterator[None]:
    """One writer: a flock beside the sqlite file, or in the folder of runs; it ends with its process."""
    path = store.runs_dir / "mlflow.lock" if store.file is None else store.file.with_name(f"{store.file.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(f"another process has been writing it for {wait:g} s; try again later") from None
                time.sleep(0.05)
        yield


def _follow(file: Path, artifacts: Path | None) -> None:
    """Let a store that was moved along with its artifacts find them: MLflow keeps absolute addresses."""
    if not file.exists() or artifacts is None:
        return
    with closing(sqlite3.connect(file, timeout=20)) as database, database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"experiments", "runs"} <= tables:
            return
        here = f"{artifacts.as_uri()}/"
        rows = database.execute("SELECT artifact_location FROM experiments WHERE artifact_location LIKE 'file:%'")
        known = {address.rpartition("/")[0] + "/" for (address,) in rows if address}
        for before in sorted(known - {here}):
            if before.endswith(f"/{artifacts.name}/"):
                for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                    database.execute(
                        f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                        (here, len(before) + 1, len(before), before),
                    )
