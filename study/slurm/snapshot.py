"""The code as it was when a sweep was submitted: what the jobs run, whatever is edited afterwards."""

import hashlib
import json
import secrets
import shutil
from pathlib import Path

import study
from study.run import files, provenance

PACKAGE = Path(study.__file__).resolve().parent


def take(runs_dir: Path) -> Path:
    """Copy the package to ``<runs_dir>/snapshots/<hash>/study``, with where it came from beside it.

    Returns:
        The folder to put on PYTHONPATH; an equal one that exists is used again.

    Raises:
        StorageError: it cannot be written.
    """
    sources = {path.relative_to(PACKAGE): path.read_bytes() for path in sorted(PACKAGE.rglob("*")) if _wanted(path)}
    origin = json.dumps(provenance.code(), indent=1, ensure_ascii=False)
    digest = hashlib.sha256(origin.encode())
    for name, content in sources.items():
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    folder = runs_dir.absolute() / "snapshots" / digest.hexdigest()[:12]
    if folder.exists():
        if _holds(folder / PACKAGE.name, sources):
            return folder
        shutil.rmtree(folder)  # a power cut took a part of it
    temp = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    with files.storage(folder):
        try:
            for name, content in sources.items():
                path = temp / PACKAGE.name / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            (temp / provenance.SNAPSHOT).write_text(origin, encoding="utf-8")
            temp.rename(folder)
        except FileExistsError:
            pass  # another submission was quicker
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return folder


def _holds(copy: Path, sources: dict[Path, bytes]) -> bool:
    return all((path := copy / name).is_file() and path.read_bytes() == content for name, content in sources.items())


def _wanted(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts
