"""Runs as files that can be committed: two sorted parquet files a sweep and scale, and back into a store.

The same runs give the same bytes, and a file whose content has not changed is left alone, so that another version of
the writer makes no difference either. Nothing in them names a machine, a path or a person.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study import strict
from study.errors import UserError
from study.run import facts, files, journal
from study.run.facts import Entry, Facts, Place

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

RUNS, METRICS = ".runs.parquet", ".metrics.parquet"


def _schemas() -> "tuple[pa.Schema, pa.Schema]":
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    runs = {
        "sweep": text,
        "scale": text,
        "title": text,
        "description": text,
        "axes": text,
        "metric": text,
        "signature": text,
        "name": text,
        "labels": text,
        "seed": whole,
        "floor": text,
        "state": text,
        "attempt": whole,
        "steps": whole,
        "train_seconds": real,
        "threads": whole,
        "started_ms": whole,
        "ended_ms": whole,
        "params": text,
        "tags": text,
        "final": text,
    }
    metrics = {"signature": text, "name": text, "step": whole, "value": real, "time_ms": whole}
    return pa.schema(runs.items()), pa.schema(metrics.items())


def export(
    runs_dir: Path,
    out: Path,
    sweeps: Sequence[str] | None = None,
    *,
    drop: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Write the runs of submitted sweeps; what the files already hold of other points of them stays.

    A finished run here replaces the one in a file; any other gives way to a finished one there. A run that has not
    begun is no row: that it is missing follows from its sweep. A signature that is no longer a point of the sweep goes,
    but a finished one only if told so: a submission with other overrides has other points under the same name.

    Args:
        runs_dir: the folder of runs.
        out: where the files go.
        sweeps: names (``momentum``, ``momentum-quick``, or ``train`` for runs of no sweep); all sweeps by default.
        drop: leave out finished runs of the files that are no longer points of their sweep.
        say: told in one line a file what was kept of it.

    Returns:
        The files that were written or found up to date.

    Raises:
        UserError: there is no such sweep, or nothing here nor there; a record, a config or a file is damaged; or
            finished runs would be lost. Nothing is written then.
        StorageError: a file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    schema, metrics_schema = _schemas()
    written = []
    here = {folder.name for folder in facts.folders(runs_dir)}
    placed = facts.places(runs_dir)
    members = sorted(_members(runs_dir, here, placed, sweeps).items(), key=lambda item: item[0].name)
    for place, points in members if not drop else ():
        _refuse_loss(out / f"{place.name}{RUNS}", runs_dir, place, points)
    for place, points in members:
        path = out / f"{place.name}{RUNS}"
        before, old_histories = _before(path)
        entries = {entry.signature: entry for entry in points}
        if place.sweep == facts.LONE:  # no record says which there are
            entries = {sign: entry for sign, (entry, _) in before.items() if sign not in placed} | entries
        rows: list[dict[str, Any]] = []
        histories = [metrics_schema.empty_table()]
        kept = 0
        for signature, entry in sorted(entries.items()):
            folder = runs_dir / signature
            known = facts.read(folder, facts.params(folder)) if signature in here else None
            old = before[signature][1] if signature in before else None
            better = old is not None and old.state == "finished" and known is not None and known.state != "finished"
            if known is not None and known.started_ms is not None and not better:
                rows.append(_row(entry, known))
                histories.append(_history(folder))
            elif old is not None:
                rows.append(_row(entry, old))
                histories.append(old_histories.filter(pc.field("signature") == signature))
                kept += 1
        if not rows and not before:
            continue
        if kept or before.keys() - entries.keys():
            gone = len(before.keys() - entries.keys())
            say(
                f"{path}: {kept} of its {len(before)} runs kept: {runs_dir} has no finished run of them"
                + (f"; {gone} left out, which are no longer points of the sweep" if gone else "")
            )
        with files.storage(out):
            out.mkdir(parents=True, exist_ok=True)
        metrics = path.with_name(f"{place.name}{METRICS}")
        _write(metrics, pa.concat_tables(histories).combine_chunks())  # first: a row never lacks its history
        _write(path, pa.Table.from_pylist(rows, schema=schema))
        written += [path, metrics]
    if not written and not any(out.glob(f"*{RUNS}")):  # with files there, they stay: a fresh clone has nothing newer
        raise UserError(f"{runs_dir}: holds no run of a submitted sweep; allowed is a folder of runs")
    return written


def remove(out: Path, signatures: Collection[str]) -> None:
    """Take the rows and the histories of some runs out of all files; a file without rows goes.

    Raises:
        UserError: a file is damaged.
        StorageError: one cannot be written.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    runs_schema, metrics_schema = _schemas()
    for path in sorted(out.glob(f"*{RUNS}")):
        before, metrics = _read(path, runs_schema), path.with_name(path.name.removesuffix(RUNS) + METRICS)
        others = ~pc.is_in(pc.field("signature"), pa.array(sorted(signatures), pa.string()))
        rows = before.filter(others)
        if rows.num_rows == before.num_rows:
            continue
        if rows.num_rows:
            histories = _read(metrics, metrics_schema).filter(others)
            _write(path, rows)  # first: a row never lacks its history
            _write(metrics, histories)
            continue
        with files.storage(path):
            path.unlink()
            metrics.unlink(missing_ok=True)


def _refuse_loss(path: Path, runs_dir: Path, place: Place, points: Iterable[Entry]) -> None:
    if place.sweep == facts.LONE or not path.exists():
        return
    kept = {entry.signature for entry in points}
    lost = sum(known.state == "finished" and entry.signature not in kept for entry, known in runs(path))
    if lost:
        raise UserError(
            f"{path}: {lost} finished {'run is no point' if lost == 1 else 'runs are no points'} of {place.name} as "
            f"last submitted to {runs_dir} (other overrides, or another grid); allowed is --drop to leave them out, "
            "another --out, or to submit the sweep as it was"
        )


def _before(path: Path) -> "tuple[dict[str, tuple[Entry, Facts]], pa.Table]":
    """The runs that a file holds, by signature, and their histories; nothing where there is none."""
    runs_schema, metrics_schema = _schemas()
    if not path.exists():
        return {}, metrics_schema.empty_table()
    runs = {row["signature"]: _entry(row) for row in _read(path, runs_schema).to_pylist()}
    return runs, _read(path.with_name(path.name.removesuffix(RUNS) + METRICS), metrics_schema)


def _history(folder: Path) -> "pa.Table":
    import pyarrow as pa

    readings = sorted(journal.read(folder / "metrics.jsonl"), key=lambda reading: (reading.name, reading.step))
    columns = {
        "signature": [folder.name] * len(readings),
        "name": [reading.name for reading in readings],
        "step": [reading.step for reading in readings],
        "value": [reading.value for reading in readings],
        "time_ms": [reading.time_ms for reading in readings],
    }
    return pa.table(columns, schema=_schemas()[1])


def load(folder: Path) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """All exported runs, and their histories with each run's once, however many sweeps it belongs to.

    Raises:
        UserError: there are none, or a file is damaged.
    """
    import pyarrow as pa

    tables: list[list[pa.Table]] = [[], []]
    for path in exported(folder):
        for kind, suffix in enumerate((RUNS, METRICS)):
            tables[kind].append(_read(path.with_name(path.name.removesuffix(RUNS) + suffix), _schemas()[kind]))
    runs, metrics = (pa.concat_tables(parts).to_pandas() for parts in tables)
    metrics = metrics.drop_duplicates(["signature", "name", "step"], keep="last", ignore_index=True)
    return runs, metrics


def read(path: Path) -> list[tuple[Entry, Facts, list[journal.Reading]]]:
    """The runs of one ``….runs.parquet`` as the mirror pushes them.

    Raises:
        UserError: the file or its histories are damaged.
    """
    found = histories(path)
    return [(entry, known, found.get(entry.signature, [])) for entry, known in runs(path)]


def runs(path: Path) -> list[tuple[Entry, Facts]]:
    """The runs of one ``….runs.parquet`` without their histories.

    Raises:
        UserError: the file is damaged.
    """
    return [_entry(row) for row in _read(path, _schemas()[0]).to_pylist()]


def histories(path: Path) -> dict[str, list[journal.Reading]]:
    """All readings of the runs of one ``….runs.parquet``, by signature.

    Raises:
        UserError: the file that goes with it is damaged.
    """
    table = _read(path.with_name(path.name.removesuffix(RUNS) + METRICS), _schemas()[1])
    found: dict[str, list[journal.Reading]] = {}
    columns = (table.column(name).to_pylist() for name in ("signature", "step", "name", "value", "time_ms"))
    for signature, *reading in zip(*columns, strict=True):
        found.setdefault(signature, []).append(journal.Reading(*reading))
    return found


def exported(folder: Path) -> list[Path]:
    """The ``….runs.parquet`` files of a folder, sorted.

    Raises:
        UserError: there are none.
    """
    found = sorted(folder.glob(f"*{RUNS}"))
    if not found:
        raise UserError(f"{folder}: holds no *{RUNS}; allowed is a folder that `study runs export` wrote")
    return found


def _members(
    runs_dir: Path, here: Iterable[str], placed: Mapping[str, list[Entry]], sweeps: Sequence[str] | None
) -> dict[Place, list[Entry]]:
    """The points of each sweep asked for, and the runs here that are of none."""
    entries = [entry for those in placed.values() for entry in those if not entry.removed]
    entries += [
        facts.lone(signature, facts.params(runs_dir / signature)) for signature in here if signature not in placed
    ]
    found: dict[Place, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.place, []).append(entry)
    if sweeps is None:
        return {place: those for place, those in found.items() if place.sweep != facts.LONE}
    for name in sweeps:
        if not any(name in {place.name, place.sweep} for place in found):
            have = ", ".join(sorted(place.name for place in found)) or "none yet"
            raise UserError(f"{runs_dir}: sweep = {name}: allowed is {have}")
    return {place: those for place, those in found.items() if {place.name, place.sweep} & set(sweeps)}


def _row(entry: Entry, known: Facts) -> dict[str, Any]:
    place = entry.place
    return {
        "sweep": place.sweep,
        "scale": place.scale,
        "title": place.title,
        "description": place.description,
        "axes": json.dumps(place.axes, ensure_ascii=False),
        "metric": place.metric,
        "signature": entry.signature,
        "name": entry.name,
        "labels": json.dumps(entry.labels, ensure_ascii=False),
        "seed": entry.seed,
        "floor": entry.floor,
        "state": known.state,
        "attempt": known.attempt,
        "steps": known.steps,
        "train_seconds": known.train_seconds,
        "threads": known.threads,
        "started_ms": known.started_ms,
        "ended_ms": known.ended_ms,
        "params": json.dumps(known.params, ensure_ascii=False),
        "tags": json.dumps(known.tags, sort_keys=True, ensure_ascii=False),
        "final": strict.dumps(known.final, sort_keys=True),
    }


def _entry(row: dict[str, Any]) -> tuple[Entry, Facts]:
    place = Place(
        row["sweep"], row["scale"], row["title"], row["description"], tuple(json.loads(row["axes"])), row["metric"]
    )
    entry = Entry(place, row["signature"], row["name"], json.loads(row["labels"]), row["seed"], row["floor"])
    known = Facts(
        row["signature"],
        row["state"],
        row["attempt"],
        row["steps"],
        row["started_ms"],
        row["ended_ms"],
        row["train_seconds"],
        row["threads"],
        json.loads(row["params"]),
        json.loads(row["tags"]),
        {name: strict.number(value) for name, value in json.loads(row["final"]).items()},
    )
    return entry, known


def _write(path: Path, table: "pa.Table") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.exists() and _same(pq.read_table(path), table):
            return
    except (pa.ArrowInvalid, OSError):
        pass  # left behind without its other half, and damaged: written again
    sink = pa.BufferOutputStream()
    numbers = {"step": "DELTA_BINARY_PACKED", "time_ms": "DELTA_BINARY_PACKED", "value": "BYTE_STREAM_SPLIT"}
    encodings = {name: encoding for name, encoding in numbers.items() if name in table.column_names}
    pq.write_table(
        table,
        sink,
        version="2.6",
        compression="zstd",
        compression_level=9,
        use_dictionary=[name for name in table.column_names if name not in numbers],
        column_encoding=encodings or None,
        row_group_size=2**20,
        store_schema=False,
    )
    files.write_atomic(path, sink.getvalue().to_pybytes())


def _same(before: "pa.Table", after: "pa.Table") -> bool:
    """Equal in every bit, NaN included."""
    import pyarrow as pa

    def bits(table: "pa.Table") -> "Iterable[pa.ChunkedArray]":
        for column in table.columns:
            whole = column.combine_chunks()
            yield whole.view(pa.int64()) if pa.types.is_float64(whole.type) else whole

    if before.schema.names != after.schema.names or before.num_rows != after.num_rows:
        return False
    return all(one.equals(other) for one, other in zip(bits(before), bits(after), strict=True))


def _read(path: Path, schema: "pa.Schema") -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, columns=schema.names).cast(schema)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be read ({reason}); allowed is what `study runs export` wrote") from None
