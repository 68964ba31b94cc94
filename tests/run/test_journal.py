import json
import math
import os
import random
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_fixture import MEGABYTE, fill, kill_after, run_through, small_disk

from study.run import journal
from study.run.files import StorageError, write_atomic
from study.run.journal import Journal, Reading


def write(path: Path, *entries: tuple[int, dict[str, float]], first: int = 0) -> None:
    opened = Journal(path)
    opened.first = first
    for step, metrics in entries:
        opened.log(step, metrics)
    opened.close()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def values(path: Path) -> dict[tuple[int, str], float]:
    return {(reading.step, reading.name): reading.value for reading in journal.read(path)}


def test_each_metric_stands_once_with_its_time(tmp_path):
    path, before = tmp_path / "metrics.jsonl", time.time_ns() // 1_000_000
    write(path, (1, {"train/loss": 8.25, "train/accuracy": 0.5}), (2, {"train/loss": 7.5}))
    readings = journal.read(path)
    assert [reading[:3] for reading in readings] == [
        (1, "train/accuracy", 0.5),
        (1, "train/loss", 8.25),
        (2, "train/loss", 7.5),
    ]
    assert all(before - 1 <= reading.time_ms <= time.time() * 1000 + 1 for reading in readings)


def test_a_missing_journal_is_empty(tmp_path):
    assert journal.read(tmp_path / "metrics.jsonl") == []
    assert journal.tail(tmp_path / "metrics.jsonl") == ([], 0)


def test_replayed_equal_values_are_dropped_and_the_newest_of_differing_ones_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *((step, {"a": step / 3, "b": 1.0}) for step in range(6)))
    first = path.read_bytes()
    write(path, *((step, {"a": step / 3, "b": 1.0}) for step in range(3, 6)))
    assert path.read_bytes() == first
    write(path, (4, {"a": 99.0, "b": 1.0}), (5, {"a": 5 / 3, "b": 1.0}), (6, {"a": 2.0}))
    assert [line["metrics"] for line in lines(path)[6:]] == [{"a": 99.0}, {"a": 2.0}]
    assert values(path)[4, "a"] == 99.0
    write(path, (4, {"a": 99.0}))
    write(path, (4, {"a": 4 / 3}))  # back to the first value: newer than the second
    assert values(path)[4, "a"] == 4 / 3


def test_replayed_steps_may_come_in_another_order_and_in_parts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *((step, {"a": step / 3, "b": 1.0}) for step in range(8)))
    first = path.read_bytes()
    write(path, (7, {"b": 1.0}), *((step, {"a": step / 3}) for step in range(5, 8)), (5, {"b": 1.0}), first=5)
    assert path.read_bytes() == first


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 0.1])
def test_any_float_survives_and_its_replay_is_recognised(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    write(path, (1, {"x": value}))
    write(path, (1, {"x": value}))
    (reading,) = journal.tail(path)[0]
    assert repr(reading.value) == repr(value if math.isfinite(value) else math.nan)


def test_what_is_not_finite_is_null_and_said_and_an_old_journal_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, (1, {"x": 1.0, "y": math.nan}), (2, {"x": math.inf}), (3, {"x": 2.0}))
    found = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line["metrics"] for line in found] == [{"x": 1.0, "y": None}, {"x": None}, {"x": 2.0}]
    assert [line.get("diverged", False) for line in found] == [True, True, False]
    path.write_text('{"step": 1, "time_ms": 5, "metrics": {"x": NaN, "y": Infinity}}\n')
    assert [math.isfinite(reading.value) for reading in journal.read(path)] == [False, False]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_journal_cut_at_any_byte_loses_the_torn_line_only(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    floats = st.floats(allow_nan=False, allow_infinity=False)
    entries = data.draw(st.lists(st.dictionaries(st.text(max_size=8).filter(_utf8), floats, min_size=1), min_size=1))
    write(path, *enumerate(entries))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    expected = {(step, name): value for step, entry in enumerate(entries[:kept]) for name, value in entry.items()}
    assert values(path) == expected
    write(path, *enumerate(entries))
    assert values(path) == {(step, name): value for step, entry in enumerate(entries) for name, value in entry.items()}
    assert len(lines(path)) == len(entries)


def _utf8(text: str) -> bool:
    return text.isprintable()


def test_damage_in_the_middle_costs_its_line_and_is_said(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *((step, {"a": 1.0}) for step in range(4)))
    content = path.read_bytes().splitlines(keepends=True)
    content[1] = b"\0" * (len(content[1]) - 1) + b"\n"
    path.write_bytes(b"".join(content))
    with pytest.warns(UserWarning, match=r"1 damaged line"):
        assert [reading.step for reading in journal.read(path)] == [0, 2, 3]


def test_tail_goes_on_where_it_stopped_and_waits_for_the_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, (1, {"a": 1.0}), (2, {"a": 2.0}))
    first, offset = journal.tail(path)
    with path.open("ab") as file:
        file.write(b'{"step":3,"time_ms":1,"metrics":{"a":3.0}}')
    assert journal.tail(path, offset) == ([], offset)
    with path.open("ab") as file:
        file.write(b"\n")
    second, offset = journal.tail(path, offset)
    assert ([r.step for r in first], second) == ([1, 2], [Reading(3, "a", 3.0, 1)])
    assert journal.tail(path, offset) == ([], path.stat().st_size)


def test_tail_starts_again_when_a_power_cut_took_lines_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, (1, {"a": 1.0}), (2, {"a": 2.0}))
    offset = journal.tail(path)[1]
    path.write_bytes(path.read_bytes()[:50])
    write(path, (2, {"a": 2.0, "b": 1.0}), (3, {"a": 3.0}), (4, {"a": 3.0}))
    assert len(journal.tail(path, offset)[0]) == len(journal.tail(path)[0])


def test_times_never_run_backwards_when_the_clock_is_set_back(tmp_path, monkeypatch):
    path, real = tmp_path / "metrics.jsonl", time.time
    opened = Journal(path)
    opened.log(1, {"a": 1.0})
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    opened.log(2, {"a": 1.0})
    opened.close()
    write(path, (3, {"a": 1.0}))
    times = [line["time_ms"] for line in lines(path)]
    assert times == sorted(times)
    assert times[2] - times[0] < 60_000


def test_logging_never_waits_for_the_disk(tmp_path, monkeypatch):
    opened_gate, real = threading.Event(), Journal._write_pending
    monkeypatch.setattr(Journal, "_write_pending", lambda self: opened_gate.wait() and real(self))
    opened = Journal(tmp_path / "metrics.jsonl")

    def log() -> None:
        for step in range(5000):
            opened.log(step, {"train/loss": 8.0, "train/accuracy": 0.1})

    training = threading.Thread(target=log, daemon=True)
    training.start()
    training.join(30)
    waits = training.is_alive()
    opened_gate.set()
    opened.close()
    assert not waits
    assert len(lines(opened.path)) == 5000


def test_a_value_that_is_no_number_is_refused_where_it_is_logged(tmp_path):
    opened = Journal(tmp_path / "metrics.jsonl")
    with pytest.raises((TypeError, ValueError)):
        opened.log(1, {"a": None})  # type: ignore[dict-item]
    opened.close()


def test_a_full_disk_ends_with_one_line_and_loses_nothing_written(tmp_path):
    with small_disk(tmp_path / "disk", MEGABYTE) as disk:
        path = disk / "metrics.jsonl"
        opened = Journal(path)
        for step in range(100):
            opened.log(step, {"a": float(step)})
        opened.flush()
        filler = fill(disk)
        with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written: No space left") as caught:
            for step in range(100, 100_000):
                opened.log(step, {"a": float(step)})
            opened.flush()
        assert "\n" not in str(caught.value)
        with pytest.raises(StorageError):
            opened.close()
        kept = len(journal.read(path))
        assert kept >= 100
        filler.unlink()
        write(path, *((step, {"a": float(step)}) for step in range(100, 1000)))
        assert values(path) == {(step, "a"): float(step) for step in range(max(kept, 1000))}
        assert len(lines(path)) == len(values(path))


def keep_a_journal(report: Connection, path: Path, steps: int) -> None:
    journal.WRITE_S = 0.0002  # a kill finds it writing
    mark = path.with_name("checkpoint")
    start = int(mark.read_text().split()[0]) if mark.exists() else 0
    opened = Journal(path)
    opened.first = start
    report.send(start)
    for step in range(start, steps):
        opened.log(step, {f"metric/{name}": math.sin(step * 20 + name) for name in range(20)})
        if step % 20 == 19:
            opened.flush()
            write_atomic(mark, f"{step + 1} {path.stat().st_size}")
    opened.close()


def test_killed_at_any_moment_the_journal_ends_as_if_unbroken(tmp_path):
    path, steps, chance = tmp_path / "metrics.jsonl", 2000, random.Random(0)
    for _ in range(40):
        kill_after(chance.uniform(0.0, 0.03), keep_a_journal, path, steps)
        mark = path.with_name("checkpoint")
        synced = int(mark.read_text().split()[1]) if mark.exists() else 0
        os.truncate(path, chance.randint(synced, path.stat().st_size))  # what a power cut may take
    run_through(keep_a_journal, path, steps)
    expected = {(step, f"metric/{name}"): math.sin(step * 20 + name) for step in range(steps) for name in range(20)}
    assert values(path) == expected
    written = journal.tail(path)[0]
    assert len(written) == len(expected), "a replayed value was written twice"
    times = [reading.time_ms for reading in written]
    assert times == sorted(times)
