"""Disks that fill up or fail, damaged files and a clock set back, each in the middle of a real run."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accidents import LONG, MECHANISMS, Trainee
from run_fixture import MEGABYTE, fill, mount, small_disk

from study.run import checkpoint, journal

Troubled = Iterator[tuple[Trainee, str]]
"""A run that was mended and finished, and what was said of its trouble."""


def disk(folder: Path, overrides: Sequence[str] = (*MECHANISMS["queue"], *LONG)) -> dict[str, Any]:
    """After each trouble the same command ends the run with the bits of an unbroken one."""
    whole = Trainee(folder / "unbroken", tuple(overrides))
    whole.finish()
    found: dict[str, Any] = {}
    for trouble in (full_disk, failing_disk, torn_journal, damaged_checkpoint, clock_set_back):
        with trouble(folder / trouble.__name__, whole.overrides) as (broken, said):
            lines = journal.tail(broken.folder / "metrics.jsonl")[0]
            times = [reading.time_ms for reading in lines]
            wrong = {
                "not bit-equal": broken.differs(whole),
                "values doubled": len(lines) - len(journal.read(broken.folder / "metrics.jsonl")),
                "times run backwards": times != sorted(times),
            }
        found[trouble.__name__.replace("_", " ")] = {"said": said, **wrong, "passed": not any(wrong.values())}
    return {**found, "passed": all(figures["passed"] for figures in found.values())}


@contextmanager
def full_disk(folder: Path, overrides: tuple[str, ...]) -> Troubled:
    folder.mkdir()
    with small_disk(folder / "disk", 8 * MEGABYTE) as room:
        broken = Trainee(room / "runs", overrides)
        process = in_the_middle(broken)
        filler = fill(room)
        said = one_line(process, {"No space left on device"})
        filler.unlink()
        broken.finish()
        yield broken, said


@contextmanager
def failing_disk(folder: Path, overrides: tuple[str, ...]) -> Troubled:
    """ext4 that aborts turns read-only under open files, and forgets what was not synced, as in a power cut."""
    folder.mkdir()
    image, room = folder / "image", folder / "disk"
    room.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MEGABYTE)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mount("-o", "loop", str(image), str(room))
    try:
        broken = Trainee(room / "runs", overrides)
        process = in_the_middle(broken)
        mount("-o", "remount,abort", str(room))
        said = one_line(process, {"Read-only file system", "Input/output error"})
        subprocess.run(["umount", str(room)], check=True)
        mount("-o", "loop", str(image), str(room))
        broken.finish()
        yield broken, said
    finally:
        subprocess.run(["umount", "-l", str(room)], check=True)


@contextmanager
def torn_journal(folder: Path, overrides: tuple[str, ...]) -> Troubled:
    broken = Trainee(folder, overrides)
    killed_in_the_middle(broken)
    with (broken.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":33,"time_ms":17900')
    broken.finish()
    yield broken, ""


@contextmanager
def damaged_checkpoint(folder: Path, overrides: tuple[str, ...]) -> Troubled:
    broken = Trainee(folder, overrides)
    killed_in_the_middle(broken)
    saved = sorted((broken.folder / "checkpoints").glob("*.pt"))
    assert len(saved) >= checkpoint.KEPT
    content = bytearray(saved[-1].read_bytes())
    content[len(content) // 2] ^= 1
    saved[-1].write_bytes(content)
    yield broken, next(line for line in broken.finish().splitlines() if "damaged" in line)


@contextmanager
def clock_set_back(folder: Path, overrides: tuple[str, ...]) -> Troubled:
    broken = Trainee(folder, overrides)
    killed_in_the_middle(broken)
    program = "import sys, time; real = time.time; time.time = lambda: real() - 3600\n"
    broken.finish((sys.executable, "-c", program + "from study.cli.main import main; sys.exit(main())"))
    yield broken, ""


def in_the_middle(broken: Trainee) -> "subprocess.Popen[str]":
    """An attempt that has done 32 steps."""
    process = broken.start()
    assert broken.reached(process, 32), process.communicate()[1]
    return process


def killed_in_the_middle(broken: Trainee) -> None:
    process = in_the_middle(broken)
    process.kill()
    process.communicate()


def one_line(process: "subprocess.Popen[str]", reasons: set[str]) -> str:
    """It must end by itself, with exit code 1 and one line."""
    said = process.communicate(timeout=120)[1]
    lines = [line for line in said.splitlines() if not line.startswith(("override", "train step"))]
    assert process.returncode == 1 and len(lines) == 1 and any(reason in lines[0] for reason in reasons), said
    return lines[0]
