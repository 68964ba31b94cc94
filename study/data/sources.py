"""Public data sets: found on this machine or downloaded, then packed (see images.py)."""

import gzip
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from study.data import images
from study.data.images import Advance, Images, root_folder
from study.data.public import SOURCES, Source
from study.errors import UserError

Arrays = tuple[np.ndarray, np.ndarray]
"""Images uint8 (n, 3, H, W) and labels (n,)."""

DEBIAN = Path("/usr/share/datasets")
"""Where Debian's packages of data sets install to."""


class MissingError(Exception):
    """A place does not have the data set; says why in one line."""


def get(name: str, root: Path | None = None, advance: Advance = lambda _: None) -> Images:
    """Make a public data set available as ``root/name``; at once if it is there already.

    Looked for in this order: torchvision's or the idx files under the root (STUDY_DATA or ./data), a Debian package
    (installed, or downloaded and unpacked without root), torchvision's own download.

    Args:
        name: one of `public.SOURCES`.
        root: see `images.root_folder`.
        advance: told how many images more are packed.

    Raises:
        UserError: an unknown name, or nowhere to be had: one line that names what was tried.
    """
    root = root_folder(root)
    if images.read_manifest(root / name) is not None:
        return images.load(name, root)
    if name not in SOURCES:
        raise UserError(
            f"data set {name}: allowed is {', '.join(SOURCES)}; `study data pack SOURCE --name {name}` for your own"
        )
    source = SOURCES[name]
    with images.staging(name, root) as temporary:
        if images.read_manifest(root / name) is not None:  # another process was first
            return images.load(name, root)
        classes, train, test = _find(name, source, root, temporary)
        return images.store(temporary, name, root, classes, _pieces(*train), _pieces(*test), advance)


def _pieces(pixels: np.ndarray, labels: np.ndarray, size: int = 4096) -> Iterator[Arrays]:
    for start in range(0, len(labels), size):
        yield pixels[start : start + size], labels[start : start + size]


def _find(name: str, source: Source, root: Path, temporary: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """Try each place in turn; returns classes, training and test arrays."""
    places: dict[str, Callable[[], tuple[tuple[str, ...], Arrays, Arrays]]] = {
        str(root): lambda: _local(name, source, root, temporary)
    }
    if source.debian:
        package = source.debian
        places["Debian's package"] = lambda: _debian(name, source, package, temporary)
    places["torchvision's download"] = lambda: _torchvision(source, temporary / "download", download=True)
    tried = []
    for place, read in places.items():
        try:
            return read()
        except MissingError as error:
            tried.append(f"{place}: {error}")
    raise UserError(
        f"data set {name}: {'; '.join(tried)}; or set STUDY_DATA to a folder that has {' or '.join(source.present)}"
    )


def _local(name: str, source: Source, root: Path, temporary: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """Files under the root in torchvision's layout, or idx files in a root that is called like the data set."""
    if source.is_idx:
        folders = [root / source.present[0], *([root] if root.resolve().name == name else [])]
        for folder in folders:
            if any(folder.glob("train-images*")):
                return _idx(source, folder)
    for present in source.present:
        if (root / present).exists():
            if not present.endswith(".tar.gz"):
                return _torchvision(source, root, download=False)
            # torchvision unpacks beside the archive after checking its md5: let it do so in our own folder
            (temporary / present).symlink_to((root / present).resolve())
            return _torchvision(source, temporary, download=True)
    raise MissingError(f"no {' or '.join(source.present)}")


def _debian(name: str, source: Source, package: str, temporary: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """Debian's package, installed or fetched; needs neither root nor the machine's package lists."""
    installed = DEBIAN / name
    if installed.is_dir():
        return _idx(source, installed)
    folder = temporary / "apt"
    options = [f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache"]
    if os.geteuid() == 0:
        options.append("APT::Sandbox::User=root")  # else apt warns that its own user cannot write here
    apt = ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]
    for sub in ("lists/partial", "cache/archives/partial"):
        (folder / sub).mkdir(parents=True)
    _command([*apt, "update"], folder)
    _command([*apt, "download", package], folder)
    _command(["dpkg-deb", "-x", *(path.name for path in folder.glob("*.deb")), "unpacked"], folder)
    return _idx(source, folder / "unpacked" / DEBIAN.relative_to("/") / name)


def _command(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise MissingError(f"no {command[0]} on this machine")
    try:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, timeout=600
        )
    except subprocess.TimeoutExpired:
        raise MissingError(f"{command[0]} gave no answer in ten minutes") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise MissingError(f"{command[0]}: {lines[-1] if lines else f'exit code {done.returncode}'}")


# --------------------------------------------------------------------------------------------------------- formats


def _idx(source: Source, folder: Path) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """The four files of MNIST and its kin, gzipped or not; grey is copied to three channels."""
    import torchvision

    def split(prefix: str) -> Arrays:
        grey = read_idx(folder / f"{prefix}-images-idx3-ubyte", 3)  # (n, H, W)
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte", 1)  # (n,)
        if len(grey) != len(labels):
            raise UserError(f"{folder}: {prefix}: {len(grey)} images but {len(labels)} labels")
        return np.broadcast_to(grey[:, None], (len(grey), 3, *grey.shape[1:])), labels

    classes = getattr(torchvision.datasets, source.torchvision).classes
    return tuple(classes), split("train"), split("t10k")


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An idx file of bytes, or its gzipped form ``<path>.gz``.

    Raises:
        UserError: it is not there, truncated, or something else.
    """
    zipped = path.with_name(path.name + ".gz")
    path = zipped if zipped.exists() else path
    try:
        content = gzip.decompress(path.read_bytes()) if path == zipped else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]):
        raise UserError(f"{path}: not an idx file of bytes in {dimensions} dimensions")
    shape = tuple(int(length) for length in np.frombuffer(content[4:header], ">u4"))
    if len(shape) != dimensions or len(content) != header + np.prod(shape):
        raise UserError(f"{path}: truncated: the header says {shape}, {len(content)} bytes are there")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _torchvision(source: Source, folder: Path, *, download: bool) -> tuple[tuple[str, ...], Arrays, Arrays]:
    """Read with torchvision's class, which checks the md5 of what it unpickles; download first if asked."""
    import torchvision

    kind = getattr(torchvision.datasets, source.torchvision)
    try:
        folder.mkdir(exist_ok=True)
        train, test = (kind(folder, download=download, **split) for split in source.splits)
    except Exception as error:  # urllib, tarfile, md5, scipy: each has its own kind
        raise MissingError(" ".join(str(error).split()) or type(error).__name__) from None
    return (source.classes or tuple(train.classes), *(_planar(split) for split in (train, test)))  # type: ignore[return-value]


def _planar(dataset: object) -> Arrays:
    """torchvision keeps (n, H, W), (n, H, W, 3) or (n, 3, H, W), and labels under either of two names."""
    data = dataset.data  # type: ignore[attr-defined]
    pixels = np.asarray(data)
    labels = np.asarray(dataset.targets if hasattr(dataset, "targets") else dataset.labels)  # type: ignore[attr-defined]
    if pixels.ndim == 3:
        return np.broadcast_to(pixels[:, None], (len(pixels), 3, *pixels.shape[1:])), labels
    return pixels if pixels.shape[1] == 3 else pixels.transpose(0, 3, 1, 2), labels
