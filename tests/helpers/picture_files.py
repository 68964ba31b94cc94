"""Pictures, and folders and zips of them."""

import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from study.data import images, pack
from study.errors import UserError


def picture(value: int = 100, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, value if mode in ("L", "P", "I;16", "I") else (value,) * len(mode))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def layout(**extra: bytes) -> dict[str, bytes]:
    """Two classes, three training images and one test image each; the value tells them apart."""
    files = {f"train/cat/{i}.png": encoded(picture(i)) for i in range(3)}
    files |= {f"train/dog/{i}.png": encoded(picture(10 + i)) for i in range(3)}
    files |= {"test/cat/0.png": encoded(picture(3)), "test/dog/0.png": encoded(picture(13))}
    return files | extra


def run_pack(source: Path, name: str = "made", **options: object) -> images.Images:
    chosen = {"size": None, "test_share": 0.1, "skip_bad": False, "advance": lambda _: None} | options
    return pack.pack(source, name, images.root_folder(), **chosen)[0]  # type: ignore[arg-type]


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)
