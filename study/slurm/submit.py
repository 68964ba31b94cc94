"""A sweep on a Slurm cluster: submit its points as arrays, ask what became of them, cancel them.

Nothing here stays alive while the jobs run. What was submitted stands in the ledger, what a run did in its folder, and
the rest is asked from Slurm, by one query for all points.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from study.errors import UserError
from study.launch import record
from study.run import status
from study.slurm import cluster, ledger, script, send, state
from study.slurm.cluster import Cluster
from study.slurm.jobs import Job, find
from study.slurm.ledger import Known
from study.slurm.state import Limits, Unanswered
from study.sweep.grid import Point, Sweep
from study.tracking import store

ASK_ABOVE = 50
"""Submitting, or cancelling, more points than this asks first."""


def limits() -> Limits:
    """What the cluster allows.

    Raises:
        UserError: Slurm does not answer.
    """
    try:
        return state.limits()
    except Unanswered as error:
        raise UserError(f"cluster = slurm: {error}; allowed is a machine where Slurm's commands answer") from None


# ------------------------------------------------------------------------------------------------------------ asking


def jobs(runs_dir: Path, sweep: Sweep) -> dict[str, Job]:
    """What Slurm knows of the points of a sweep, also of those that its grid no longer has: one query to the queue, and
    one to the accounting for what is gone from there and left no word of its own. Points that were never submitted,
    were cancelled, or ended and told it themselves are left out.
    """
    known = ledger.latest(ledger.arrays(runs_dir))
    wanted = {point.signature for point in sweep.points} & known.keys()
    if known:
        wanted |= {point["signature"] for point in record.points(runs_dir, sweep.id)} & known.keys()
    return find(runs_dir, {signature: known[signature] for signature in wanted})


def log_of(runs_dir: Path, signature: str) -> Path | None:
    """What the newest job of a point printed; None if it was never submitted."""
    found = ledger.latest(ledger.arrays(runs_dir)).get(signature)
    return found[0].folder / f"{found[1]}.log" if found else None


# -------------------------------------------------------------------------------------------------------- submitting


def submit(
    sweep: Sweep,
    points: Sequence[Point],
    *,
    runs_dir: Path,
    cluster_config: Path | None = None,
    yes: bool = False,
    dry_run: bool = False,
) -> int:
    """Send points to Slurm, those that it does not have already, and return at once.

    Args:
        sweep: where the points belong.
        points: what to run; a probe follows its pre-training, which is among them, submitted already, or finished.
        runs_dir: on a disk that the nodes share.
        cluster_config: see `study.slurm.cluster.load`.
        yes: do not ask, however many there are.
        dry_run: show what would be sent and send nothing.

    Returns:
        0 when all were sent; 1 when sbatch refused some, which are listed.

    Raises:
        UserError: no Slurm here, it does not answer, or it would not take such jobs; nothing was sent.
    """
    runs_dir = runs_dir.absolute()
    resources = cluster.of_sweep(cluster_config, sweep)
    if resources.mlflow:
        _check_server(runs_dir, cluster_config)
    allowed = limits()
    _check(resources, allowed, cluster_config)
    if dry_run:
        _dry_run(sweep, points, resources, allowed, runs_dir)
        return 0
    confirm("submit", len(points), yes=yes)
    record.write(sweep, runs_dir)
    with ledger.lock(runs_dir) as lock:
        send.settle(runs_dir)
        known = ledger.latest(ledger.arrays(runs_dir))
        unsent = _unsent(runs_dir, points, known)
        sent = not unsent or send.send(sweep, unsent, resources, allowed, runs_dir, known, lock)
    return 0 if sent else 1


def _unsent(runs_dir: Path, points: Sequence[Point], known: Known) -> list[Point]:
    """The points that neither Slurm nor anybody else has in hand, and that no failed pre-training blocks."""
    asked = {signature for point in points for signature in (point.signature, point.after) if signature in known}
    held = find(runs_dir, {signature: known[signature] for signature in asked})
    if unknown := [job for job in held.values() if job.state == "unknown"]:
        raise UserError(
            f"cluster = slurm: {len(unknown)} points may be queued; Slurm does not say: {unknown[0].reason}"
        )
    live = {signature for signature, job in held.items() if job.state in ("pending", "running")}
    now = time.time()

    def own(signature: str) -> str | None:
        found = status.read(runs_dir / signature)
        return status.seen(found, now) if found else None

    unsent = [
        point for point in points if point.signature not in live and own(point.signature) not in ("finished", "running")
    ]
    ahead = live | {point.signature for point in unsent}
    blocked = {
        point.signature: point
        for point in unsent
        if point.after and point.after not in ahead and own(point.after) != "finished"
    }
    if held_points := len(points) - len(unsent):
        print(f"{held_points} points are running, queued or finished already")
    for point in blocked.values():
        print(
            f"study: {point.name}: blocked: its pre-training {point.after} is neither done nor queued", file=sys.stderr
        )
    return [point for point in unsent if point.signature not in blocked]


def _check(resources: Cluster, allowed: Limits, path: Path | None) -> None:
    """Refuse what Slurm would refuse or keep waiting for ever, before anything is written."""
    source = path or cluster.DEFAULT
    names = (resources.partition or allowed.default_partition or "").split(",")
    if resources.partition and (unknown := [name for name in names if name not in allowed.partitions]):
        raise UserError(f"{source}: partition = {unknown[0]}: allowed is {', '.join(allowed.partitions)}")
    longest = [allowed.partitions.get(name) for name in names]
    minutes = [most for most in longest if most is not None]
    if len(minutes) == len(longest) and resources.time > max(minutes):
        raise UserError(
            f"{source}: time = {resources.time} minutes: allowed is at most {max(minutes)} in {', '.join(names)}"
        )


def _dry_run(sweep: Sweep, points: Sequence[Point], resources: Cluster, allowed: Limits, runs_dir: Path) -> None:
    known = ledger.latest(ledger.arrays(runs_dir))
    chunks = send.split(points, known, runs_dir, send.array_size(allowed))
    for chunk, (limit, _) in zip(chunks, send.lanes(len(chunks), resources.parallel), strict=True):
        after = "" if chunk.after is None else ", each after its pre-training"
        print(f"would submit an array of {len(chunk.tasks)} points, {limit or 'any number'} at once{after}")
    if chunks:
        array = ledger.new(ledger.path_of(runs_dir, sweep.id), chunks[0].tasks)
        code = runs_dir / "snapshots" / "CODE"
        print(f"\n{script.text(array, resources, sweep.id, code, resources.parallel, None)}")


def confirm(what: str, count: int, *, yes: bool) -> None:
    """Ask on the terminal before many points are touched.

    Raises:
        UserError: the answer is no, or nobody can answer.
    """
    if yes or count <= ASK_ABOVE:
        return
    if not sys.stdin.isatty():
        raise UserError(f"command line: {what} {count} points: more than {ASK_ABOVE} are allowed with --yes only")
    if input(f"{what} {count} points? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError(f"{what}: not done")


# -------------------------------------------------------------------------------------------------------- cancelling


def cancel(sweep: Sweep, *, runs_dir: Path, signatures: Collection[str] | None = None, yes: bool = False) -> int:
    """Cancel the queued and running jobs of a sweep, or of some of its points.

    A running point saves itself and ends as killed; one that waits for another turn is marked so here.

    Returns:
        0, or 1 when scancel failed.

    Raises:
        UserError: Slurm does not answer, or the answer to the question is no.
    """
    runs_dir = runs_dir.absolute()
    with ledger.lock(runs_dir):
        send.settle(runs_dir)
        known = ledger.latest(ledger.arrays(runs_dir))
        chosen = {point.signature for point in sweep.points} if signatures is None else set(signatures)
        found = find(runs_dir, {signature: known[signature] for signature in chosen & known.keys()})
        if unknown := [job for job in found.values() if job.state == "unknown"]:
            raise UserError(f"cluster = slurm: cannot cancel: {unknown[0].reason}; allowed is to try again")
        live = {signature: job for signature, job in found.items() if job.state in ("pending", "running")}
        if not live:
            print("nothing is queued or running")
            return 0
        confirm("cancel", len(live), yes=yes)
        indices: dict[str, set[int]] = defaultdict(set)
        for signature in live:
            array, index = known[signature]
            indices[array.token].add(index)
        by_token = {array.token: array for array, _ in known.values()}
        for token, chosen_indices in indices.items():
            array = by_token[token]
            try:
                state.ask(["scancel", f"{array.job}_[{state.compress(chosen_indices)}]"])
            except Unanswered as error:
                print(f"study: scancel: {error}", file=sys.stderr)
                return 1
            ledger.cancel(array, chosen_indices)
        for signature, job in live.items():
            own = status.read(runs_dir / signature)
            if job.state == "pending" and own is not None and own.state in ("scheduled", "running"):
                status.write(runs_dir / signature, replace(own, state="killed", ended=time.time()), durable=True)
        print(f"cancelled {len(live)} points")
        return 0


def _check_server(runs_dir: Path, path: Path | None) -> None:
    """Jobs push to a server only: nodes have no business in one another's files."""
    found = store.resolve(runs_dir)
    if not found.uri.startswith(("http://", "https://")):
        raise UserError(
            f"{path or cluster.DEFAULT}: mlflow = true: allowed with {store.VARIABLE} = http(s)://host:port, a server"
            " that the nodes reach; without one, `study runs sync --watch` on the login node does it"
        )
    store.preflight(found, "slurm")
