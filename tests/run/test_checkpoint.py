import random
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from run_fixture import MEGABYTE, fill, kill_after, small_disk

from study.errors import UserError
from study.run import checkpoint, files
from study.run.checkpoint import Checkpoints
from study.run.files import StorageError

RUN = "0123456789ab"


def quiet(line: str) -> None:
    raise AssertionError(f"unexpected warning: {line}")


def state(step: int, size: int = 64) -> dict:
    return {
        "f_q": {"weight": torch.full((size, 4), float(step))},
        "queue": torch.arange(size) + step,
        "pointer": step,
        "optimiser": {"lr": 0.03, "groups": [{"params": [0, 1]}], "none": None},
    }


def write(folder: Path, *steps: int) -> list[Path]:
    writer = Checkpoints(folder, RUN, quiet)
    for step in steps:
        writer.save(step, state(step))
        writer.drain()
    writer.close()
    return sorted(folder.iterdir())


def damage(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def assert_holds(found: tuple[int, dict] | None, step: int) -> None:
    assert found is not None
    assert found[0] == found[1]["pointer"] == step
    assert torch.equal(found[1]["queue"], torch.arange(len(found[1]["queue"])) + step)
    assert (found[1]["f_q"]["weight"] == step).all()


def test_a_state_comes_back_as_it_was(tmp_path):
    original = {
        "half": torch.randn(3, 5).bfloat16(),
        "integers": torch.tensor([2**62, -1]),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "nested": {"list": [1, 2.5, None, "x", True], "pair": (torch.zeros(()), 2)},
    }
    writer = Checkpoints(tmp_path, RUN, quiet)
    writer.save(7, original)
    writer.close()
    step, found = checkpoint.latest(tmp_path, RUN, quiet)
    assert step == 7
    assert found["nested"]["list"] == original["nested"]["list"]
    assert torch.equal(found["nested"]["pair"][0], torch.zeros(()))
    for name in ("half", "integers", "channels_last"):
        assert torch.equal(found[name], original[name])
        assert found[name].dtype == original[name].dtype
        assert found[name].stride() == original[name].stride()


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    gate = threading.Event()
    writer = Checkpoints(tmp_path, RUN, quiet, before=lambda: gate.wait(10) and None)
    parameter = torch.nn.Parameter(torch.ones(4))
    changing = {"list": [1], "parameter": parameter}
    writer.save(1, {"model": changing})
    with torch.no_grad():
        parameter.add_(1)
    changing["list"].append(2)
    gate.set()
    writer.close()
    found = writer.latest()[1]["model"]
    assert torch.equal(found["parameter"], torch.ones(4))
    assert found["list"] == [1]


def test_one_tensor_in_two_places_is_kept_once(tmp_path):
    encoder = torch.randn(1000, 50)
    square = encoder[:50]
    copy = checkpoint.clone(
        {"f_q": encoder, "f_k": encoder.detach(), "row": encoder[0], "square": square, "turned": square.T}
    )
    assert copy["f_q"] is copy["f_k"]
    assert copy["f_q"].data_ptr() != encoder.data_ptr()
    assert torch.equal(copy["row"], encoder[0])
    assert torch.equal(copy["square"], square)
    assert torch.equal(copy["turned"], square.T)


def test_the_newest_two_are_kept(tmp_path):
    assert [path.name[:9] for path in write(tmp_path, 3, 6, 9, 12)] == ["000000009", "000000012"]
    assert_holds(checkpoint.latest(tmp_path, RUN, quiet), 12)


def test_a_writer_that_was_not_asked_for_the_latest_keeps_the_one_before(tmp_path):
    write(tmp_path, 3, 6)
    assert [path.name[:9] for path in write(tmp_path, 9)] == ["000000006", "000000009"]


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.latest(tmp_path, RUN, quiet) is None
    assert checkpoint.latest(tmp_path / "absent", RUN, quiet) is None


def test_a_damaged_newest_falls_back_with_a_warning(tmp_path):
    older, newest = write(tmp_path, 3, 6)
    chance = random.Random(0)
    size = newest.stat().st_size
    for position in [0, size - 1, *(chance.randrange(size) for _ in range(30))]:
        warnings: list[str] = []
        damage(newest, position)
        assert_holds(checkpoint.latest(tmp_path, RUN, warnings.append), 3)
        assert len(warnings) == 1
        assert newest.name in warnings[0]
        damage(newest, position)
    newest.write_bytes(newest.read_bytes()[:1000])
    assert_holds(checkpoint.latest(tmp_path, RUN, warnings.append), 3)
    older.write_bytes(b"")
    assert checkpoint.latest(tmp_path, RUN, warnings.append) is None


def test_a_run_that_went_back_replaces_the_damaged_one_and_keeps_the_good(tmp_path):
    damage(write(tmp_path, 3, 6)[1], 500)
    warnings: list[str] = []
    writer = Checkpoints(tmp_path, RUN, warnings.append)
    assert_holds(writer.latest(), 3)
    writer.save(4, state(4))
    writer.close()
    assert [path.name[:9] for path in sorted(tmp_path.iterdir())] == ["000000003", "000000004"]
    assert len(warnings) == 1


def test_the_previous_stands_until_the_new_one_is_read_back_whole(tmp_path, monkeypatch):
    before = write(tmp_path, 3, 6)
    writer = Checkpoints(tmp_path, RUN, quiet)
    writer.latest()

    def fsync(descriptor: int, real=files.os.fsync) -> None:  # a disk that keeps something else
        real(descriptor)
        files.os.pwrite(descriptor, b"\xff", 200)

    monkeypatch.setattr(files.os, "fsync", fsync)
    writer.save(9, state(9))
    with pytest.raises(StorageError, match="read back"):
        writer.close()
    assert sorted(tmp_path.iterdir()) == before


def test_another_runs_checkpoint_is_refused(tmp_path):
    write(tmp_path, 3)
    with pytest.raises(UserError, match=rf"checkpoint of run {RUN}: allowed is one of run fedcba987654"):
        checkpoint.latest(tmp_path, "fedcba987654", quiet)


@pytest.mark.parametrize("name", ["checkpoint_0199.pth.tar", "encoder.pt", "weights.pth"])
def test_weights_only_given_to_continue_from_says_what_they_are_good_for(tmp_path, name):
    torch.save({"state_dict": {"module.encoder_q.conv1.weight": torch.zeros(2)}}, tmp_path / name)
    with pytest.raises(UserError) as caught:
        checkpoint.latest(tmp_path, RUN, quiet)
    assert f"{name}: holds weights only" in str(caught.value)
    assert "study encoder probe" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_in_a_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "run",))

    torch.save({"signature": RUN, "step": 1, "state": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"evil\.pt: cannot be read") as caught:
        checkpoint.latest(tmp_path, RUN, quiet)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path):
    before = write(tmp_path, 3, 6)
    writer = Checkpoints(tmp_path, RUN, quiet)
    writer.save(9, {"path": tmp_path})
    with pytest.raises(Exception, match="Weights only load failed"):
        writer.close()
    assert sorted(tmp_path.iterdir()) == before


def test_a_slow_disk_gets_fewer_checkpoints_never_a_queue(tmp_path):
    gate, began, written = threading.Event(), threading.Event(), []

    def before() -> None:
        began.set()
        gate.wait(10)
        written.append(1)

    writer = Checkpoints(tmp_path, RUN, quiet, before)
    writer.save(1, state(1))
    began.wait(10)
    for step in range(2, 10):
        writer.save(step, state(step))
    gate.set()
    writer.close()
    assert len(written) == 2
    assert [path.name[:9] for path in sorted(tmp_path.iterdir())] == ["000000001", "000000009"]


def test_nothing_is_written_if_the_journal_could_not_be(tmp_path):
    def before() -> None:
        raise StorageError("journal: cannot be written")

    writer = Checkpoints(tmp_path, RUN, quiet, before)
    writer.save(1, state(1))
    with pytest.raises(StorageError, match="journal"):
        writer.drain()
    with pytest.raises(StorageError, match="journal"):
        writer.save(2, state(2))
    with pytest.raises(StorageError, match="journal"):
        writer.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_at_the_next_boundary_and_the_last_two_stand(tmp_path):
    with small_disk(tmp_path / "disk", 4 * MEGABYTE) as disk:
        before = write(disk, 3, 6)
        filler = fill(disk)
        writer = Checkpoints(disk, RUN, quiet)
        writer.latest()
        writer.save(9, state(9))
        with pytest.raises(StorageError, match=r"cannot be written: No space left") as caught:
            writer.drain()
        assert "\n" not in str(caught.value)
        with pytest.raises(StorageError):
            writer.save(10, state(10))
        with pytest.raises(StorageError):
            writer.close()
        filler.unlink()
        assert sorted(disk.iterdir()) == before
        assert_holds(checkpoint.latest(disk, RUN, quiet), 6)
        write(disk, 9)
        assert_holds(checkpoint.latest(disk, RUN, quiet), 9)


def keep_checkpoints(report: Connection, folder: Path) -> None:
    torch.set_num_threads(1)  # the pool of threads does not survive a fork
    files.remove_leftovers(folder)
    writer = Checkpoints(folder, RUN, quiet)
    step = (writer.latest() or (0, {}))[0]
    report.send(step)
    while True:
        step += 1
        writer.save(step, state(step, 50_000))
        writer.drain()
        report.send(step)


def test_killed_at_any_moment_the_last_whole_checkpoint_stands(tmp_path):
    chance, last, interrupted, window = random.Random(0), 0, 0, 0.08
    for _ in range(400):
        reports = kill_after(chance.uniform(0.0, window), keep_checkpoints, tmp_path)
        if len(reports) == 1:
            window *= 1.02  # too short for one, maybe
        last = max(last, *reports)
        assert len(list(tmp_path.glob("*.pt"))) <= 3
        interrupted += bool(list(tmp_path.glob(files.TEMPORARY)))
        found = checkpoint.latest(tmp_path, RUN, quiet)
        if last:
            assert found[0] >= last
            assert_holds(found, found[0])
            last = found[0]
        if last > 10 and interrupted > 5:
            return
    pytest.fail(f"{interrupted} kills hit a write, {last} were saved: the test shows nothing")
