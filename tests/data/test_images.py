"""Images: packing whatever people have, public sources, and what is said when something is wrong."""

import argparse
import gzip
import json
import multiprocessing
import os
import pickle
import shutil
import sys
import time
import zipfile
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from picture_files import encoded, folder, layout, one_line, picture, run_pack, zipped
from PIL import Image

from study.cli import data as commands
from study.data import images, pack, sources
from study.errors import UserError

pytestmark = pytest.mark.usefixtures("root")


def study(*arguments: str) -> int:
    """`study ARGUMENTS` as cli.main runs it, without turning UserError into a line."""
    parser = argparse.ArgumentParser()
    commands.register(parser.add_subparsers(required=True))
    args = parser.parse_args(arguments)
    return int(args.func(args))


# --------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("kind", ["folder", "zip", "zip of a folder", "val"])
def test_layouts_give_the_same_images(kind: str, tmp_path: Path) -> None:
    files = layout()
    if kind == "val":
        files = {name.replace("test/", "val/"): content for name, content in files.items()}
    if kind == "zip of a folder":
        files = {f"photos/{name}": content for name, content in files.items()} | {"README.md": b"hello"}
    source = folder(tmp_path / "in", files) if kind in ("folder", "val") else zipped(tmp_path / "in.zip", files)
    packed = run_pack(source)
    assert packed.classes == ("cat", "dog")
    assert packed.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 10, 11, 12]
    assert packed.train.labels.tolist() == [0, 0, 0, 1, 1, 1] and packed.train.labels.dtype == np.int64
    assert packed.test.images[:, 2, 7, 7].tolist() == [3, 13] and packed.test.labels.tolist() == [0, 1]
    assert packed.train.images.shape == (6, 3, 8, 8) and not packed.train.images.flags.writeable
    assert isinstance(packed.train.images, np.memmap)


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize("loose", ["top/readme.md", "README", "top/sub/notes.txt"])
def test_what_is_no_image_beside_the_class_folders_changes_nothing(kind: str, loose: str, tmp_path: Path) -> None:
    roof = loose.rpartition("/")[0] or "top"
    files = {f"{roof}/{name}/{i}.png": encoded(picture(i)) for name in ("cat", "dog") for i in range(4)}
    source = (folder if kind == "folder" else zipped)(tmp_path / "source", files | {loose: b"read me"})
    found = pack.scan(source)
    left_out = f"left out 1 file without a picture's ending ({Path(loose).suffix or 'no ending'} 1)"
    assert found.classes == ("cat", "dog")
    assert len(found.files["train"]) == 6 and found.warnings == [left_out]
    if kind == "folder":
        (source / roof / "cow").mkdir()
        assert pack.scan(source).warnings == [f"class folder {roof}/cow holds no image", left_out]


def test_a_fault_is_the_only_line_where_stderr_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no images in class folders"):
        study("data", "pack", str(folder(tmp_path / "source", {"notes.txt": b"read me"})))
    assert capsys.readouterr() == ("", "")


def test_mean_and_std_are_those_of_the_training_images(tmp_path: Path) -> None:
    values = np.random.RandomState(0).randint(0, 256, (20, 3, 8, 8), np.uint8)
    files = {
        f"train/a/{i:02}.png": encoded(Image.fromarray(value.transpose(1, 2, 0))) for i, value in enumerate(values)
    }
    packed = run_pack(folder(tmp_path / "in", files | {"test/a/0.png": encoded(picture(0))}))
    assert np.array_equal(packed.train.images, values)
    assert np.allclose(packed.mean, (values / 255).mean((0, 2, 3)), atol=1e-6)
    assert np.allclose(packed.std, (values / 255).std((0, 2, 3)), atol=1e-6)


def test_classes_alone_are_split_by_a_fixed_draw(tmp_path: Path) -> None:
    counts = (("a", 40, 0), ("b", 20, 100), ("c", 1, 200))
    files = {f"{label}/{i}.png": encoded(picture(first + i)) for label, n, first in counts for i in range(n)}
    source = folder(tmp_path / "in", files)
    packed = run_pack(source, test_share=0.1)
    assert Counter(packed.test.labels.tolist()) == {0: 4, 1: 2}  # a class keeps at least one training image
    assert Counter(packed.train.labels.tolist()) == {0: 36, 1: 18, 2: 1}
    assert packed.digest == run_pack(source, "again").digest


def rgb(image: Image.Image) -> list[int]:
    """Top left pixel after packing."""
    with Image.open(BytesIO(encoded(image))) as opened:
        return [int(value) for value in pack.decode(opened)[:, 0, 0]]


def test_every_kind_of_picture_becomes_rgb() -> None:
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    see_through = palette.copy()
    see_through.info["transparency"] = 1
    assert rgb(picture(77, mode="L")) == [77, 77, 77]
    assert rgb(Image.new("1", (8, 8), 1)) == [255, 255, 255]
    assert rgb(palette) == [200, 100, 50]
    assert rgb(see_through) == [255, 255, 255]  # white shows through
    assert rgb(Image.new("RGBA", (8, 8), (0, 0, 0, 0))) == [255, 255, 255]
    assert rgb(Image.new("RGBA", (8, 8), (255, 0, 0, 128))) == [255, 127, 127]
    assert rgb(Image.new("LA", (8, 8), (10, 255))) == [10, 10, 10]
    for sixteen, eight in ((65535, 255), (0, 0), (257 * 100, 100), (32768, 128)):
        assert rgb(Image.fromarray(np.full((8, 8), sixteen, np.uint16))) == [eight] * 3
    jpeg = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")
    with Image.open(BytesIO(jpeg)) as opened:
        assert pack.decode(opened)[:, 0, 0] == pytest.approx([255, 0, 0], abs=3)


def test_values_beyond_16_bits_are_refused() -> None:
    for values in (np.full((8, 8), 70000, np.int32), np.full((8, 8), 0.5, np.float32)):
        with Image.open(BytesIO(encoded(Image.fromarray(values), "TIFF"))) as opened, pytest.raises(ValueError):
            pack.decode(opened)


def test_exif_orientation_is_applied() -> None:
    image = picture(0, (8, 8))
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    with Image.open(BytesIO(encoded(image, exif=exif))) as opened:
        pixels = pack.decode(opened)
    assert pixels[0, 0, 7] == 255 and pixels[0, 0, 0] == 0


def test_sizes_differ_and_the_line_says_what_to_do(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", layout() | {"train/dog/3.png": encoded(picture(5, (20, 10)))})
    with pytest.raises(UserError) as error:
        run_pack(source)
    assert "8×8" in one_line(error) and "train/dog/3.png is 10×20" in str(error.value) and "--size" in str(error.value)
    packed = run_pack(source, size=12)
    assert packed.train.images.shape == (7, 3, 12, 12)
    assert (packed.train.images[6] == 5).all()


def test_resizing_keeps_the_middle() -> None:
    wide = Image.new("RGB", (64, 16), "black")
    wide.paste("white", (24, 0, 40, 16))
    assert (pack.decode(wide, 16) == 255).all()
    assert pack.decode(Image.new("RGB", (1000, 3)), 8).shape == (3, 8, 8)


TRUNCATED = encoded(Image.effect_noise((64, 64), 90), "JPEG")[:900]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train/cat/x.jpg", TRUNCATED),
        ("train/cat/x.png", encoded(Image.effect_noise((64, 64), 90))[:900]),
        ("test/dog/x.png", b""),
        ("train/dog/notes.PNG", b"no picture"),
    ],
    ids=["truncated jpeg", "truncated png", "empty", "text"],
)
@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_bad_files_are_named_or_skipped(name: str, content: bytes, kind: str, tmp_path: Path, root: Path) -> None:
    files = layout() | {name: content}
    source = folder(tmp_path / "in", files) if kind == "folder" else zipped(tmp_path / "in.zip", files)
    with pytest.raises(UserError) as error:
        run_pack(source)
    assert f"{source}: {name}: " in one_line(error) and "--skip-bad" in str(error.value)
    assert "0x" not in str(error.value) and str(error.value).count(str(source)) == 1
    assert not list(root.iterdir())  # nothing half made, no lock left
    packed, packed_from = pack.pack(
        source, "made", root, size=None, test_share=0.1, skip_bad=True, advance=lambda _: None
    )
    assert len(packed_from.bad) == 1 and packed_from.bad[0].startswith(f"{name}: ")
    assert (len(packed.train.labels), len(packed.test.labels)) == (6, 2)


def test_hidden_names_and_shadow_copies_are_ignored(tmp_path: Path) -> None:
    bad = dict.fromkeys(("train/cat/.DS_Store", "__MACOSX/train/cat/._0.png", ".git/x/y.png"), TRUNCATED)
    clean = run_pack(zipped(tmp_path / "clean.zip", layout()), "clean")
    assert run_pack(zipped(tmp_path / "in.zip", layout() | bad)).digest == clean.digest
    assert run_pack(folder(tmp_path / "in", layout() | bad), "other").digest == clean.digest


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no images in class folders"),
        ({"0.png": b""}, "0.png lies in no class folder"),
        ({"train/0.png": b"", "train/cat/1.png": b""}, "train/0.png lies in no class folder"),
        (layout() | {"test/cow/0.png": b""}, "class cow has test images but no training images"),
    ],
)
def test_layouts_that_cannot_be_meant(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError) as error:
        run_pack(folder(tmp_path / "in", files))
    assert message in one_line(error)


def test_a_source_that_is_no_folder_or_zip(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"PK no zip")
    for source in (tmp_path / "x.zip", tmp_path / "missing"):
        with pytest.raises(UserError, match="allowed is an image folder or a zip"):
            run_pack(source)


# ---------------------------------------------------------------------------------------- storing, loading, subsets


def test_packing_twice_is_no_fault_but_something_else_is(tmp_path: Path, root: Path) -> None:
    source = folder(tmp_path / "in", layout())
    first = run_pack(source)
    assert run_pack(source).digest == first.digest
    folder(source, {"train/cat/0.png": encoded(picture(99))})
    with pytest.raises(UserError, match="holds something else"):
        run_pack(source)
    assert images.load("made").digest == first.digest
    assert sorted(path.name for path in root.iterdir()) == ["made"]


def _pack_in_process(source: Path) -> None:
    run_pack(source)


def test_two_at_once_and_a_killed_one_before(tmp_path: Path, root: Path) -> None:
    source = zipped(tmp_path / "in.zip", layout())
    folder(root / ".made.tmp", {"packed/train.npy": b"half"})
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_pack_in_process, args=(source,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(images.load("made").train.labels) == 6
    assert [path.name for path in root.iterdir()] == ["made"]


def _count_alone(root: Path, times: int) -> None:
    """A counter that is wrong as soon as two hold the lock at once."""
    for _ in range(times):
        with images.staging("made", root):
            value = int((root / "count").read_text())
            time.sleep(0.001)
            (root / "count").write_text(str(value + 1))


def test_a_lock_that_its_holder_removes_is_held_by_one_at_a_time(root: Path) -> None:
    folder(root, {"count": b"0"})
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count_alone, args=(root, 25)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (root / "count").read_text() == "100" and [path.name for path in root.iterdir()] == ["count"]


def test_unknown_name_names_the_command(root: Path) -> None:
    with pytest.raises(UserError) as error:
        images.load("nothing")
    assert "data.name = nothing" in one_line(error) and "study data pack SOURCE --name nothing" in str(error.value)
    assert "data get" not in str(error.value) and "STUDY_DATA" in str(error.value)
    with pytest.raises(UserError, match="`study data get mnist` gets it, or set STUDY_DATA"):
        images.load("mnist")
    with pytest.raises(UserError, match="allowed is fashion-mnist, mnist"):
        sources.get("nothing")
    assert not root.exists()


@pytest.mark.parametrize("damage", ["short", "manifest", "labels", "missing", "empty"])
def test_damage_is_one_line(damage: str, tmp_path: Path, root: Path) -> None:
    run_pack(folder(tmp_path / "in", layout()))
    made = root / "made"
    if damage == "short":
        os.truncate(made / "train.npy", 500)
    elif damage == "manifest":
        (made / "manifest.json").write_text('{"classes": [')
    elif damage == "empty":
        (made / "manifest.json").write_text("{}")
    elif damage == "labels":
        np.save(made / "test_labels.npy", np.array([0, 7]))
    else:
        (made / "test.npy").unlink()
    with pytest.raises(UserError) as error:
        images.load("made")
    assert str(made) in one_line(error) and "damaged" in str(error.value)


def test_a_root_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STUDY_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(UserError) as error:
        run_pack(folder(tmp_path / "in", layout()))
    assert "Not a directory" in one_line(error)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.data())
def test_a_subset_is_balanced_nested_and_always_the_same(values: list[int], data: st.DataObject) -> None:
    labels = np.array(values)
    n = data.draw(st.integers(1, len(labels)))
    chosen = images.subset(labels, n)
    assert chosen.dtype == np.int64 and len(set(chosen.tolist())) == n and (np.diff(chosen) > 0).all()
    assert np.array_equal(chosen, images.subset(labels, n))
    assert set(chosen.tolist()) <= set(images.subset(labels, min(n + 1, len(labels))).tolist())
    available, drawn = Counter(values), Counter(labels[chosen].tolist())
    most = max(drawn.values())
    assert all(drawn[label] >= min(most - 1, available[label]) for label in available)


def test_a_subset_is_a_draw_not_the_first_of_each_class() -> None:
    labels = np.repeat(np.arange(10), 100)
    assert images.subset(labels, 100).tolist() != [100 * label + i for label in range(10) for i in range(10)]
    assert np.array_equal(images.subset(labels, None), np.arange(1000))
    with pytest.raises(UserError, match=r"data\.train_images = 1001: allowed is at most 1000, .* or null"):
        images.subset(labels, 1001)


# --------------------------------------------------------------------------------------------------- public sources


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.astype(np.uint8).tobytes()


def idx_files(prefix: str = "", *, zip_them: bool = True) -> dict[str, bytes]:
    """Fashion-MNIST's four files with 12 and 6 images; image i has the value i."""
    files = {}
    for split, n in (("train", 12), ("t10k", 6)):
        values = np.broadcast_to(np.arange(n)[:, None, None], (n, 28, 28))
        for name, content in (("images-idx3", idx(values)), ("labels-idx1", idx(np.arange(n) % 10))):
            path = f"{prefix}{split}-{name}-ubyte"
            files[f"{path}.gz" if zip_them else path] = gzip.compress(content) if zip_them else content
    return files


@pytest.mark.parametrize("zip_them", [True, False])
def test_fashion_mnist_from_torchvisions_folder(zip_them: bool, root: Path) -> None:
    folder(root, idx_files("FashionMNIST/raw/", zip_them=zip_them))
    assert study("data", "get", "fashion-mnist") == 0
    got = images.load("fashion-mnist")
    assert got.train.images.shape == (12, 3, 28, 28) and got.test.images.shape == (6, 3, 28, 28)
    assert (got.train.images == np.arange(12)[:, None, None, None]).all()
    assert got.classes[:2] == ("T-shirt/top", "Trouser")
    shutil.rmtree(root / "FashionMNIST")
    assert study("data", "get", "fashion-mnist") == 0  # at hand: nothing is looked for


def test_fashion_mnist_from_a_folder_of_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUDY_DATA", str(folder(tmp_path / "fashion-mnist", idx_files())))
    assert len(sources.get("fashion-mnist").train.labels) == 12


def programs(path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Put programs of our own before those of the machine, and Debian's installed data sets out of sight."""
    for name, script in scripts.items():
        program = folder(path, {name: f"#!/bin/sh\n{script}\n".encode()}) / name
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sources, "DEBIAN", path / "usr/share/datasets")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb on this machine")
def test_fashion_mnist_from_debians_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control = b"Package: dataset-fashion-mnist\nVersion: 0\nArchitecture: all\nMaintainer: a\nDescription: b\n"
    tree = tmp_path / "package"
    programs(tmp_path / "bin", monkeypatch)
    inside = str(sources.DEBIAN.relative_to("/") / "fashion-mnist")
    folder(tree, idx_files(f"{inside}/") | {"DEBIAN/control": control})
    answer = f'case "$*" in *download*) dpkg-deb -b {tree} made.deb >/dev/null;; esac'
    programs(tmp_path / "bin", monkeypatch, **{"apt-get": answer})
    assert len(sources.get("fashion-mnist").test.labels) == 6


def test_nowhere_to_be_had_is_one_line_that_names_what_was_tried(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path / "bin", monkeypatch, **{"apt-get": "echo 'E: Unable to locate package' >&2; exit 100"})
    with pytest.raises(UserError) as error:
        sources.get("fashion-mnist")
    for part in (str(root), "apt-get: E: Unable to locate package", "torchvision's download: ", "STUDY_DATA"):
        assert part in one_line(error)
    assert not [path for path in root.iterdir() if path.is_dir()]


def test_a_truncated_idx_file_is_named(root: Path) -> None:
    files = idx_files("FashionMNIST/raw/")
    name = "FashionMNIST/raw/t10k-images-idx3-ubyte.gz"
    flipped = bytearray(files[name])
    flipped[12] ^= 0xFF  # in the compressed bytes: zlib notices before the checksum does
    short = gzip.compress(gzip.decompress(files[name])[:-1])
    for content in (short, files[name][:-9], b"", gzip.compress(b"abc"), bytes(flipped)):
        folder(root, files | {name: content})
        with pytest.raises(UserError) as error:
            sources.get("fashion-mnist")
        assert name in one_line(error)


def test_labels_beyond_the_classes_make_nothing(root: Path) -> None:
    files = idx_files("FashionMNIST/raw/", zip_them=False)
    name = "FashionMNIST/raw/t10k-labels-idx1-ubyte"
    folder(root, files | {name: files[name][:-1] + b"\x0a"})
    with pytest.raises(UserError) as error:
        sources.get("fashion-mnist")
    assert "a test label is 10: allowed is 0 to 9" in one_line(error)
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("unpickled",)


def test_a_pickle_that_is_not_torchvisions_is_never_opened(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    folder(root, {f"cifar-10-batches-py/{name}": pickle.dumps(Evil()) for name in names})
    with pytest.raises(UserError) as error:
        sources.get("cifar10")
    assert "corrupted" in one_line(error) and not (tmp_path / "unpickled").exists()


def test_cifar10_in_torchvisions_format(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    def batch(first: int) -> bytes:
        values = np.arange(first, first + 4, dtype=np.uint8)
        data = np.stack([np.repeat(values + 50 * channel, 1024).reshape(4, 1024) for channel in range(3)], 1)
        return pickle.dumps({"data": data.reshape(4, 3072), "labels": [0, 1, 2, 0]})

    files = {f"cifar-10-batches-py/data_batch_{i}": batch(4 * i) for i in range(1, 6)}
    files |= {"cifar-10-batches-py/test_batch": batch(40)}
    files |= {"cifar-10-batches-py/batches.meta": pickle.dumps({"label_names": ["a", "b", "c"]})}
    folder(root, files)
    for name in ("train_list", "test_list"):  # the md5 sums of what was made here
        monkeypatch.setattr(CIFAR10, name, [[entry[0], None] for entry in getattr(CIFAR10, name)])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": None})
    got = sources.get("cifar10")
    assert got.classes == ("a", "b", "c") and got.train.images.shape == (20, 3, 32, 32)
    assert got.train.images[:, :, 5, 6].tolist() == [[v, v + 50, v + 100] for v in range(4, 24)]
    assert got.test.labels.tolist() == [0, 1, 2, 0]


def test_stl10_in_torchvisions_format(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import STL10

    column_by_column = np.zeros((2, 3, 96, 96), np.uint8)
    column_by_column[:, :, 1, 0] = 9  # second column, first row
    labels = np.array([1, 2], np.uint8)
    files = {f"stl10_binary/{split}_X.bin": column_by_column.tobytes() for split in ("train", "test", "unlabeled")}
    files |= {f"stl10_binary/{split}_y.bin": labels.tobytes() for split in ("train", "test")}
    folder(root, files | {"stl10_binary/class_names.txt": b"plane\nbird"})
    for name in ("train_list", "test_list"):
        monkeypatch.setattr(STL10, name, [[entry[0], None] for entry in getattr(STL10, name)])
    got = sources.get("stl10")
    assert got.classes == ("plane", "bird") and got.train.labels.tolist() == [0, 1]
    assert got.train.images[0, 0, 0, 1] == 9 and got.train.images.sum() == 2 * 3 * 9


# -------------------------------------------------------------------------------------------------- command line


def test_list_shows_what_is_at_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study("data", "list", "--json")
    assert not any(row["at_hand"] for row in json.loads(capsys.readouterr().out))
    assert study("data", "pack", str(zipped(tmp_path / "My Photos.zip", layout()))) == 0
    assert "my-photos: 6 training and 2 test images" in capsys.readouterr().out
    study("data", "list", "--json")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["my-photos"]["size"] == "8×8" and rows["my-photos"]["train"] == 6
    assert rows["my-photos"]["digest"] == images.load("my-photos").digest
    assert not rows["stl10"]["at_hand"]
    study("data", "list")
    shown = capsys.readouterr().out
    assert "my-photos" in shown and "stl10" in shown and images.load("my-photos").digest[:12] in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "4"], "--size = 4: allowed is 8 to 1024"),
        (["--test-share", "1.5"], "--test-share = 1.5: allowed is between 0 and 1"),
        (["--name", "../x"], "--name = ../x: allowed is small letters"),
        (["--name", ""], "--name = : allowed is small letters"),
        (["--name", "mnist"], "--name = mnist: is a public data set"),
    ],
)
def test_options_out_of_range(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message.replace("..", r"\.\.")):
        study("data", "pack", str(folder(tmp_path / "in", layout())), *arguments)


@pytest.mark.parametrize(
    ("called", "name"), [("sp ace ü", "sp-ace-u"), ("--Größe 2!.zip", "groe-2"), ("a.b_c", "a.b_c")]
)
def test_a_name_is_made_of_what_the_source_is_called(called: str, name: str, tmp_path: Path) -> None:
    assert commands._name(tmp_path / called) == name


@pytest.mark.parametrize("kind", ["folder", "zip"])
@pytest.mark.parametrize("roof", ["", "train/"])
def test_one_class_and_classes_without_images_are_warned_of(
    kind: str, roof: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"{roof}cat/{i}.png": encoded(picture(i)) for i in range(4)}
    files |= {"test/cat/9.png": encoded(picture(9))} if roof else {}
    if kind == "folder":
        source = folder(tmp_path / "in", files)
        (source / roof / "cow").mkdir()
    else:
        source = zipped(tmp_path / "in.zip", files)
        with zipfile.ZipFile(source, "a") as archive:
            archive.writestr(f"{roof}cow/", b"")
    assert study("data", "pack", str(source)) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 2 and f"class folder {roof}cow holds no image" in warned[0] and "one class, cat" in warned[1]


def test_what_has_two_full_classes_is_not_warned_of(tmp_path: Path) -> None:
    assert pack.scan(folder(tmp_path / "in", layout())).warnings == []


def test_skipped_files_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in", layout() | {"train/cat/x.jpg": TRUNCATED})
    assert study("data", "pack", str(source), "--skip-bad") == 0
    printed = capsys.readouterr()
    assert "skipped train/cat/x.jpg: " in printed.err and "1 files skipped" in printed.out


def test_registering_the_commands_imports_nothing_heavy() -> None:
    code = "import sys; from study.cli import data; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert os.popen(f'{sys.executable} -c "{code}"').read().split() == ["False", "False"]
