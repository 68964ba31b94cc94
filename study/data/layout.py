"""Which picture is of which split and class: ``train/CLASS/*`` with ``test/CLASS/*``, or just ``CLASS/*``.

What could be meant in two ways is refused: pictures in the wrong split or class would go unnoticed ever after.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path, PurePosixPath

import numpy as np

from study.data import images
from study.data.listing import Listing, look, shown
from study.errors import UserError

PICTURES = (
    *(".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
)
"""Endings of files that are taken, whatever their case."""

SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "val": ("val", "valid", "validation", "dev"),
}
"""Usual names of the splits, whatever their case: those that Hugging Face's image folders know."""

KINDS = {name: kind for kind, names in SPLITS.items() for name in names}

LIKE = KINDS | {"trn": "train", "tst": "test", "holdout": "test", "heldout": "test"}
"""Words that speak of a split."""

ALLOWED = "allowed is train/CLASS/* with test/CLASS/* (or val/CLASS/*), or CLASS/*"

Parts = Mapping[str, tuple[str, ...]]
"""A picture's name → the folders below those round all classes, and the file."""


@dataclass
class Source:
    """A folder or zip whose layout is understood: where each picture lies and its class."""

    path: Path
    classes: tuple[str, ...]
    files: dict[str, list[tuple[str, int]]]
    """Split → (name within the source, label), sorted by name."""
    listing: Listing
    is_drawn: bool
    """The source has no test split: this one is a draw."""
    bad: list[str] = field(default_factory=list)
    """What was skipped, with the reason."""
    warnings: list[str] = field(default_factory=list)
    """What can be packed but hardly is meant."""

    def read(self, name: str) -> BytesIO | Path:
        return self.listing.read(name)


def scan(path: Path, test_share: float = 0.1) -> Source:
    """Find splits and classes in a folder or zip.

    Args:
        path: the folder or zip.
        test_share: of each class that becomes the test split where the source has none; a fixed draw.

    Raises:
        UserError: no such source; no class folders; splits that are not understood; pictures outside the classes.
    """
    listing = look(path)
    try:
        return _understood(listing, test_share)
    except UserError:
        listing.close()
        raise


def _understood(listing: Listing, test_share: float) -> Source:
    path = listing.path
    every = {name: PurePosixPath(name).parts for name in listing.files if is_picture(name)}
    roof = _roof(every.values())
    loose = next((name for name, part in every.items() if len(part) < len(roof) + 2), None)
    if loose is not None:
        raise UserError(f"{path}: {shown(loose)} lies in no class folder; {ALLOWED}")
    parts = {name: part[len(roof) :] for name, part in every.items()}
    splits = _splits(path, parts)
    found = {kind: _below(path, parts, top) for kind, top in splits.items()} or {"train": _below(path, parts, None)}
    classes = tuple(sorted({label for _, label in found["train"]}))
    if not classes:
        raise UserError(f"{path}: no images in class folders; {ALLOWED}{_others(listing.files, ': of ')}")
    held_out = next((kind for kind in ("test", "val") if kind in found), None)
    test = found.get(held_out or "", [])
    _check_classes(path, classes, {label for _, label in test})
    files = {
        split: [(name, classes.index(label)) for name, label in entries]
        for split, entries in (("train", found["train"]), ("test", test))
    }
    if held_out is None:
        files = hold_out(files["train"], test_share)
    warnings = [f"class folder {shown(name)} holds no image" for name in _empty(listing, roof, splits, every.values())]
    if held_out == "test" and "val" in splits:
        warnings.append(
            f"{len(found['val'])} images of {splits['val']} are left out: {splits['test']} is the test split"
        )
    if len(classes) == 1:
        warnings.append(f"all images are of one class, {shown(classes[0])}: kNN and linear accuracy will mean nothing")
    if others := _others(listing.files):
        warnings.append(f"left out {others}")
    return Source(path, classes, files, listing, held_out is None, warnings=warnings)


def is_picture(name: str) -> bool:
    """By its ending."""
    return PurePosixPath(name).suffix.lower() in PICTURES


def _others(files: Iterable[str], before: str = "") -> str:
    """How many files are no pictures by their ending, and of which kinds; empty if there are none."""
    kinds = Counter(PurePosixPath(name).suffix.lower() or "no ending" for name in files if not is_picture(name))
    if not kinds:
        return ""
    count = sum(kinds.values())
    most = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{shown(kind)} {n}" for kind, n in most[:4]) + (", …" if len(most) > 4 else "")
    return f"{before}{count} file{'s'[: count > 1]} without a picture's ending ({listed})"


# ----------------------------------------------------------------------------------------------------------- splits


def _roof(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The folders that lie round all class folders: a zip of a folder has one."""
    every = list(parts)
    depth = 0
    while True:
        level = {part[depth] for part in every if len(part) > depth + 1}
        is_class = any(len(part) == depth + 2 for part in every)
        if len(level) != 1 or is_class or level & _named(level):
            return every[0][:depth] if every else ()
        depth += 1


def _named(names: Iterable[str]) -> set[str]:
    """Those that are a split's usual name."""
    return {name for name in names if name.casefold() in KINDS}


def _kinds_in(name: str) -> set[str]:
    """What a name says of splits in any of its words: ``train_set``, ``trainA``, ``ValImages``, ``seg_test2017``."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return {LIKE[word] for word in (word.lower().removesuffix("set") for word in words) if word in LIKE}


def _looks_split(names: Iterable[str]) -> bool:
    """Training beside held-out images. One such word alone may be a class: ``train_station``, ``test_tube``."""
    kinds = set().union(*map(_kinds_in, names))
    return "train" in kinds and len(kinds) > 1


def _splits(path: Path, parts: Parts) -> dict[str, str]:
    """Kind of split → its folder; empty where class folders stand alone.

    Raises:
        UserError: there are splits, or what looks like some, that are not understood.
    """
    tops = {part[0] for part in parts.values()}
    named = _named(tops)
    splits = {KINDS[name.casefold()]: name for name in sorted(named)}
    if not named and not _looks_split(tops):
        return {}
    if tops == named and "train" in splits and len(splits) == len(named):
        return splits
    listed = ", ".join(map(shown, sorted(named) + sorted(tops - named)[: max(1, 6 - len(named))]))
    raise UserError(
        f"{path}: {listed}: looks like splits, but not all are understood: allowed are one of"
        f" {'/, '.join(SPLITS['train'])}/ with one of {'/, '.join(SPLITS['test'])}/ and of"
        f" {'/, '.join(SPLITS['val'])}/, and nothing beside them, or class folders alone (a class of such a name:"
        " put all class folders into train/)"
    )


def _below(path: Path, parts: Parts, split: str | None) -> list[tuple[str, str]]:
    """(Name, class) of every picture of a split, or of a source without splits.

    Raises:
        UserError: a picture lies beside the class folders, or the splits lie in them.
    """
    found, middle = [], {}
    for name, part in parts.items():
        inner = part if split is None else part[1:] if part[0] == split else None
        if inner is None:
            continue
        if len(inner) < 2:
            raise UserError(f"{path}: {shown(name)} lies in no class folder; {ALLOWED}")
        middle.update(dict.fromkeys(inner[1:-1], name))
        found.append((name, inner[0]))
    if _looks_split(middle):
        example = shown(next(name for folder, name in middle.items() if _kinds_in(folder)))
        raise UserError(f"{path}: splits lie in the class folders, as of {example}; {ALLOWED}")
    return found


def _check_classes(path: Path, classes: tuple[str, ...], tested: set[str]) -> None:
    extra = sorted(tested - set(classes))
    if extra:
        raise UserError(f"{path}: class {shown(extra[0])} has test images but no training images")
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{path}: class {shown(name)}: its name is not UTF-8: allowed is a name that is") from None


def _empty(
    listing: Listing, roof: tuple[str, ...], splits: Mapping[str, str], pictures: Iterable[tuple[str, ...]]
) -> list[str]:
    """Class folders without a picture, sorted; they stand below one of the splits if there are any."""
    filled = {part[:end] for part in pictures for end in range(len(part))}
    found = []
    for name in listing.folders:
        part = PurePosixPath(name).parts
        inner = part[len(roof) :]
        is_class = len(inner) == 2 and inner[0] in splits.values() if splits else len(inner) == 1
        if part[: len(roof)] == roof and is_class and part not in filled:
            found.append(name)
    return found


def hold_out(entries: list[tuple[str, int]], share: float) -> dict[str, list[tuple[str, int]]]:
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
