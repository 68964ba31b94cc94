"""``study encoder export | probe``."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from study import strict
from study.arguments import Parser
from study.cli.overrides import read_overrides

if TYPE_CHECKING:
    from study.train.interop import Source

EPILOG = """\
examples:
  study encoder export 3f2a --to torchvision               → 3f2a9c….torchvision.pth
  study encoder export 3f2a --to detectron2 --out moco.pkl
  study encoder probe 3f2a9c….torchvision.pth              what it is worth, on the images of its run
  study encoder probe moco_v2_800ep_pretrain.pth.tar data.name=mine"""

EXPORT = """\
Write the backbone of a run's query encoder, as it is after the last step, for another program. The head and the key
encoder stay behind. How to load the file is printed, and inside it stands which run and config it comes from.

  torchvision   a state dict: any of torchvision's networks here, with either stem. Of `tiny`, resnet50w2 and w4, which
                torchvision lacks, the names are torchvision's, and `study encoder probe` reads the file
  timm          the same names: resnet18, resnet50, resnext50
  detectron2    the pickle of the authors' convert-pretrain-to-detectron2.py: any ResNet with the imagenet stem

RUN is a signature or the beginning of one, a run's folder, or a file: a checkpoint of a run that is not finished
(runs/3f2a…/checkpoints/….pt), or one of the authors' own."""

PROBE = """\
Weighted kNN and the fast linear probe (features encoded once) of any query encoder: top-1 on the test images, a share.

CHECKPOINT is a run (its signature or folder), a file of its checkpoints, an exported file, the authors' checkpoint
(module.encoder_q.…, moco v1 or v2), or weights with torchvision's names. A run's own config says which images, and how
to evaluate; it gives the very numbers of the run. For any other file --scale and key=value say it, and the paper's
values stand for what they do not. The architecture is that of the file; one that is not known here is refused, and the
first keys that do not fit are named. A file without a head has no knn_output.

  study encoder probe 3f2a --json
  study encoder probe 3f2a --scale cpu                     the run's encoder on the images of another scale
  study encoder probe resnet18-f37072fd.pth --scale quick

With --json the last line is {"checkpoint", "signature", "step", "final": {metric: value}}. The paper's own probe, which
trains on augmented views, is `study train CONFIG.yaml probe={}`."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``study encoder``."""
    raw = argparse.RawDescriptionHelpFormatter
    encoder = subparsers.add_parser(
        "encoder",
        help="take encoders to other programs, and evaluate any",
        description="Encoders: to torchvision, timm and detectron2, and from any checkpoint.",
        epilog=EPILOG,
        formatter_class=raw,
        allow_abbrev=False,
    )
    verbs = encoder.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)

    export = verbs.add_parser(
        "export", help="write a run's encoder", description=EXPORT, formatter_class=raw, allow_abbrev=False
    )
    export.add_argument("run", metavar="RUN", help="a signature, the beginning of one, a folder, or a file")
    export.add_argument("--to", required=True, choices=("torchvision", "detectron2", "timm"), help="who reads it")
    export.add_argument(
        "--out", type=Path, metavar="FILE", help="default: <signature>.<TO>.pth (detectron2: .pkl), in this folder"
    )
    export.add_argument("--force", action="store_true", help="replace FILE")
    export.set_defaults(func=export_command)

    probe = verbs.add_parser(
        "probe", help="evaluate an encoder", description=PROBE, formatter_class=raw, allow_abbrev=False
    )
    probe.add_argument("checkpoint", metavar="CHECKPOINT", help="a file, a run's folder, or its signature")
    probe.add_argument("overrides", nargs="*", metavar="key=value", help="config keys, such as data.name=mine")
    probe.add_argument("--scale", metavar="S", help="evaluate as at scale S: smoke, quick, cpu, gpu, imagenet")
    probe.add_argument("--device", default="auto", help="cpu, cuda, cuda:1; auto takes a GPU when there is one")
    probe.add_argument("--json", action="store_true", help="for a program to read")
    probe.rest = "overrides"
    probe.set_defaults(func=probe_command)

    for verb in (export, probe):
        verb.add_argument(
            "--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs live (default: runs)"
        )


def export_command(arguments: argparse.Namespace) -> int:
    """Write a file, and say how to load it."""
    from study.config.reading import resolve
    from study.errors import UserError
    from study.model import layouts
    from study.run import files
    from study.train import interop

    to, source = arguments.to, _source(arguments.run, arguments.runs_dir)
    config = resolve(source.tree(), str(source.path))
    cfg = config.encoder
    layouts.check(cfg, to)
    suffix = layouts.SUFFIXES[to]
    out = arguments.out or Path(f"{source.signature or source.path.name.split('.')[0]}.{to}{suffix}")
    if out.suffix != suffix:
        raise UserError(f"command line: --out = {out}: allowed is a name that ends in {suffix}, which {to} reads")
    if not out.parent.is_dir():
        raise UserError(f"command line: --out = {out}: no such folder; allowed is one that exists")
    if out.exists() and not arguments.force:
        raise UserError(f"command line: --out = {out}: exists; allowed is another name, or --force")
    backbone = interop.load(source, config).backbone.state_dict()
    files.write_atomic(out, layouts.render(backbone, to, interop.origin(source, cfg)))
    print(layouts.usage(cfg, to, str(out)), file=sys.stderr)
    print(out)
    return 0


def probe_command(arguments: argparse.Namespace) -> int:
    """Print what an encoder is worth."""
    from study.config.reading import merge, resolve
    from study.data import images
    from study.sweep.grid import scale_overlay
    from study.train import interop
    from study.train.device import configure_torch, pick_device
    from study.train.evaluate import evaluate

    device = pick_device(arguments.device)
    configure_torch(device, None)
    source = _source(arguments.checkpoint, arguments.runs_dir)
    overlay = scale_overlay(arguments.scale) if arguments.scale else None
    overrides = read_overrides(arguments.overrides)
    config = resolve(merge(source.tree(overlay), overrides), f"{source.path} + command line")
    encoder = interop.load(source, config).to(device)
    dataset = images.load(config.data.name)
    with _progress() as tick:
        linear = config.evaluation.linear_epochs > 0
        final = evaluate(encoder, dataset, config, device, linear=linear, progress=tick)
    if not source.has_head and config.encoder.arch != "pixels":  # which are their own output
        print(f"note: {source.path}: has no head, and so no knn_output", file=sys.stderr)
        del final["knn_output"]
    if arguments.json:
        found = {"checkpoint": str(source.path), "signature": source.signature, "step": source.step, "final": final}
        print(strict.dumps(found))
    else:
        values = "".join(f"  {name} {value:.4g}" for name, value in final.items())
        print(f"{source.path}: {config.encoder.arch} on {config.data.name}{values}")
    return 0


def _source(run: str, runs_dir: Path) -> "Source":
    """What ``run`` names: a file, a run's folder, or one run in ``runs_dir``; what is not taken of it is said.

    Raises:
        UserError: nothing is called so, more than one run is, or it holds no encoder.
    """
    from study.errors import UserError
    from study.train import interop

    path = Path(run)
    if not path.exists():
        found = [file.parent for file in runs_dir.glob("*/config.yaml") if file.parent.name.startswith(run)]
        if not found:
            raise UserError(
                f"command line: {run}: no such file, and no such run in {runs_dir}; `study runs list` shows those"
            )
        if len(found) > 1:
            names = ", ".join(sorted(folder.name for folder in found))
            raise UserError(f"command line: {run}: allowed is one of {names}")
        path = found[0]
    source = interop.read(path)
    if source.left_out:
        print(f"note: {source.path}: left out {', '.join(source.left_out)}", file=sys.stderr)
    return source


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """A bar on stderr that takes the share done; it goes away at the end."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("evaluate", total=1.0)
        yield lambda share: bar.update(task, completed=share)
