"""Pack an image folder or a zip (layout.py says which) into the arrays of images.py.

Every image becomes three channels of eight bits. Grey is copied to three channels; a palette is looked up; alpha is
composited on white; 16-bit grey is scaled by 255/65535 (16-bit colour: Pillow keeps the high byte); the EXIF
orientation is applied. Nothing is ever extracted to disk.
"""

import hashlib
import os
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from study.data import images
from study.data.images import Advance, Images
from study.data.layout import Source, scan
from study.data.listing import shown
from study.errors import UserError

CHUNK = 256
"""Files that one task decodes."""

OVERLAP = 0.01
"""Share of test images that may stand in the training images too. Published splits have a few, and at one in a hundred
they cannot move an accuracy by more than a point; a source with more is a mistake, and its accuracies would be too."""


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
        UserError: no such source, no such layout, a bad file, several sizes without ``size``, more test images that
            are training images as well than ``OVERLAP``.
    """
    source = scan(path, test_share)
    try:
        with images.staging(name, root) as temporary, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of odd metadata and large pictures
            decoder = _Decoder(source, size, skip_bad)
            packed = images.store(temporary, name, root, source.classes, decoder.training(), decoder.testing(), advance)
    finally:
        source.listing.close()
    source.warnings += [
        f"every pixel has the same {colour}: it is centred, and not scaled" for colour in packed.constant
    ]
    return packed, source


# -------------------------------------------------------------------------------------------------------- decoding


class _Decoder:
    """The pictures of a source as arrays; remembers the training images, to know them again among the test images."""

    def __init__(self, source: Source, size: int | None, skip_bad: bool) -> None:
        self.source, self.size, self.skip_bad = source, size, skip_bad
        self.shape: tuple[int, ...] = ()  # of the first image
        self.seen: dict[bytes, int] = {}  # a training image's digest → its place among source.files["train"]

    def training(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for numbers, pixels, labels in self._decoded("train"):
            for number, image in zip(numbers, pixels, strict=True):
                self.seen.setdefault(_digest(image), number)
            yield pixels, labels

    def testing(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The test images. One that is a training image too, pixel by pixel, is left out where the split is our own
        draw, and kept where it is the source's.

        Raises:
            UserError: the source's split has more of them than ``OVERLAP``.
        """
        doubles, count, example = 0, 0, ""
        for numbers, pixels, labels in self._decoded("test"):
            twins = [self.seen.get(_digest(image)) for image in pixels]
            for number, twin in zip(numbers, twins, strict=True):
                if twin is not None:
                    test, train = (self._name(split, place) for split, place in (("test", number), ("train", twin)))
                    example = example or f"{test} and {train}, pixel by pixel"
            count, doubles = count + len(twins), doubles + sum(twin is not None for twin in twins)
            kept = np.array([twin is None or not self.source.is_drawn for twin in twins])
            if kept.any():
                yield pixels[kept], labels[kept]
        if self.source.is_drawn and doubles:
            self.source.warnings.append(
                f"{doubles} of {count} drawn test images are left out: in train too ({example})"
            )
        elif doubles > OVERLAP * count:
            raise UserError(
                f"{self.source.path}: {doubles} of {count} test images stand in train too ({example}): allowed is at"
                f" most {OVERLAP:.0%}"
            )
        elif doubles:
            self.source.warnings.append(f"{doubles} of {count} test images stand in train too ({example})")

    def _name(self, split: str, number: int) -> str:
        return shown(self.source.files[split][number][0])

    def _decoded(self, split: str) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
        """Decode a split in threads (Pillow frees the interpreter while it decodes), in order.

        Yields:
            Places among the split's files, images (n, 3, H, W), labels (n,).
        """
        entries = self.source.files[split]
        chunks = [entries[start : start + CHUNK] for start in range(0, len(entries), CHUNK)]
        workers = min(len(os.sched_getaffinity(0)), 16)
        waiting: deque[Future[list[np.ndarray | str]]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            try:
                for position, chunk in enumerate(chunks):
                    while len(waiting) < 2 * workers and position + len(waiting) < len(chunks):
                        ahead = chunks[position + len(waiting)]
                        waiting.append(pool.submit(_decode_all, self.source, ahead, self.size))
                    results = waiting.popleft().result()
                    whole = [place for place, result in enumerate(results) if self._is_whole(*chunk[place], result)]
                    if whole:
                        pixels, labels = (
                            np.array([row[place] for place in whole]) for row in (results, _labels(chunk))
                        )
                        yield [position * CHUNK + place for place in whole], pixels, labels
            finally:
                for future in waiting:
                    future.cancel()

    def _is_whole(self, name: str, _: int, result: np.ndarray | str) -> bool:
        """Whether it was decoded, and to the size of all; else it stops here, or is skipped."""
        if isinstance(result, str):
            if not self.skip_bad:
                raise UserError(f"{self.source.path}: {shown(name)}: {result}; --skip-bad leaves such files out")
            self.source.bad.append(f"{shown(name)}: {result}")
            return False
        self.shape = self.shape or result.shape
        if result.shape != self.shape:
            raise UserError(
                f"{self.source.path}: images of several sizes ({self.shape[1]}×{self.shape[2]}, and {shown(name)} is"
                f" {result.shape[1]}×{result.shape[2]}): --size S resizes and crops them to S×S"
            )
        return True


def _labels(chunk: list[tuple[str, int]]) -> list[int]:
    return [label for _, label in chunk]


def _digest(image: np.ndarray) -> bytes:
    """Names the pixels (shape and all, since all images have one)."""
    return hashlib.blake2b(image.tobytes(), digest_size=16).digest()


def _decode_all(source: Source, chunk: list[tuple[str, int]], size: int | None) -> list[np.ndarray | str]:
    """Each file's pixels, or what is wrong with it."""
    results: list[np.ndarray | str] = []
    for name, _ in chunk:
        try:
            with Image.open(source.read(name)) as image:
                results.append(decode(image, size))
        except Exception as error:  # Pillow and zlib raise nearly anything on damaged bytes
            results.append(_reason(error))
    return results


def _reason(error: Exception) -> str:
    """In one line, without what only this program knows: Pillow names the buffer that it read."""
    if isinstance(error, UnidentifiedImageError):
        return "is no picture that Pillow can read"
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shown(" ".join(words.split()))


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
