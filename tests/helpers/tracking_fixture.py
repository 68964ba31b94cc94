"""Folders of runs, written as the run record writes them, for the tests of the mirror and of the export."""

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import cache
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from study.config.reading import merge, resolve
from study.config.schema import Config
from study.run import provenance, status
from study.run.status import Status
from study.tracking import store

START_S = 1_790_000_000.5
TINY = {"data": {"name": "fashion-mnist", "train_images": 1000}, "dictionary": {"kind": "queue", "K": 512}}


def config(seed: int = 0, **over: Any) -> Config:
    return resolve(merge(TINY, {"seed": seed, **over}), "test")


def line(step: int, metrics: Mapping[str, float], time_ms: int | None = None) -> str:
    stamp = round(START_S * 1000) + 10 * step if time_ms is None else time_ms
    return json.dumps({"step": step, "time_ms": stamp, "metrics": dict(metrics)}) + "\n"


def make(
    runs_dir: Path,
    seed: int = 0,
    *,
    steps: int = 20,
    state: str = "finished",
    final: Mapping[str, float] | None = None,
    attempts: int = 1,
    **status_over: Any,
) -> Path:
    """A run of ``steps`` steps with two metrics each, in its folder."""
    chosen = config(seed, m=0.99)
    folder = runs_dir / chosen.signature
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(chosen.model_dump(mode="json"), sort_keys=False))
    journal = (line(step, {"train/loss": 8.0 / step + seed, "train/lr": 0.03}) for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(journal))
    origin = {
        "commit": "0123456789abcdef",
        "branch": "main",
        "dirty": True,
        "diff": "--- a\n+++ b\n",
        "command": ["/secret/bin/study", "train"],
        "versions": {"python": "3.11.7", "torch": "2.14.1"},
        "host": "node1",
        "cpu": "Some CPU",
        "cores": 2,
        "gpus": [],
        "attempts": [
            {"attempt": i + 1, "host": f"node{i + 1}", "job_id": f"7_{i}", "state": "killed"} for i in range(attempts)
        ],
    }
    provenance.write(folder, origin)
    set_status(
        folder, state=state, steps=steps, attempt=attempts, final={"knn": 0.5 + seed / 100} if final is None else final
    )
    for name, value in status_over.items():
        set_status(folder, **{name: value})
    return folder


def set_status(folder: Path, **over: Any) -> None:
    """Change some fields of a run's status; a running one gets this process and a fresh heartbeat."""
    known = status.read(folder) or Status(
        folder.name, "running", 1, step=20, started=START_S, train_seconds=12.5, threads=1
    )
    known.diverged = None  # as before it was kept: what reading found is not written down
    for name, value in over.items():
        setattr(known, name, value)
    if known.state == "running":
        known.host, known.pid, known.heartbeat, known.ended, known.final = (
            over.get("host", socket.gethostname()),
            over.get("pid", os.getpid()),
            over.get("heartbeat", time.time()),
            None,
            {},
        )
    else:
        known.heartbeat = known.ended = over.get("ended", START_S + 100)
    status.write(folder, known, durable=False)


def sweep(runs_dir: Path, folders: list[Path], name: str = "momentum", scale: str = "smoke") -> None:
    """Record a submitted sweep over some runs."""
    points = [
        {"signature": folder.name, "name": f"m=0.99 seed={i}", "labels": {"m": 0.99}, "seed": i, "floor": None}
        for i, folder in enumerate(folders)
    ]
    tree = {
        "sweep": name,
        "scale": scale,
        "title": "Momentum of the key encoder",
        "description": "m of the moving average.",
        "axes": ["m"],
        "metric": "knn",
        "points": points,
        "removed": [],
    }
    (runs_dir / "sweeps").mkdir(parents=True, exist_ok=True)
    (runs_dir / "sweeps" / f"{name}-{scale}.json").write_text(json.dumps(tree))


@cache
def _template() -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="study-store-")
    store.preflight(store.resolve(Path(folder.name)))
    return folder


def fresh_store(folder: Path) -> store.Store:
    """A new default store in a folder: a copy, since making one takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(_template().name) / "mlflow.db", folder / "mlflow.db")
    return store.resolve(folder)


def held(uri: str, *, private: bool = True) -> dict[tuple[str, str], dict[str, Any]]:
    """All that a store holds: (experiment, signature) → what a reader can see, ids left out; fails on doubles."""
    from mlflow import MlflowClient

    client = MlflowClient(uri, uri)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], max_results=1000):
            key = experiment.name, run.data.tags.get("study.signature", "")
            assert key not in found, f"two tracked runs of {key}"
            hidden = ("study.origin", "study.content", "mlflow.user") + (
                () if private else ("study.hosts", "study.jobs", "study.error")
            )
            points = [
                (name, point.step, repr(point.value), point.timestamp)
                for name in sorted(run.data.metrics)
                for point in client.get_metric_history(run.info.run_id, name)
            ]
            assert len(points) == len({(name, step) for name, step, _, _ in points}), f"a step twice in {key}"
            found[key] = {
                "name": run.info.run_name,
                "status": run.info.status,
                "start": run.info.start_time,
                "end": run.info.end_time,
                "params": run.data.params,
                "tags": {name: value for name, value in run.data.tags.items() if name not in hidden},
                "points": sorted(points),
                "data": [(one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs],
                "id": run.info.run_id,
            }
    return found


def same(one: Mapping[Any, Mapping[str, Any]], other: Mapping[Any, Mapping[str, Any]]) -> bool:
    """Equal but for the ids of the tracked runs."""
    return [{**run, "id": "", "key": key} for key, run in sorted(one.items())] == [
        {**run, "id": "", "key": key} for key, run in sorted(other.items())
    ]


class Proxy:
    """Between a client and a real server: passes requests on, or fails as told.

    ``fault(method, path)`` returns None to pass, a status to answer instead, ``"lose"`` to pass the request on and
    lose the answer, or ``"drop"`` to close the connection at once.
    """

    def __init__(self, port: int) -> None:
        self.port, self.fault, self.requests, self.host = port, lambda method, path: None, [], None
        self.body = b"no"  # of an answer that is a status
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.requests.append((self.command, self.path))
                fault = proxy.fault(self.command, self.path)
                if fault == "drop":
                    self.close_connection = True
                    return
                if isinstance(fault, int):
                    self.answer(fault, proxy.body)
                    return
                server = HTTPConnection("127.0.0.1", proxy.port, timeout=60)
                headers = dict(self.headers) | ({"Host": proxy.host} if proxy.host else {})
                server.request(self.command, self.path, body, headers)
                response = server.getresponse()
                content = response.read()
                server.close()
                if fault == "lose":
                    self.close_connection = True
                    return
                self.answer(response.status, content)

            def answer(self, code: int, content: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
