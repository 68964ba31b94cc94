"""A run removed on purpose is gone everywhere, and nothing is gone that somebody still needs."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tracking_fixture import fresh_store, held, make, sweep

from study.cli import main as cli
from study.errors import UserError
from study.run import export
from study.run.lock import Lock
from study.tracking import store
from study.tracking.mirror import Mirror
from study.tracking.remove import find, remove


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs: two of a sweep, of which one is also of another, and a single one; tracked and exported."""
    runs = tmp_path / "runs"
    fresh_store(runs)
    shared, second, _ = (make(runs, seed, steps=2) for seed in range(3))
    sweep(runs, [shared, second])
    sweep(runs, [shared], name="batch")
    assert Mirror(runs).sync().complete
    export.export(runs, tmp_path / "out", ["momentum", "batch", "train"])
    return runs


def words(runs: Path, *more: str) -> list[str]:
    return ["runs", "remove", "--runs-dir", str(runs), "--files", str(runs.parent / "out"), *more]


def everything(runs: Path) -> set[tuple[str, str]]:
    """(where, signature) of folders, tracked runs and exported rows."""
    found = {("folder", path.parent.name) for path in runs.glob("*/config.yaml")}
    found |= {(f"tracked {where}", signature) for where, signature in held(store.resolve(runs).uri)}
    for path in (runs.parent / "out").glob("*.runs.parquet"):
        found |= {(path.name, entry.signature) for entry, _, readings in export.read(path) if readings}
    return found


def test_a_removed_run_is_gone_everywhere_and_missing_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(runs)
    shared = next(signature for where, signature in before if where == "tracked batch-smoke")
    assert cli.main(words(runs, shared[:7], "--yes", str(runs / shared))) == 0
    out = capsys.readouterr().out
    assert "removed 1 run, tracked as 2" in out and "momentum-smoke.runs.parquet" in out
    assert everything(runs) == {one for one in before if one[1] != shared}
    assert not (runs / ".removed").exists() and not list((runs.parent / "out").glob("batch*")), "no empty file stays"
    report = Mirror(runs).sync()
    assert report.complete and not report.notes
    tracked = held(store.resolve(runs).uri)
    assert tracked["batch-smoke", shared]["status"] == tracked["momentum-smoke", shared]["status"] == "SCHEDULED"
    make(runs, 0, steps=2)
    assert Mirror(runs).sync().complete
    assert held(store.resolve(runs).uri)["batch-smoke", shared]["status"] == "FINISHED"


def test_nothing_is_removed_without_a_yes(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(runs)
    signature = min(signature for _, signature in before)
    command = [sys.executable, "-m", "study", *words(runs, signature)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "allowed is --yes" in done.stderr
    ours, theirs = pty.openpty()
    os.write(ours, b"n\n")
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True)
    assert done.returncode == 2 and "not done" in done.stderr
    assert everything(runs) == before
    os.write(ours, b"y\n")
    assert subprocess.run(command, stdin=theirs, capture_output=True, text=True).returncode == 0
    assert everything(runs) == {one for one in before if one[1] != signature}


def test_a_run_that_goes_on_or_a_store_that_does_not_answer_loses_nothing(runs: Path, tmp_path: Path) -> None:
    out, target = tmp_path / "out", store.resolve(runs)
    live = make(runs, 9, state="running")
    before = everything(runs)
    with pytest.raises(UserError, match="is running; allowed is one that has ended"):
        find([live.name], runs, out)
    with pytest.raises(UserError, match="no such run"):
        find(["nope"], runs, out)
    found = find([min(signature for where, signature in before if where == "tracked train")], runs, out)
    lock = Lock(runs / found[0].signature)
    with pytest.raises(UserError, match=r"already held by .*; allowed is a run that has ended") as caught:
        remove(found, runs, out, target)
    assert caught.value.exit_code == 2
    lock.release()
    with pytest.raises(UserError, match="no server answers there"):
        remove(found, runs, out, store.resolve(runs, "http://127.0.0.1:9"))
    assert everything(runs) == before


def test_an_exported_run_without_a_folder_is_removed_and_no_store_is_made(runs: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "out", tmp_path / "empty"
    signature = next(iter(held(store.resolve(runs).uri)))[1]
    assert remove(find([signature], empty, out), empty, out, store.resolve(empty)) == 0
    assert all(entry.signature != signature for path in export.exported(out) for entry, _ in export.runs(path))
    assert not empty.exists()
