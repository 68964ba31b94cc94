"""``study report``."""

import argparse
from pathlib import Path

EPILOG = """\
writes, for every scale that has exported runs:
  OUT/SCALE/REPORT.md, report.html     the page; the second is one file that needs neither network nor script
  OUT/SCALE/claims.json                each registered claim: holds, fails or undecided, and the numbers behind it
  OUT/SCALE/tables/SWEEP.csv|md|tex    arms, the paper's number, n, mean and SD over seeds; floors are rows
  OUT/SCALE/figures/NAME.svg|png|pdf

It reads RUNS and the sweeps' YAML and nothing else: no training, no server; the same runs give the same bytes.

examples:
  study runs export && study report
  study report --runs results/runs --out /tmp/again && diff -r results/quick /tmp/again/quick
  study report --readme README.md      also refresh what stands between <!-- include FILE --> and <!-- end -->"""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``study report``."""
    command = subparsers.add_parser(
        "report",
        help="tables, figures, claims and a page from the exported runs",
        description="Make claims, tables, figures and a page from exported runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--runs", type=Path, default=Path("results/runs"), help="exported runs (%(default)s)")
    command.add_argument("--out", type=Path, default=Path("results"), help="where the scales' folders go (%(default)s)")
    command.add_argument("--sweeps", type=Path, default=Path("sweeps"), help="the sweeps' YAML (%(default)s)")
    command.add_argument("--show", metavar="SWEEP-SCALE", help="print this sweep alone; all are written (default: all)")
    command.add_argument("--readme", type=Path, metavar="FILE", help="refresh the marked blocks of this file, too")
    command.set_defaults(func=report_command)


def report_command(args: argparse.Namespace) -> int:
    """Write the report, then print its tables and verdicts.

    Raises:
        UserError: bad input; nothing is written then.
    """
    import sys
    import textwrap

    from study.errors import UserError
    from study.report import tables, write

    if args.readme and not args.readme.is_file():
        raise UserError(f"--readme {args.readme}: no such file")
    exported = sorted(path.name.removesuffix(".runs.parquet") for path in args.runs.glob("*.runs.parquet"))
    if args.show and args.show not in exported:
        raise UserError(f"command line: --show = {args.show}: allowed is {', '.join(exported) or 'none: no runs'}")
    sections = write.write(args.runs, args.out, args.sweeps)
    if args.readme:
        write.refresh(args.readme, args.out)
    for each in sections:
        if args.show not in (None, f"{each.table.sweep.name}-{each.table.sweep.scale}"):
            continue
        print(f"{each.table.sweep.title} · scale {each.table.sweep.scale}\n")
        print(tables.to_text(each.table))
        for line in tables.missing(each.table):
            print(f"missing: {line}")
        if apart := tables.made_apart(each.table):
            print(f"note: its runs were {apart}")
        for verdict in each.verdicts:
            print(textwrap.fill(f"{verdict.answer.upper():9} {verdict.statement}", 80, subsequent_indent=" " * 10))
            if verdict.adjusted:
                print(f"{' ' * 10}after Holm's adjustment: {verdict.after_holm}")
            print(textwrap.fill(verdict.reason, 80, initial_indent=" " * 10, subsequent_indent=" " * 10))
        print()
    print(f"written: {args.out}/*/REPORT.md, report.html, claims.json, tables/, figures/")
    sys.stdout.flush()  # a reader that has gone (`| head`) is noticed here, not when the interpreter ends
    return 0
