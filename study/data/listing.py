"""What stands in a folder or a zip: every file that is not hidden, and nothing that lies elsewhere.

Hidden names and macOS's shadow copies are passed over. Whatever would make a listing that says less, or more, than what
stands there is refused: a folder that cannot be read, a link out of the tree or up it, a name that a zip holds twice.
"""

import os
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

from study.errors import UserError

ALLOWED = "allowed is an image folder or a zip of one"


@dataclass(frozen=True)
class Listing:
    """A folder or zip that was looked through.

    Attributes:
        path: as the user named it.
        files, folders: names within it, parted by ``/``, sorted.
        archive: the open zip; None for a folder.
    """

    path: Path
    files: tuple[str, ...]
    folders: tuple[str, ...]
    archive: zipfile.ZipFile | None = None

    def read(self, name: str) -> BytesIO | Path:
        """What Pillow opens.

        Raises:
            OSError: the file is gone, or is a pipe, a socket or a device, on which a reader would wait for ever.
        """
        if self.archive:
            return BytesIO(self.archive.read(name))
        if not stat.S_ISREG((self.path / name).stat().st_mode):
            raise OSError("is no regular file")
        return self.path / name

    def close(self) -> None:
        if self.archive:
            self.archive.close()


def shown(name: str) -> str:
    """A file's name as a line may hold it: bytes that are not UTF-8 and control characters are written as escapes."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def look(path: Path) -> Listing:
    """List a folder or zip.

    Raises:
        UserError: it is neither, is damaged or locked, or holds what no listing can be trusted for.
    """
    try:
        if path.is_dir():
            found = list(_walk(path))
            files, folders = ([name for name, is_folder in found if is_folder is kind] for kind in (False, True))
            return Listing(path, tuple(sorted(files)), tuple(sorted(folders)))
        if not path.is_file() or not zipfile.is_zipfile(path):
            raise UserError(f"SOURCE = {path}: {ALLOWED}")
    except OSError as error:
        name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(path)
        raise UserError(f"{shown(name)}: cannot be read: {error.strerror or error}") from None
    return _zip(path)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _walk(top: Path) -> Iterator[tuple[str, bool]]:
    """(Name, is it a folder) of all that stands in ``top``."""
    waiting: list[tuple[str, tuple[str, ...]]] = [("", (os.path.realpath(top),))]  # a folder, the real ones down to it
    while waiting:
        folder, above = waiting.pop()
        with os.scandir(top / folder) as entries:
            for entry in entries:
                if _hidden(entry.name):
                    continue
                name, is_folder = folder + entry.name, entry.is_dir()
                real = _followed(top, name, above) if entry.is_symlink() else f"{above[-1]}/{entry.name}"
                yield name, is_folder
                if is_folder:
                    waiting.append((f"{name}/", (*above, real)))


def _followed(top: Path, link: str, above: tuple[str, ...]) -> str:
    """Where a link leads."""
    real = os.path.realpath(top / link)
    if real in above or not Path(real).is_relative_to(above[0]):
        where = "up the tree" if real in above else "out of the folder"
        raise UserError(
            f"{top}: {shown(link)} is a link {where}, to {shown(real)}: allowed is a link to what lies in the folder"
            " (`cp -rL` makes a folder without links)"
        )
    return real


def _zip(path: Path) -> Listing:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise UserError(f"{path}: damaged zip: {' '.join(str(error).split())}; {ALLOWED}") from None
    try:
        entries = [entry for entry in archive.infolist() if not any(map(_hidden, _parts(entry.filename)))]
        _check(path, entries)
    except UserError:
        archive.close()
        raise
    files, folders = (sorted(e.filename for e in entries if e.is_dir() is kind) for kind in (False, True))
    return Listing(path, tuple(files), tuple(name.rstrip("/") for name in folders), archive)


def _parts(name: str) -> tuple[str, ...]:
    """Of a name in a zip; ``..`` is no hidden file's name."""
    return tuple(part for part in PurePosixPath(name).parts if part != "..")


def _check(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Meet a zip whose names do not say where its files belong."""
    times = Counter(entry.filename for entry in entries)
    for entry in entries:
        name, pure = entry.filename, PurePosixPath(entry.filename)
        if "\\" in name:
            fault = "parts its folders by backslashes, against the zip format: allowed is /; unzip it, pack the folder"
        elif pure.is_absolute() or ".." in pure.parts:
            fault = "leads out of the zip: allowed is a name below its root"
        elif stat.S_ISLNK(entry.external_attr >> 16):
            fault = "is a link: allowed is a file (`zip -r` without -y stores what links lead to)"
        elif entry.flag_bits & 1:
            fault = "is encrypted: allowed is a zip without a password"
        elif times[name] > 1:
            fault = f"stands in it {times[name]} times: allowed is once"
        else:
            continue
        raise UserError(f"{path}: {shown(name)} {fault}")
