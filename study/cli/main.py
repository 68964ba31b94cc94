"""The command line: thin, and quick to answer, since each command imports what is heavy only when its command runs."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence

from study import __version__
from study.arguments import Parser
from study.errors import UserError

EPILOG = """\
from nothing to a table:
  study data get fashion-mnist                          the images
  study sweep plan sweeps/momentum.yaml --scale quick    what would run, and what it costs
  study sweep submit sweeps/momentum.yaml --scale quick --wait
  study runs export && study report                     results/quick/REPORT.md

`study COMMAND --help` explains each; `make help` lists the shortcuts."""


def parser() -> argparse.ArgumentParser:
    """The whole command line; every room registers its own commands."""
    from study.cli import bench, data, encoder, report, runs, sweep, train

    top = Parser(
        prog="study",
        description="A reproduction study of Momentum Contrast (He et al. 2019): train, sweep, record, report.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"study {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for room in (train, sweep, runs, report, data, encoder, bench):
        room.register(commands)
    return top


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"study: warning: {message}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 a run failed, 2 bad input, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a test's may be another kind
            stream.reconfigure(errors="replace")  # no command fails over a character that the terminal lacks
    arguments = parser().parse_args(argv)
    warnings.showwarning = _show_warning  # type: ignore[assignment]  # the place in the code is of no use to a user
    try:
        runs_dir = getattr(arguments, "runs_dir", None)  # of most commands
        if runs_dir is not None and runs_dir.exists() and not runs_dir.is_dir():
            raise UserError(f"command line: --runs-dir = {runs_dir}: is a file; allowed is a folder of runs")
        return int(arguments.func(arguments))
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("study: interrupted; the same command continues", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
