"""Packed images: ``<root>/<name>/`` holds uint8 arrays that are memory-mapped, their labels and a manifest.

    train.npy, test.npy                uint8 (n, 3, H, W)
    train_labels.npy, test_labels.npy  int64 (n,)
    manifest.json                      classes, mean and SD of the training images, digest of the content

A folder appears under its name only when it is whole: it is written beside it and renamed.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from study.data.public import SOURCES
from study.errors import UserError

MANIFEST = "manifest.json"
COLOURS = ("red", "green", "blue")

Chunks = Iterable[tuple[np.ndarray, np.ndarray]]
"""Images uint8 (b, 3, H, W) and labels (b,), piece by piece; H and W stay the same."""

Advance = Callable[[int], None]
"""Told how many images more are done."""


@dataclass(frozen=True)
class Split:
    """Images uint8 (n, 3, H, W), memory-mapped and read-only, and their labels int64 (n,)."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Images:
    """A data set; ``mean`` and ``std`` are the training images' per channel, in 0..1; ``digest`` names the content.

    ``std`` is what images are divided by: 1 for a channel that is constant, and so has none.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    digest: str
    constant: tuple[str, ...] = ()
    """Channels that have one value in all training images."""


def root_folder(root: Path | None = None) -> Path:
    """Where data sets lie: ``root`` if given, else the environment's STUDY_DATA, else ``./data``."""
    return root if root is not None else Path(os.environ.get("STUDY_DATA") or "data")


def load(name: str, root: Path | None = None) -> Images:
    """Open a packed data set; no pixel is read yet.

    Raises:
        UserError: it is not there (the line names the command that gets it), or it is damaged.
    """
    folder = root_folder(root) / name
    manifest = read_manifest(folder)
    if manifest is None:
        advice = f"`study data get {name}` gets it"
        if name not in SOURCES:
            advice = f"`study data pack SOURCE --name {name}` packs a folder or zip of images"
        raise UserError(
            f"data.name = {name}: not in {root_folder(root)}; {advice}, or set STUDY_DATA to a folder that has it"
        )
    try:
        red, green, blue = manifest["std"]
        splits = {split: _open(folder, split, len(manifest["classes"])) for split in ("train", "test")}
        return Images(
            name=name,
            classes=tuple(manifest["classes"]),
            mean=tuple(manifest["mean"]),
            std=(red or 1.0, green or 1.0, blue or 1.0),
            digest=manifest["digest"],
            constant=tuple(colour for colour, value in zip(COLOURS, manifest["std"], strict=True) if not value),
            **splits,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, " ".join(str(error).split())) from None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a packed folder, or None where there is none.

    Raises:
        UserError: it cannot be read or is no manifest.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"{MANIFEST}: {error}") from None
    if not isinstance(manifest, dict):
        raise _damaged(folder, f"{MANIFEST} holds no mapping")
    return manifest


def _damaged(folder: Path, reason: str) -> UserError:
    return UserError(f"{folder}: damaged ({reason}); remove the folder and get or pack the images again")


def _open(folder: Path, split: str, classes: int) -> Split:
    images = np.load(folder / f"{split}.npy", mmap_mode="r")  # a short file raises ValueError
    labels = np.load(folder / f"{split}_labels.npy")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"{split}.npy is {images.dtype} {images.shape}, not uint8 (n, 3, H, W)")
    if labels.dtype != np.int64 or labels.shape != images.shape[:1]:
        raise ValueError(f"{split}_labels.npy is {labels.dtype} {labels.shape}, not int64 ({len(images)},)")
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"{split}_labels.npy goes beyond the {classes} classes")
    return Split(images, labels)


def subset(labels: np.ndarray, n: int | None) -> np.ndarray:
    """A fixed class-balanced draw, the same for every seed; a larger draw contains every smaller one.

    Args:
        labels: (N,) of the whole split.
        n: how many to draw; None takes all. A class that has too few gives all it has.

    Returns:
        int64 (n,), rising positions.

    Raises:
        UserError: ``n`` is more than there are.
    """
    if n is None:
        return np.arange(len(labels))
    if n > len(labels):
        allowed = f"at most {len(labels)}, all the training images, or null, which takes all of any data set"
        raise UserError(f"data.train_images = {n}: allowed is {allowed}")
    order = np.random.RandomState(0).permutation(len(labels))  # this stream is frozen in numpy, default_rng's is not
    rank = rank_in_class(labels[order])
    return np.sort(order[np.argsort(rank, kind="stable")[:n]]).astype(np.int64)


def rank_in_class(labels: np.ndarray) -> np.ndarray:
    """For each label, how many equal ones stand before it: (n,)."""
    by_class = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.empty(len(labels), np.int64)
    rank[by_class] = np.arange(len(labels)) - starts
    return rank


# --------------------------------------------------------------------------------------------------------- writing


@contextmanager
def staging(name: str, root: Path) -> Iterator[Path]:
    """An empty folder ``root/.name.tmp`` to build a data set in, held by one process at a time and removed after.

    A second process waits until the first is done. Check again then whether the data set is there.

    Raises:
        UserError: ``root`` cannot be written.
    """
    temporary = root / f".{name}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock"):
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process: the lock is ours now
            temporary.mkdir()
            try:
                yield temporary
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{error.filename or root}: {error.strerror}") from None  # read-only, full, gone


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which is gone after."""
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is(path, lock.fileno()):
                continue  # who held it has removed it, and another file may stand there now
            try:
                yield
            finally:
                path.unlink()
            return


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def store(
    temporary: Path,
    name: str,
    root: Path,
    classes: Iterable[str],
    train: Chunks,
    test: Chunks,
    advance: Advance,
) -> Images:
    """Write a data set in ``temporary`` (from `staging`) and rename it to ``root/name``.

    Writing what is already there is no fault: the new copy is dropped.

    Raises:
        UserError: a split has no image, a label is of no class, or ``root/name`` holds something else.
    """
    packed = temporary / "packed"
    packed.mkdir()
    names = list(classes)
    digest, counts = _write(packed, name, "train", train, len(names), advance)
    test_digest, _ = _write(packed, name, "test", test, len(names), advance)
    mean = counts @ np.arange(256) / counts.sum(1) / 255
    square = counts @ np.arange(256) ** 2 / counts.sum(1) / 255**2
    manifest = {
        "name": name,
        "classes": names,
        "mean": [round(float(value), 6) for value in mean],
        "std": [round(float(value), 6) for value in np.sqrt(np.maximum(square - mean**2, 0))],
        "digest": hashlib.sha256(json.dumps([names, digest, test_digest]).encode()).hexdigest(),
    }
    with (packed / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, ensure_ascii=False)
        _sync(file)
    folder = root / name
    if folder.exists():
        present = read_manifest(folder)
        if present is None or present.get("digest") != manifest["digest"]:
            raise UserError(f"{folder}: holds something else; remove it, or choose another name with --name")
    else:
        packed.rename(folder)
    return load(name, root)


def _write(
    folder: Path, name: str, split: str, chunks: Chunks, classes: int, advance: Advance
) -> tuple[str, np.ndarray]:
    """Stream a split into its two files; returns its digest and how often each value occurs, (3, 256)."""
    digest = hashlib.sha256()
    counts = np.zeros((3, 256), np.int64)
    written: list[np.ndarray] = []
    shape: tuple[int, ...] = ()
    with (folder / f"{split}.npy").open("wb") as file:
        for images, labels in chunks:
            if not written:
                shape = images.shape[1:]
                file.write(_header((0, *shape)))
            pixels = np.ascontiguousarray(images)
            file.write(pixels.data)
            digest.update(pixels.data)
            counts += [np.bincount(pixels[:, channel].ravel(), minlength=256) for channel in range(3)]
            written.append(np.asarray(labels, np.int64))
            advance(len(labels))
        if not written:
            raise UserError(f"data set {name}: the {split} split has no image")
        every = np.concatenate(written)
        if not 0 <= every.min() <= every.max() < classes:
            raise UserError(f"data set {name}: a {split} label is {every.max()}: allowed is 0 to {classes - 1}")
        file.seek(0)
        file.write(_header((len(every), *shape)))  # as long as the first: numpy leaves room for the axis to grow
        _sync(file)
    with (folder / f"{split}_labels.npy").open("wb") as file:
        np.save(file, every)
        _sync(file)
    digest.update(every.tobytes() + repr(shape).encode())
    return digest.hexdigest(), counts


def _header(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
