"""``study train``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study import strict
from study.cli.overrides import read_overrides

if TYPE_CHECKING:
    from study.arguments import Parser

EPILOG = """\
examples:
  study train --scale quick m=0.99                    the quick scale's config with another momentum
  study train my.yaml optimiser.epochs=20 seed=1      a file of your own, and two overrides
  study train runs/3f2a…/config.yaml                  a run that was interrupted: it continues from its checkpoint

The config is the scale's overlay (sweeps/scales/S.yaml), then the file, then the overrides; what none of them sets is
the paper's value. `study train --list` shows every key. A run is named by the hash of its whole config and lives in
RUNS_DIR/<signature>; starting it again continues it, and does nothing when it is finished.

exit codes: 0 finished, or another process holds the run · 1 failed · 2 bad input · 85 saved, to be requeued (SIGUSR2)
            130 Ctrl-C · 143 SIGTERM

A run that diverges is finished, and a result: with --json "diverged" is its step (else null), its values are null."""


def register(subparsers: "argparse._SubParsersAction[Parser]") -> None:
    """Add ``study train``."""
    command = subparsers.add_parser(
        "train",
        help="train one run, or continue it",
        description="Train one run, or continue it; each mechanism, and the linear probe, is a config of one trainer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "arguments", nargs="*", metavar="CONFIG.yaml | key=value", help="at most one file, and overrides"
    )
    command.add_argument(
        "--scale", metavar="S", help="start from sweeps/scales/S.yaml: smoke, quick, cpu, gpu, imagenet"
    )
    command.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs live (default: runs)"
    )
    command.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1; auto takes a GPU when there is one (default)"
    )
    command.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads (default: as many as the run began with, else all cores)"
    )
    command.add_argument("--compile", action="store_true", help="torch.compile the encoders: pays in long runs only")
    command.add_argument(
        "--checkpoint-every", type=float, default=60.0, metavar="S", help="seconds between checkpoints (default: 60)"
    )
    command.add_argument(
        "--list", action="store_true", help="show every key with its value here and what it means, and stop"
    )
    command.add_argument("--mlflow", action="store_true", help="push the run to MLflow beside the training")
    line = '{"signature", "dir", "diverged", "final": {metric: value}}'
    command.add_argument("--json", action="store_true", help=f"the last line is {line}")
    command.rest = "arguments"
    command.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Resolve the config, train, and print the outcome."""
    from study.config.reading import resolve
    from study.errors import UserError

    files = [argument for argument in arguments.arguments if "=" not in argument]
    if len(files) > 1:
        raise UserError(f"command line: {files[1]!r}: allowed is one config file, then key=value")
    if files and not Path(files[0]).exists():
        raise UserError(f"command line: {files[0]}: no such file; allowed is a config file, or key=value")
    for name in ("threads", "checkpoint_every"):
        value = getattr(arguments, name)
        if value is not None and not value >= (1 if name == "threads" else 0):  # NaN too
            raise UserError(f"command line: --{name.replace('_', '-')} = {value}: allowed is a positive number")
    tree, source = _tree(files, arguments)
    config = resolve(tree, source)
    if arguments.list:
        _list(config)
        return 0
    from study.launch import single

    outcome = single.run(
        config,
        arguments.runs_dir,
        threads=arguments.threads,
        mlflow=arguments.mlflow,
        device=arguments.device,
        compile=arguments.compile,
        checkpoint_every=arguments.checkpoint_every,
    )
    if arguments.json:
        said = {"signature": outcome.signature, "dir": str(outcome.dir), "diverged": outcome.diverged}
        print(strict.dumps(said | {"final": outcome.final}))
    elif outcome.state:
        found = "".join(f"  {name} {value:.4g}" for name, value in outcome.final.items())
        if outcome.diverged is not None:
            found = f"  diverged at step {outcome.diverged:,}"
        print(f"{outcome.state}: {outcome.dir}{found}")
    return outcome.exit_code


def _tree(files: list[str], arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The merged tree and the name of where it came from; overrides are echoed."""
    from study.config.reading import merge, read_yaml
    from study.sweep.grid import scale_overlay

    tree: dict[str, Any] = scale_overlay(arguments.scale) if arguments.scale else {}
    for file in files:
        tree = merge(tree, read_yaml(Path(file)))
    overrides = read_overrides(argument for argument in arguments.arguments if "=" in argument)
    sources = (
        [f"sweeps/scales/{arguments.scale}.yaml"] * bool(arguments.scale) + files + ["command line"] * bool(overrides)
    )
    return merge(tree, overrides), " + ".join(sources) or "defaults"


def _list(config: Any) -> None:
    """Every key: its value in this config and the sentence that explains it."""
    from pydantic import BaseModel
    from rich import box
    from rich.table import Table

    from study.config.schema import render
    from study.console import stdout

    table = Table("key", "value", "meaning", box=box.SIMPLE)

    def add(section: BaseModel, prefix: str) -> None:
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                add(value, f"{prefix}{name}.")
            else:
                table.add_row(f"{prefix}{name}", value if isinstance(value, str) else render(value), field.description)

    add(config, "")
    console = stdout()
    console.print(table)
    console.print(f"signature {config.signature}", highlight=False)
