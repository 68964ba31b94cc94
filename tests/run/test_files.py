import pytest
from run_fixture import MEGABYTE, fill, small_disk

from study.run import files
from study.run.files import StorageError


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a.json"
    files.write_atomic(path, "one é")
    files.write_atomic(path, b"two", durable=False)
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path):
    with small_disk(tmp_path / "disk", MEGABYTE) as disk:
        path = disk / "a.json"
        files.write_atomic(path, "old")
        filler = fill(disk)
        with pytest.raises(StorageError, match=r"a\.json: cannot be written: No space left") as caught:
            files.write_atomic(path, "new" * 5000)
        assert "\n" not in str(caught.value)
        assert path.read_text() == "old"
        assert sorted(disk.iterdir()) == [path, filler]


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    files.temporary(tmp_path / "a.json").write_text("half")
    (tmp_path / "a.json").write_text("whole")
    (tmp_path / "b.tmp").write_text("somebody's")
    files.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.tmp"]
