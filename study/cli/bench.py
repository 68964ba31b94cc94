"""``study bench``."""

import argparse
from pathlib import Path

EPILOG = """\
Each figure is a ratio of two things measured in turn in one run, the median of several repeats, since absolute times
on a shared machine are noise. The goal stands beside it. Run it on a quiet machine; it takes some minutes.

  study bench                         every figure
  study bench trainer report          some of them
  study bench --json                  the same as JSON lines; results/bench/bench.json is written either way"""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``study bench``."""
    command = subparsers.add_parser(
        "bench",
        help="the trainer's speed against its encoder's, and against peers",
        description="The trainer's speed against its encoder's and against peers, and the cost of everything round it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("groups", nargs="*", metavar="GROUP", help="which figures (default: all)")
    command.add_argument("--repeats", type=int, default=5, metavar="N", help="repeats of each figure (default: 5)")
    command.add_argument(
        "--out", type=Path, default=Path("results/bench"), metavar="DIR", help="default: results/bench"
    )
    command.add_argument("--json", action="store_true", help="one JSON object a figure instead of the table")
    command.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write."""
    from study import bench

    return bench.run(arguments.groups, arguments.repeats, arguments.out, arguments.json)
