"""Which store, and what is wrong with it: one clear line before anything is submitted."""

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tracking_fixture import fresh_store, held, make

from study.errors import UserError
from study.tracking import store, tracker
from study.tracking.mirror import Mirror


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True)
    if done.returncode:
        pytest.skip("mounting takes root")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def refusal(found: store.Store, cluster: str = "local") -> str:
    with pytest.raises(UserError) as caught:
        store.preflight(found, cluster)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_default_is_an_absolute_sqlite_file_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = store.resolve(Path("runs"))
    assert found.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert found.artifacts == tmp_path / "runs" / "mlflow-artifacts"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert store.resolve(Path("runs")).uri == "http://tracker:5000"
    assert store.resolve(Path("runs"), "http://other:5000").uri == "http://other:5000"


@pytest.mark.parametrize(
    ("uri", "cluster", "says"),
    [
        ("file:///tmp/mlruns", "local", "MLflow 3 has no file store; allowed is sqlite:////absolute/path.db"),
        ("mlruns", "local", "MLflow 3 has no file store"),
        ("sqlite:///mlflow.db", "local", "depends on the working directory; allowed is sqlite:////absolute"),
        ("sqlite:///mlflow.db", "slurm", "depends on the working directory"),
        ("sqlite://", "local", "depends on the working directory"),
        ("http://localhost:5000", "slurm", "names another machine on every node"),
        ("http://127.0.0.1:5000", "slurm", "names another machine on every node"),
        ("ftp://there", "local", "no store of ours; allowed is"),
    ],
)
def test_a_store_that_cannot_work_is_one_line(
    tmp_path: Path, uri: str, cluster: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    line = refusal(store.resolve(tmp_path), cluster)
    assert line.startswith(f"MLFLOW_TRACKING_URI = {uri}: ") and says in line
    assert list(tmp_path.iterdir()) == []  # nothing half made


def test_an_unreachable_server_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "PAUSES", ())
    assert "no server answers there (connection refused)" in refusal(store.resolve(tmp_path, "http://127.0.0.1:9"))
    assert "no such host" in refusal(store.resolve(tmp_path, "http://no-such-host.invalid:5000"))


def test_a_full_disk_is_one_line_and_a_sync_survives_it(tiny_disk: Path) -> None:
    assert "the disk is full" in refusal(store.resolve(tiny_disk))
    folder = tiny_disk.parent / "runs"
    make(folder, steps=3)
    report = Mirror(folder, f"sqlite:///{tiny_disk / 'mlflow.db'}").sync()
    assert "the disk is full" in str(report.error)


def test_a_disk_that_fills_while_syncing_loses_nothing(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ROOM", 0)
    monkeypatch.setattr(tracker, "PAUSES", ())
    subprocess.run(["mount", "-o", "remount,size=1400k", tiny_disk], check=True)
    fresh_store(tiny_disk)
    folder = tiny_disk.parent / "runs"
    run = make(folder, steps=1000)
    mirror = Mirror(folder, f"sqlite:///{tiny_disk / 'mlflow.db'}")
    assert "the disk is full" in str(mirror.sync().error)
    subprocess.run(["mount", "-o", "remount,size=32m", tiny_disk], check=True)
    assert mirror.sync().complete
    assert len(held(mirror.store.uri)["train", run.name]["points"]) == 2001


def test_a_place_without_permission_is_one_line(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path], capture_output=True).returncode:
            pytest.skip("root may write everywhere, and here it may not mount")
    else:
        tmp_path.chmod(0o500)
    try:
        assert "cannot be written" in refusal(store.resolve(tmp_path / "runs"))
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "-l", tmp_path], check=True)
        else:
            tmp_path.chmod(0o700)


def test_an_old_store_is_upgraded_once_and_keeps_its_runs(tmp_path: Path) -> None:
    from alembic import command
    from mlflow.store.db import utils
    from mlflow.store.tracking.dbmodels.initial_models import Base as InitialBase

    found = store.resolve(tmp_path)
    engine = utils.create_sqlalchemy_engine_with_retry(found.uri)
    InitialBase.metadata.create_all(engine)
    with engine.begin() as connection:
        settings = utils._get_alembic_config(found.uri)
        settings.attributes["connection"] = connection
        command.upgrade(settings, "cc1f77228345")  # of MLflow 1.x
    engine.dispose()
    run = make(tmp_path, steps=2)
    assert Mirror(tmp_path).sync().complete
    assert ("train", run.name) in held(found.uri)
    engine = utils.create_sqlalchemy_engine_with_retry(found.uri)
    assert utils._get_schema_version(engine) == utils._get_latest_schema_revision()
    engine.dispose()


def test_a_moved_store_finds_its_artifacts(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    here, there = tmp_path / "here", tmp_path / "there" / "runs"
    make(here, steps=2)
    fresh_store(here)
    assert Mirror(here).sync().complete
    there.parent.mkdir()
    here.rename(there)
    store.preflight(store.resolve(there))
    uri = store.resolve(there).uri
    (run,) = held(uri).values()
    client = MlflowClient(uri, uri)
    assert "config.yaml" in {item.path for item in client.list_artifacts(run["id"])}
    assert "seed: 0" in Path(client.download_artifacts(run["id"], "config.yaml")).read_text()
    make(there, 1, steps=2)
    assert Mirror(there).sync().created == 1  # new runs of the same experiment go there, too
    with closing(sqlite3.connect(there / "mlflow.db")) as database:
        places = {uri for (uri,) in database.execute("SELECT artifact_uri FROM runs")}
    assert all(place.startswith(there.as_uri()) for place in places) and len(places) == 2


def test_a_store_that_another_process_writes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WAIT_S", 0.2)
    fresh_store(tmp_path)
    make(tmp_path, steps=2)
    monkeypatch.setattr(store, "PREFLIGHT_WAIT_S", 0.0)
    with store.opened(store.resolve(tmp_path)):
        report = Mirror(tmp_path).sync()
        store.preflight(store.resolve(tmp_path))  # a store that is being written works
    assert "another process has been writing it" in str(report.error)
    assert Mirror(tmp_path).sync().complete
