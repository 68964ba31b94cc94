"""Pack an image folder or a zip: ``train/CLASS/*`` with ``test|val/CLASS/*``, or just ``CLASS/*``.

Every image becomes three channels of eight bits. Grey is copied to three channels; a palette is looked up; alpha is
composited on white; 16-bit grey is scaled by 255/65535 (16-bit colour: Pillow keeps the high byte); the EXIF
orientation is applied. Nothing is ever extracted to disk.
"""

import os
import zipfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, ImageOps

from study.data import images
from study.data.images import Advance, Images
from study.errors import UserError

CHUNK = 256
"""Files that one task decodes."""


@dataclass
class Source:
    """A folder or zip that was looked through: where each image lies and its class."""

    path: Path
    classes: tuple[str, ...]
    files: dict[str, list[tuple[str, int]]]
    """Split → (name within the source, label), sorted by name."""
    archive: zipfile.ZipFile | None
    bad: list[str] = field(default_factory=list)
    """What was skipped, with the reason."""
    warnings: list[str] = field(default_factory=list)
    """What can be packed but hardly is meant."""

    def read(self, name: str) -> BytesIO | Path:
        return BytesIO(self.archive.read(name)) if self.archive else self.path / name


def pack(
    path: Path,
    name: str,
    root: Path,
    *,
    size: int | None,
    test_share: float,
    skip_bad: bool,
    advance: Advance,
) -> tuple[Images, Source]:
    """Pack ``path`` as ``root/name``.

    Args:
        path: an image folder or a zip of one.
        name: what the data set will be called.
        root: where packed data sets lie.
        size: shorter side after resizing (bilinear, antialiased), then a centre crop to a square; None keeps the
            images as they are, which then must be of one size.
        test_share: share of each class that becomes the test split where the source has none; a fixed draw.
        skip_bad: leave out files that are no whole image instead of stopping at the first.
        advance: told how many images more are done.

    Returns:
        The data set, and what it was packed from, with the files that were skipped and warnings.

    Raises:
        UserError: no such source, no such layout, a bad file, several sizes without ``size``.
    """
    source = scan(path, test_share)
    try:
        with images.staging(name, root) as temporary:
            train, test = (_decoded(source, split, size, skip_bad) for split in ("train", "test"))
            return images.store(temporary, name, root, source.classes, train, test, advance), source
    finally:
        if source.archive:
            source.archive.close()


# ---------------------------------------------------------------------------------------------------------- layout


def scan(path: Path, test_share: float = 0.1) -> Source:
    """Find splits and classes in a folder or zip; hidden files, ``__MACOSX`` and paths that leave it are ignored.

    Raises:
        UserError: it is neither, or has no class folders.
    """
    archive = None
    if path.is_dir():
        walk = list(os.walk(path, followlinks=True))  # class folders are often links
        folders = [Path(folder).relative_to(path).as_posix() for folder, _, _ in walk]
        names = [(Path(folder) / file).relative_to(path).as_posix() for folder, _, files in walk for file in files]
    elif zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
        folders = [entry.filename for entry in archive.infolist() if entry.is_dir()]
    else:
        raise UserError(f"SOURCE = {path}: allowed is an image folder or a zip of one")
    parts = {name: PurePosixPath(name).parts for name in sorted(names) if _plain(name)}
    depth = _depth(list(parts.values()))
    tops = {part[depth] for part in parts.values() if len(part) > depth + 1}
    if "train" in tops:
        held_out = next((name for name in ("test", "val") if name in tops), None)
        found = {"train": _below(path, parts, depth, "train")}
        if held_out:
            found["test"] = _below(path, parts, depth, held_out)
    else:
        found = {"train": _below(path, parts, depth, None)}
    classes = tuple(sorted({label for _, label in found["train"]}))
    if not classes:
        raise UserError(f"{path}: no images in class folders; allowed is train/CLASS/* with test/CLASS/*, or CLASS/*")
    extra = sorted({label for _, label in found.get("test", [])} - set(classes))
    if extra:
        raise UserError(f"{path}: class {extra[0]} has test images but no training images")
    files = {split: [(name, classes.index(label)) for name, label in entries] for split, entries in found.items()}
    if "test" not in files:
        files = _hold_out(files["train"], test_share)
    splits = {"train", "test", "val"} if "train" in tops else set()
    warnings = [f"class folder {name} holds no image" for name in _empty(folders, parts, depth, splits)]
    if len(classes) == 1:
        warnings.append(f"all images are of one class, {classes[0]}: kNN and linear accuracy will mean nothing")
    return Source(path, classes, files, archive, warnings=warnings)


def _empty(folders: list[str], parts: dict[str, tuple[str, ...]], depth: int, splits: set[str]) -> list[str]:
    """Class folders without a file, sorted; they stand below one of the splits if there are any."""
    filled = {part[:end] for part in parts.values() for end in range(len(part))}
    roof = next(part for part in parts.values() if len(part) > depth + 1)[:depth]
    found = []
    for name in sorted(filter(_plain, folders)):
        part = PurePosixPath(name).parts
        inner = part[depth:]
        if part[:depth] == roof and part not in filled and len(inner) == (2 if splits else 1):
            found += [name.rstrip("/")] if not splits or inner[0] in splits else []
    return found


def _plain(name: str) -> bool:
    """Neither hidden nor macOS's shadow copies nor outside the source."""
    return not (
        name.startswith("/") or any(part.startswith(".") or part == "__MACOSX" for part in PurePosixPath(name).parts)
    )


def _depth(parts: list[tuple[str, ...]]) -> int:
    """How many folders lie round all class folders: a zip of a folder has one, perhaps with a readme in it."""
    depth = 0
    while True:
        level = {part[depth] for part in parts if len(part) > depth + 1}
        is_class = any(len(part) == depth + 2 and _is_picture(part[-1]) for part in parts)
        is_class |= all(len(part) <= depth + 2 for part in parts)  # whatever lies in the innermost folder
        if len(level) != 1 or is_class or level == {"train"}:
            return depth
        depth += 1


def _is_picture(name: str) -> bool:
    """By its ending."""
    return PurePosixPath(name).suffix.lower() in Image.registered_extensions()


def _below(path: Path, parts: dict[str, tuple[str, ...]], depth: int, split: str | None) -> list[tuple[str, str]]:
    """(name, class) of every file in a class folder; a picture outside one is a fault, another file is not."""
    found = []
    for name, part in parts.items():
        inner = part[depth:]
        if split is not None:
            if inner[:1] != (split,):
                continue
            inner = inner[1:]
        if len(inner) > 1:
            found.append((name, inner[0]))
        elif inner and _is_picture(name):
            raise UserError(f"{path}: {name} lies in no class folder; allowed is train/CLASS/* or CLASS/*")
    return found


def _hold_out(entries: list[tuple[str, int]], share: float) -> dict[str, list[tuple[str, int]]]:
    """Split each class by a fixed draw: ``share`` of it becomes the test split, at least one image but never all."""
    labels = np.array([label for _, label in entries])
    order = np.random.RandomState(0).permutation(len(labels))
    rank = np.empty(len(labels), np.int64)
    rank[order] = images.rank_in_class(labels[order])
    counts = np.bincount(labels)
    held_out = rank < np.minimum(np.maximum(1, np.rint(share * counts)), counts - 1)[labels]
    return {
        "train": [entry for entry, out in zip(entries, held_out, strict=True) if not out],
        "test": [entry for entry, out in zip(entries, held_out, strict=True) if out],
    }


# -------------------------------------------------------------------------------------------------------- decoding


def _decoded(source: Source, split: str, size: int | None, skip_bad: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Decode a split in threads (Pillow frees the interpreter while it decodes), in order."""
    entries = source.files[split]
    chunks = [entries[start : start + CHUNK] for start in range(0, len(entries), CHUNK)]
    workers = min(len(os.sched_getaffinity(0)), 16)
    shape: tuple[int, ...] = ()
    waiting: deque[Future[list[np.ndarray | str]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for position, chunk in enumerate(chunks):
                while len(waiting) < 2 * workers and position + len(waiting) < len(chunks):
                    waiting.append(pool.submit(_decode_all, source, chunks[position + len(waiting)], size))
                whole, labels = [], []
                for (name, label), result in zip(chunk, waiting.popleft().result(), strict=True):
                    if isinstance(result, str):
                        if not skip_bad:
                            raise UserError(f"{source.path}: {name}: {result}; --skip-bad leaves such files out")
                        source.bad.append(f"{name}: {result}")
                        continue
                    shape = shape or result.shape
                    if result.shape != shape:
                        raise UserError(
                            f"{source.path}: images of several sizes ({shape[1]}×{shape[2]}, and {name} is"
                            f" {result.shape[1]}×{result.shape[2]}): --size S resizes and crops them to S×S"
                        )
                    whole.append(result)
                    labels.append(label)
                if whole:
                    yield np.stack(whole), np.array(labels)
        finally:
            for future in waiting:
                future.cancel()


def _decode_all(source: Source, chunk: list[tuple[str, int]], size: int | None) -> list[np.ndarray | str]:
    """Each file's pixels, or what is wrong with it."""
    results: list[np.ndarray | str] = []
    for name, _ in chunk:
        try:
            with Image.open(source.read(name)) as image:
                results.append(decode(image, size))
        except Exception as error:  # Pillow and zlib raise nearly anything on damaged bytes
            results.append(" ".join(str(error).split()) or type(error).__name__)
    return results


def decode(image: Image.Image, size: int | None = None) -> np.ndarray:
    """One opened picture as uint8 (3, H, W); ``size`` resizes its shorter side and crops the centre.

    Raises:
        ValueError, OSError: it is truncated or of a kind that has no eight-bit meaning (32-bit values).
    """
    upright = ImageOps.exif_transpose(image)
    rgb = _rgb(upright)
    if size is not None and rgb.size != (size, size):
        scale = size / min(rgb.size)
        width, height = (max(size, round(side * scale)) for side in rgb.size)
        left, top = (width - size) // 2, (height - size) // 2
        rgb = rgb.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
    return np.asarray(rgb).transpose(2, 0, 1)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > 65535:
            raise ValueError(f"values of mode {image.mode} beyond 16 bits")
        image = Image.fromarray(((values.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("RGB")
