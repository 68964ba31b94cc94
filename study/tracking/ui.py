"""MLflow's UI on this machine, with all runs in it: what `make ui` shows."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from study.errors import UserError
from study.tracking import imports, store, view
from study.tracking.mirror import Mirror

HOST = "127.0.0.1"
START_S = 120.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks without the proxy of ``http_proxy``, which knows no way to this machine's loopback."""


def serve(runs_dir: Path, files: Path, port: int) -> int:
    """Show all runs until Ctrl-C: those in the folder, and the exported ones.

    Args:
        runs_dir: the folder of runs, whose store is shown (or that of ``MLFLOW_TRACKING_URI``).
        files: exported runs; a run that has a folder here is shown from there.
        port: the first port to try.

    Raises:
        UserError: there are no runs, or the store cannot work.
    """
    target = store.resolve(runs_dir)
    if target.file is not None:
        free_port(port)  # said before the store is filled, which may take a while
    for line in fill(runs_dir, files, target):
        print(line, flush=True)
    if target.file is None:
        print_links(target, target.uri.rstrip("/"))
        return 0
    with server(target, port) as address:
        print_links(target, address)
        print(f"\nMLflow serves {target.file} at {address}; Ctrl-C stops it", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


def fill(runs_dir: Path, files: Path, target: store.Store) -> Iterator[str]:
    """Bring the store up to date; a line for each source.

    Raises:
        UserError: there are no runs, or the store cannot work.
    """
    here, exported = any(runs_dir.glob("*/config.yaml")), any(files.glob("*.runs.parquet"))
    if not here and not exported:
        raise UserError(f"{runs_dir}: no runs, and no exported ones in {files}; `make reproduce` makes some")
    reports = []
    if here:  # first: what has a folder is not taken from a file
        reports.append((runs_dir, Mirror(runs_dir, target.uri).sync()))
    if exported:
        reports.append((files, imports.fill(files, target)))
    for source, report in reports:
        if report.error:
            raise UserError(report.error)
        yield f"{source}: {report}"
        yield from report.notes + report.problems


def print_links(target: store.Store, address: str) -> None:
    """Two links a sweep: the table of its arms, and the curves."""
    with store.opened(target) as tracker:
        for name, experiment in sorted(tracker.experiments().items()):
            print(f"\n  {name}")
            print(f"    arms    {view.link(address, experiment.id, curves=False)}")
            print(f"    curves  {view.link(address, experiment.id, curves=True)}", flush=True)


@contextmanager
def server(target: store.Store, port: int) -> Iterator[str]:
    """A server of a sqlite store on loopback, answering, until the context is left; its address.

    Raises:
        UserError: it does not start.
    """
    chosen = free_port(port)
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(chosen), "--workers", "1"]
    command += ["--backend-store-uri", target.uri, "--artifacts-destination", str(target.artifacts)]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    log = target.runs_dir / "mlflow-server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    address = f"http://{HOST}:{chosen}"
    try:
        _await(process, address, log)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port(first: int) -> int:
    """The first port from ``first`` on that nothing listens at.

    Raises:
        UserError: none of a hundred is free.
    """
    for port in range(first, min(first + 100, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind((HOST, port))
                return port
    raise UserError(f"command line: --port = {first}: allowed is a port with a free one among the next hundred")


def _await(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), DIRECT.open(f"{address}/health", timeout=10):
            return
        time.sleep(0.1)
    raise UserError(f"mlflow server: it did not start; {log} says why")
