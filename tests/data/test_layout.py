"""What is packed from odd folders and zips: all that stands there and nothing else, or one line that says why not."""

import multiprocessing
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from picture_files import encoded, folder, layout, one_line, picture, run_pack, zipped
from PIL import Image

from study.cli.main import main
from study.data import images, pack
from study.data.layout import scan
from study.errors import UserError

pytestmark = pytest.mark.usefixtures("root")

Files = dict[str, bytes]


def numbered(*names: str) -> Files:
    """A picture a name, no two of them equal."""
    return {name: encoded(picture(i)) for i, name in enumerate(names)}


def classes(*tops: str) -> Files:
    """Two pictures of each of two classes below each top folder."""
    return numbered(*(f"{top}{label}/{i}.png" for top in tops for label in ("cat", "dog") for i in range(2)))


def refused(source: Path, root: Path) -> str:
    """The one line in which it is refused; nothing is made."""
    with pytest.raises(UserError) as error:
        run_pack(source)
    assert str(source) in one_line(error) and not list(root.glob("*"))
    assert str(error.value).isprintable()
    return str(error.value)


# ----------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize(
    ("train", "test"),
    [("Training", "Testing"), ("Train", "Test"), ("train", "valid"), ("TRAIN", "Validation"), ("training", "eval")],
)
@pytest.mark.parametrize("roof", ["", "photos/"])
def test_the_usual_names_of_splits_are_known_whatever_their_case(
    train: str, test: str, roof: str, tmp_path: Path
) -> None:
    found = scan(folder(tmp_path / "in", classes(f"{roof}{train}/", f"{roof}{test}/")))
    assert found.classes == ("cat", "dog") and not found.is_drawn and not found.warnings
    for split, top in (("train", train), ("test", test)):
        assert [name for name, _ in found.files[split]] == [
            f"{roof}{top}/{label}/{i}.png" for label in ("cat", "dog") for i in range(2)
        ]


def test_of_three_splits_val_is_left_out_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in", classes("Train/", "test/", "valid/"))
    assert main(["data", "pack", str(source)]) == 0
    captured = capsys.readouterr()
    assert "4 images of valid are left out: test is the test split" in captured.err
    assert "in: 4 training and 4 test images" in captured.out


@pytest.mark.parametrize(
    ("tops", "said"),
    [
        (("train_set/", "test_set/"), "test_set, train_set: looks like splits"),
        (("trainA/", "testB/"), "looks like splits"),
        (("seg_train/", "seg_test/", "seg_pred/"), "looks like splits"),
        (("train2017/", "val2017/"), "looks like splits"),
        (("training_data/", "holdout_data/"), "looks like splits"),
        (("train/", "extra/"), "train, extra: looks like splits"),
        (("train/", "Train/", "test/"), "Train, test, train: looks like splits"),
        (("train/", "val/", "dev/"), "looks like splits"),
        (("test/",), "test: looks like splits"),
        (("test/", "val/"), "looks like splits"),
        (("cat/train/", "cat/test/", "dog/train/"), "splits lie in the class folders, as of cat/"),
    ],
    ids=str,
)
def test_what_looks_like_splits_and_is_not_understood_is_refused(
    tops: tuple[str, ...], said: str, tmp_path: Path, root: Path
) -> None:
    line = refused(folder(tmp_path / "in", classes(*tops)), root)
    assert said in line and "allowed" in line


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_class_called_train_is_asked_for_and_can_be_had(kind: str, tmp_path: Path, root: Path) -> None:
    make = folder if kind == "folder" else zipped
    bare = make(tmp_path / "bare", numbered(*(f"{label}/{i}.png" for label in ("bus", "train") for i in range(3))))
    assert "a class of such a name: put all class folders into train/" in refused(bare, root)
    below = make(
        tmp_path / "below", numbered(*(f"train/{label}/{i}.png" for label in ("bus", "train") for i in (0, 1)))
    )
    assert scan(below).classes == ("bus", "train")


def test_names_that_only_hold_such_a_word_are_classes(tmp_path: Path) -> None:
    names = ("bullet_train", "trainers", "valley", "attestation", "train_station")
    assert scan(folder(tmp_path / "in", numbered(*(f"{name}/0.png" for name in names)))).classes == tuple(sorted(names))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cover.png", "cover.png lies in no class folder"),
        ("top/train/cover.png", "top/train/cover.png lies in no class folder"),
        ("top/cover.png", "splits lie in the class folders, as of top/te"),
    ],
)
def test_a_picture_beside_the_classes_is_refused(name: str, said: str, tmp_path: Path, root: Path) -> None:
    assert said in refused(folder(tmp_path / "in", classes("top/train/", "top/test/") | {name: b""}), root)


# ----------------------------------------------------------------------------------------------------- other files


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_other_files_are_counted_and_make_no_class(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = dict.fromkeys(("Thumbs.db", "train/cat/Thumbs.db", "train/cat/desktop.ini", "notes/README"), b"no picture")
    source = (folder if kind == "folder" else zipped)(tmp_path / "in", layout() | others)
    assert main(["data", "pack", str(source), "--skip-bad"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "warning: left out 4 files without a picture's ending (.db 2, .ini 1, no ending 1)\n"
    assert images.load("in").classes == ("cat", "dog") and "6 training and 2 test images\n" in captured.out


def test_a_source_of_other_files_alone_says_what_it_holds(tmp_path: Path, root: Path) -> None:
    line = refused(folder(tmp_path / "in", {"cat/1.heic": b"", "cat/2.HEIC": b"", "dog/3": b""}), root)
    assert "no images in class folders" in line and "3 files without a picture's ending (.heic 2, no ending 1)" in line


def test_a_pipe_and_a_broken_link_are_bad_files(tmp_path: Path, root: Path) -> None:
    source = folder(tmp_path / "in", layout())
    os.mkfifo(source / "train/cat/pipe.png")
    assert "train/cat/pipe.png: is no regular file" in refused(source, root)
    (source / "train/cat/pipe.png").unlink()
    (source / "train/cat/gone.png").symlink_to("nowhere.png")
    assert "train/cat/gone.png: No such file or directory; --skip-bad" in refused(source, root)


# ------------------------------------------------------------------------------------------------------------ links


@pytest.mark.parametrize(("link", "target"), [("train/cat/up", ".."), ("train/cat/self", "."), ("train/cow", "../..")])
def test_no_link_is_followed_up_the_tree(link: str, target: str, tmp_path: Path, root: Path) -> None:
    source = folder(tmp_path / "in", layout())
    (source / link).symlink_to(target)
    line = refused(source, root)
    assert f"{link} is a link " in line and "allowed is a link to what lies in the folder" in line


@pytest.mark.parametrize("link", ["train/cow", "train/cat/9.png"])
def test_no_link_is_followed_out_of_the_tree(link: str, tmp_path: Path, root: Path) -> None:
    source = folder(tmp_path / "in", layout())
    other = folder(tmp_path / "in2", classes(""))  # its path begins like the source's
    (source / link).symlink_to(other / "cat/0.png" if link.endswith("png") else other / "cat")
    assert f"{link} is a link out of the folder, to {other}" in refused(source, root)


def test_two_folders_that_link_to_each_other_end(tmp_path: Path, root: Path) -> None:
    source = folder(tmp_path / "in", layout())
    (source / "train/cat/x").symlink_to("../dog")
    (source / "train/dog/y").symlink_to("../cat")
    assert "is a link up the tree" in refused(source, root)


def test_links_within_the_source_and_to_it_are_followed(tmp_path: Path) -> None:
    source = folder(tmp_path / "real", layout())
    (source / "train/cow").mkdir()
    folder(source / ".store", {"0.png": encoded(picture(50))})
    (source / "train/cow/0.png").symlink_to("../../.store/0.png")
    (tmp_path / "link").symlink_to(source)
    assert run_pack(tmp_path / "link").train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 50, 10, 11, 12]


@pytest.fixture
def nobodys() -> Iterator[Path]:
    """A folder of a user who is not root, below folders that everyone may enter (pytest's are closed)."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def _as_nobody(source: Path, lines: "multiprocessing.queues.Queue[str]") -> None:
    if os.geteuid() == 0:
        os.setuid(65534)  # root reads whatever its mode
    try:
        lines.put(str(scan(source).classes))
    except UserError as error:
        lines.put(str(error))


def test_a_folder_that_cannot_be_read_is_an_error_not_an_absent_class(nobodys: Path) -> None:
    source = folder(nobodys / "in", layout())
    (source / "train/dog").chmod(0)
    context = multiprocessing.get_context("fork")
    lines = context.Queue()
    process = context.Process(target=_as_nobody, args=(source, lines))
    process.start()
    line = lines.get(timeout=20)
    process.join()
    (source / "train/dog").chmod(0o755)
    assert line == f"{source}/train/dog: cannot be read: Permission denied"


def test_a_tree_deeper_than_python_recurses(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", layout())
    depths = [source / "train/cat"]
    try:
        for _ in range(1500):
            depths.append(depths[-1] / "d")
            depths[-1].mkdir()
        assert len(scan(source).files["train"]) == 6
    finally:
        for depth in reversed(depths[1:]):
            depth.rmdir()  # pytest cannot


# ---------------------------------------------------------------------------------------------------- test in train


def test_a_copied_test_split_is_refused(tmp_path: Path, root: Path) -> None:
    same = layout() | {"test/dog/renamed.png": encoded(picture(1), compress_level=0)}
    line = refused(folder(tmp_path / "in", same), root)
    assert "1 of 3 test images stand in train too (test/dog/renamed.png and train/cat/1.png, pixel by pixel)" in line
    assert "allowed is at most 1%" in line


def test_one_double_in_a_hundred_is_packed_and_said(tmp_path: Path) -> None:
    files = numbered(*(f"train/a/{i:03}.png" for i in range(100)))
    files |= {f"test/a/{i:03}.png": encoded(picture(99 + i)) for i in range(100)}
    packed, source = packed_from(folder(tmp_path / "in", files))
    assert len(packed.test.labels) == 100
    line = "1 of 100 test images stand in train too (test/a/000.png and train/a/099.png, pixel by pixel)"
    assert line in source.warnings


def test_a_drawn_test_split_has_no_training_image(tmp_path: Path) -> None:
    """Each picture stands there three times, under three names."""
    files = {f"{label}/{i}-{j}.png": encoded(picture(i)) for label in "ab" for i in range(100) for j in range(3)}
    files |= {f"a/single-{i}.png": encoded(picture(100 + i)) for i in range(100)}
    packed, source = packed_from(folder(tmp_path / "in", files))
    train, test = ({image.tobytes() for image in split.images} for split in (packed.train, packed.test))
    assert test and not train & test
    left_out = 70 - len(packed.test.labels)
    assert left_out and any(f"{left_out} of 70 drawn test images are left out" in line for line in source.warnings)


def packed_from(source: Path) -> tuple[images.Images, pack.Source]:
    root = images.root_folder()
    return pack.pack(source, "made", root, size=None, test_share=0.1, skip_bad=False, advance=lambda _: None)


def test_splits_of_two_sizes_are_refused(tmp_path: Path, root: Path) -> None:
    files = layout() | {f"test/{label}/0.png": encoded(picture(50, (9, 9))) for label in ("cat", "dog")}
    assert "several sizes (8×8, and test/cat/0.png is 9×9)" in refused(folder(tmp_path / "in", files), root)


# ------------------------------------------------------------------------------------------------------ damaged zips


def entry(name: str, *, mode: int = 0, flags: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr, info.flag_bits = mode << 16, flags
    return info


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train\\cat\\9.png", r"train\cat\9.png parts its folders by backslashes"),
        ("../train/cat/9.png", "../train/cat/9.png leads out of the zip"),
        ("/train/cat/9.png", "leads out of the zip"),
        ("train/cat/0.png", "train/cat/0.png stands in it 2 times: allowed is once"),
        (entry("train/cow", mode=stat.S_IFLNK), "train/cow is a link: allowed is a file"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_whose_names_mislead_is_refused_with_the_cause(
    name: str | zipfile.ZipInfo, said: str, tmp_path: Path, root: Path
) -> None:
    source = zipped(tmp_path / "in.zip", layout())
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr(name, encoded(picture(77)))
    line = refused(source, root)
    assert said in line and "allowed is" in line


def test_an_encrypted_zip_is_refused(tmp_path: Path, root: Path) -> None:
    source = zipped(tmp_path / "in.zip", layout())
    content = bytearray(source.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # the first entry's flags in the directory
    source.write_bytes(content)
    assert "is encrypted: allowed is a zip without a password" in refused(source, root)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"XX"), (6, b"\xff"), (9, b"\x08")],
    ids=["signature", "version", "a name that is not UTF-8"],
)
def test_a_damaged_directory_of_a_zip_is_one_line(at: int, value: bytes, tmp_path: Path, root: Path) -> None:
    source = zipped(tmp_path / "in.zip", layout())
    content = bytearray(source.read_bytes())
    start = content.index(b"PK\x01\x02")
    content[start + at : start + at + len(value)] = value
    content[start + 46] = ord(b"t") if at < 9 else 0xFF
    source.write_bytes(content)
    assert "damaged zip: " in refused(source, root)


@pytest.mark.parametrize("name", [b"c\xe4t", b"c\nt"], ids=["latin-1", "line break"])
def test_names_that_no_line_can_hold(name: bytes, tmp_path: Path, root: Path) -> None:
    source = folder(tmp_path / "in", layout())
    folder(source / "train" / os.fsdecode(name), {"0.png": b""})
    line = refused(source, root)
    assert r"class c\xe4t: its name is not UTF-8" in line or r"train/c\nt/0.png: is no picture" in line


# ------------------------------------------------------------------------------------------------- constant channels


def test_a_constant_channel_is_said_and_normalised_by_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (8, 3, 8, 8), np.uint8)
    pixels[:, 2] = 33  # here mean² exceeds the mean of the squares, by rounding
    files = {
        f"{label}/{i}.png": encoded(Image.fromarray(pixels[i].transpose(1, 2, 0))) for label in "ab" for i in range(4)
    }
    files = {name: encoded(Image.fromarray(pixels[at].transpose(1, 2, 0))) for at, name in enumerate(files)}
    assert main(["data", "pack", str(folder(tmp_path / "in", files))]) == 0
    assert "warning: every pixel has the same blue: it is centred, and not scaled\n" in capsys.readouterr().err
    packed = images.load("in")
    assert packed.std[2] == 1 and 0.2 < packed.std[0] < 0.4 and packed.constant == ("blue",)
