"""Files that are whole or absent: written beside their place, synced, renamed."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from study.errors import UserError

TEMPORARY = ".*.tmp"
"""Names of files that were being written; what matches was left by a killed process."""


class StorageError(UserError):
    """The disk is full, read-only, or failing: one line, like bad input, but a fault of the moment, so exit code 1."""

    exit_code = 1


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` on ``path`` into one line that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}; "
            "what was already written is safe, and the same command continues once this is mended"
        ) from error


def temporary(path: Path) -> Path:
    """A name in the same folder that no other process or thread uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def write_atomic(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Replace ``path`` as a whole: a reader, or a power cut, finds the old content or the new, never a part.

    Args:
        path: the file; its folder exists.
        content: all of it; text is written as UTF-8.
        durable: sync the file and its folder. Without it (a heartbeat) a power cut may bring the old content back.

    Raises:
        StorageError: it could not be written; the old file stands.
    """
    temp = temporary(path)
    with storage(path):
        try:
            with temp.open("xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temp.replace(path)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half written; only the one writer of a folder may call this."""
    with storage(folder):
        for path in folder.glob(TEMPORARY):
            path.unlink(missing_ok=True)
