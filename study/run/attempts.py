"""One attempt after another at a run: what its folder must hold before one begins, and the list of them."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from study.config.reading import read_yaml, resolve
from study.config.schema import Config
from study.errors import UserError
from study.run import files, provenance
from study.run import status as statuses
from study.run.status import Status


def settle(folder: Path, config: Config) -> None:
    """Make the folder this run's, or check that it is."""
    checkpoints, written = folder / "checkpoints", folder / "config.yaml"
    with files.storage(folder):
        checkpoints.mkdir(exist_ok=True)
        (folder / "traceback.txt").unlink(missing_ok=True)
    files.remove_leftovers(folder)
    files.remove_leftovers(checkpoints)
    if not written.exists():
        files.write_atomic(written, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        return
    found = resolve(read_yaml(written), str(written)).signature
    if found != config.signature:
        raise UserError(f"{written}: signature = {found}: allowed is {config.signature}, as its folder is named")


def begin(folder: Path, config: Config, command: Sequence[str], images: str | None) -> Status:
    """Record that a new attempt runs: provenance first, then the status."""
    before, now = statuses.read(folder), time.time()
    earlier = provenance.read(folder)
    attempts = closed(earlier, "killed", before.heartbeat if before else now)
    origin = provenance.collect(command)
    number = max(len(attempts), before.attempt if before else 0) + 1  # either file may be damaged
    attempt = {key: origin[key] for key in ("host", "pid", "job_id", "numerics")} | {
        "attempt": number,
        "code": provenance.fingerprint(origin),
        "started": now,
        "ended": None,
        "state": "running",
    }
    attempts.append(attempt)
    provenance.write(folder, {**origin, "images": images, "attempt": number, "attempts": attempts})
    status = Status(
        signature=config.signature,
        state="running",
        attempt=number,
        host=origin["host"],
        pid=origin["pid"],
        job_id=origin["job_id"],
        heartbeat=now,
        started=attempts[0]["started"],
        train_seconds=before.train_seconds if before else 0.0,
        threads=before.threads if before else None,
        numerics=sorted({*(before.numerics if before else []), origin["numerics"]}),
    )
    statuses.write(folder, status, durable=True)
    return status


def closed(origin: Mapping[str, Any], state: str, ended: float) -> list[dict[str, Any]]:
    """The attempts so far, the last one no longer running."""
    return [
        {**attempt, "state": state, "ended": ended} if attempt["state"] == "running" else attempt
        for attempt in origin.get("attempts", [])
    ]
