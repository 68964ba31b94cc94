"""`study data get | pack | list`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

GET = """\
Get a public data set and pack it as <data>/NAME, where <data> is STUDY_DATA or ./data.
Nothing happens if it is there already. It is looked for in this order:

  1. <data> itself: torchvision's files (FashionMNIST/raw, cifar-10-batches-py, stl10_binary, ...)
  2. fashion-mnist: Debian's package dataset-fashion-mnist, installed or fetched by apt-get without root
  3. torchvision's download"""

PACK = """\
Pack an image folder or a zip of one as <data>/NAME, where <data> is STUDY_DATA or ./data.

SOURCE holds train/CLASS/* with test/CLASS/* (or val/CLASS/*), or just CLASS/*: then a fixed share
of each class becomes the test split. The splits' usual names are known, whatever their case; what looks
like splits and is not understood is refused, and so are links that lead out of SOURCE and a test split of
which more than 1 % stands in the training images too. Files with a picture's ending are taken, others
counted. Grey and palette images become RGB, alpha is composited on white,
16-bit grey is scaled to 8 bits, the EXIF orientation is applied."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `data` with its three actions."""
    raw = argparse.RawDescriptionHelpFormatter
    data = subparsers.add_parser(
        "data",
        help="get, pack and list images",
        description="Images are packed once into memory-mapped arrays; runs name them by data.name.",
        epilog="examples:\n  study data get fashion-mnist\n  study data pack photos.zip --size 64\n  study data list",
        formatter_class=raw,
    )
    actions = data.add_subparsers(title="actions", metavar="ACTION", required=True)

    get = actions.add_parser(
        "get",
        help="get a public data set",
        description=GET,
        epilog="examples:\n  study data get fashion-mnist\n  STUDY_DATA=/datasets study data get cifar10",
        formatter_class=raw,
    )
    get.add_argument("name", metavar="NAME", help="fashion-mnist, mnist, cifar10, cifar100, stl10 or svhn")
    get.set_defaults(func=_get)

    pack = actions.add_parser(
        "pack",
        help="pack an image folder or zip",
        description=PACK,
        epilog="examples:\n  study data pack cifar10-jpeg.zip\n  study data pack photos/ --name mine --size 64",
        formatter_class=raw,
    )
    pack.add_argument("source", metavar="SOURCE", type=Path, help="an image folder or a zip")
    pack.add_argument("--name", help="name of the data set (default: SOURCE's own, in small letters)")
    pack.add_argument(
        "--size", type=int, metavar="S", help="resize the shorter side to S and crop the centre (default: keep)"
    )
    pack.add_argument(
        "--test-share", type=float, default=0.1, metavar="X", help="share to test on, if SOURCE has no test images"
    )
    pack.add_argument("--skip-bad", action="store_true", help="list and leave out files that are no whole image")
    pack.set_defaults(func=_pack)

    show = actions.add_parser("list", help="data sets at hand, and those to be had", formatter_class=raw)
    show.add_argument("--json", action="store_true", help="for a program to read")
    show.set_defaults(func=_list)


def _get(args: argparse.Namespace) -> int:
    from study.data import sources

    with _progress(args.name) as advance:
        found = sources.get(args.name, advance=advance)
    print(f"{args.name}: {len(found.train.labels)} training and {len(found.test.labels)} test images")
    return 0


def _pack(args: argparse.Namespace) -> int:
    import re

    from study.data import images, pack, public
    from study.errors import UserError

    name = _name(args.source) if args.name is None else args.name
    for value, good, key, allowed in (
        (name, re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name), "--name", "small letters, digits, dot, dash, underscore"),
        (args.size, args.size is None or 8 <= args.size <= 1024, "--size", "8 to 1024"),
        (args.test_share, 0 < args.test_share < 1, "--test-share", "between 0 and 1"),
    ):
        if not good:
            raise UserError(f"{key} = {value}: allowed is {allowed}")
    if name in public.SOURCES:
        raise UserError(
            f"--name = {name}: is a public data set, which `study data get {name}` gets; allowed is another"
        )
    with _progress(name) as advance:
        packed, source = pack.pack(
            args.source,
            name,
            images.root_folder(),
            size=args.size,
            test_share=args.test_share,
            skip_bad=args.skip_bad,
            advance=advance,
        )
    for line in [f"skipped {line}" for line in source.bad] + [f"warning: {line}" for line in source.warnings]:
        print(line, file=sys.stderr)
    skipped = f", {len(source.bad)} files skipped" if source.bad else ""
    print(f"{name}: {len(packed.train.labels)} training and {len(packed.test.labels)} test images{skipped}")
    return 0


def _name(source: Path) -> str:
    """What a folder or zip is called, in the letters that a name may have."""
    import re
    import unicodedata

    plain = unicodedata.normalize(
        "NFKD", source.resolve().name.removesuffix(".zip").lower()
    )  # ü becomes u and two dots
    return re.sub(r"[^a-z0-9._-]+", "-", plain.encode("ascii", "ignore").decode()).strip("-._")


def _list(args: argparse.Namespace) -> int:
    from study.data import images, public

    root = images.root_folder()
    at_hand = {path.parent.name for path in root.glob(f"*/{images.MANIFEST}")}
    rows = []
    for name in sorted(at_hand | set(public.SOURCES)):
        row: dict[str, object] = {"name": name, "at_hand": name in at_hand}
        if name in at_hand:
            found = images.load(name, root)
            _, _, height, width = found.train.images.shape
            row |= {
                "train": len(found.train.labels),
                "test": len(found.test.labels),
                "size": f"{height}×{width}",
                "classes": len(found.classes),
                "digest": found.digest,
            }
        rows.append(row)
    if args.json:
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    from rich import box
    from rich.table import Table

    from study.console import stdout

    title = f"Images in {root} (`study data get NAME` for another)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "at hand", "train", "test", "size", "classes", "digest"):
        table.add_column(column, justify="right" if column in ("train", "test", "size", "classes") else "left")
    for row in rows:
        values = [row.get(key, "") for key in ("name", "at_hand", "train", "test", "size", "classes")]
        values[1] = "yes" if row["at_hand"] else "no"
        table.add_row(*map(str, values), str(row.get("digest", ""))[:12])
    stdout().print(table)
    return 0


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr that counts images; it goes away at the end."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal  # in a file the bar would leave an empty line
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(f"packing {name}, images", total=None)
        yield lambda images: bar.advance(task, images)
