"""`study runs`: look at runs, carry them to MLflow and to files, and browse them."""

import argparse
import sys
from pathlib import Path
from typing import Any

from study import strict
from study.arguments import Parser, decimal

EPILOG = """\
A run's folder is the truth; MLflow shows it, and can be rebuilt from it at any time; exported files are committed.

  study runs list                          what there is
  study runs show 3f2a                     one run, by the beginning of its signature
  study runs diff 3f2a 91c0                in what two runs differ
  study runs remove 3f2a                   its folder, its tracked runs and its exported rows, for good
  study runs sync                          bring MLflow up to date (`--watch`: and keep it so)
  study runs export                        write results/runs/*.parquet
  study runs ui                            browse in MLflow on this machine

The store is MLFLOW_TRACKING_URI if that is set, else sqlite in the folder of runs."""

SYNC = """\
Idempotent: sync as often as you like. What a kill or a dead server interrupted is sent by the next sync.

  study runs sync --watch                  on a login node, while a cluster works; Ctrl-C ends it after a last pass
  study runs sync --from /archive/runs     the runs of another folder, into this folder's store
  study runs sync --uri http://host:5000   into another store
  study runs sync --restore                what was deleted in MLflow, which is left alone otherwise, comes back

Exit code 1 if the store could not be served or a run could not be read."""

DIFF = """\
The keys of their configs that differ, the commits and versions that made them, and their final numbers."""

EXPORT = """\
Write runs as files to commit. A file keeps the runs that have no finished one here, so that exporting a part of a
sweep loses nothing. Finished runs that the sweep, as last submitted here, no longer has are left out with --drop only:
a submission with overrides has other points under the same name."""

REMOVE = """\
Removes the folder of each run, its tracked runs, and its rows in the exported files; shows them, and asks first. A run
that goes on is refused. A removed point of a sweep is missing again: the sweep's next submission trains it."""

RECONCILE = """\
After any accident: compares every point of every run with the store, sends what is missing, makes runs that hold
superseded values anew, merges doubles (the complete one stays), and ends dead runs that still say RUNNING."""


STATES = ("pending", "running", "finished", "diverged", "failed", "killed", "scheduled")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``study runs``."""
    runs = _add(
        subparsers, "runs", "look at runs; MLflow; export and import", "Runs: on disk, in MLflow, in files.", EPILOG
    )
    verbs = runs.add_subparsers(dest="verb", metavar="VERB", required=True)

    verb = _add(verbs, "list", "what runs there are", "A line a run; exported runs if the folder holds none.", EPILOG)
    _source(verb)
    verb.add_argument("--state", metavar="S", help=f"only runs in this state: {', '.join(STATES)}")
    verb.set_defaults(func=list_command)

    verb = _add(verbs, "show", "all about one run", "Config, state, results, origin and history of a run.", EPILOG)
    verb.add_argument("run", metavar="RUN", help="its signature, the beginning of it, or its folder")
    _source(verb)
    verb.set_defaults(func=show_command)

    verb = _add(verbs, "diff", "in what two runs differ", DIFF, EPILOG)
    verb.add_argument("run", metavar="A", help="its signature, the beginning of it, or its folder")
    verb.add_argument("other", metavar="B", help="the other run")
    _source(verb)
    verb.set_defaults(func=diff_command)

    verb = _add(verbs, "export", "runs as canonical parquet files", EXPORT, EPILOG)
    _runs_dir(verb)
    verb.add_argument(
        "sweeps",
        nargs="*",
        metavar="SWEEP",
        help="momentum, momentum-quick, …; `train`: single runs (default: all sweeps, no single runs)",
    )
    verb.add_argument("--out", type=Path, default=Path("results/runs"), metavar="DIR", help="default: results/runs")
    verb.add_argument("--drop", action="store_true", help="leave out finished runs that are no longer points")
    verb.set_defaults(func=export_command)

    verb = _add(verbs, "import", "exported runs into MLflow", "Fill a store from files; twice changes nothing.", EPILOG)
    _runs_dir(verb)
    verb.add_argument(
        "files", nargs="?", type=Path, default=Path("results/runs"), metavar="DIR", help="default: results/runs"
    )
    _restore(verb)
    _store(verb)
    verb.set_defaults(func=import_command)

    verb = _add(verbs, "sync", "bring MLflow up to date", "Show in MLflow what the runs' folders say.", SYNC)
    _runs_dir(verb)
    verb.add_argument("--from", dest="source", type=Path, metavar="DIR", help="read runs here (default: --runs-dir)")
    verb.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    verb.add_argument("--interval", type=_seconds, default=5.0, metavar="S", help="seconds between passes (default: 5)")
    _restore(verb)
    _store(verb)
    verb.set_defaults(func=sync_command)

    verb = _add(verbs, "remove", "remove runs for good", REMOVE, EPILOG)
    verb.add_argument("runs", nargs="+", metavar="RUN", help="a signature, the beginning of one, or a folder of a run")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    verb.add_argument(
        "--files", type=Path, default=Path("results/runs"), metavar="DIR", help="exported runs (default: results/runs)"
    )
    verb.add_argument(
        "--uri", metavar="URI", help="the store (default: MLFLOW_TRACKING_URI, else sqlite beside the runs)"
    )
    _runs_dir(verb)
    verb.rest = "runs"
    verb.set_defaults(func=remove_command)

    verb = _add(verbs, "reconcile", "mend a store after an accident", "Make MLflow say what is true.", RECONCILE)
    _runs_dir(verb)
    _store(verb)
    verb.set_defaults(func=reconcile_command)

    verb = _add(verbs, "ui", "browse the runs in MLflow", "Serve MLflow on this machine with all runs in it.", EPILOG)
    _runs_dir(verb)
    verb.add_argument(
        "--files", type=Path, default=Path("results/runs"), metavar="DIR", help="exported runs to show, too"
    )
    verb.add_argument("--port", type=int, default=5000, metavar="N", help="first port to try (default: 5000)")
    verb.set_defaults(func=ui_command)


def list_command(arguments: argparse.Namespace) -> int:
    """Print a table or JSON of runs."""
    from study.errors import UserError
    from study.run import listing

    if arguments.state and arguments.state not in STATES:
        raise UserError(f"command line: --state = {arguments.state}: allowed is {', '.join(STATES)}")
    runs = listing.runs(arguments.runs_dir, arguments.files)
    if arguments.state:
        runs = [run for run in runs if listing.shown(run) == arguments.state]
    _print(arguments.json, runs, listing.table)
    return 0


def show_command(arguments: argparse.Namespace) -> int:
    """Print one run."""
    from study.run import listing

    _print(arguments.json, listing.one(arguments.run, arguments.runs_dir, arguments.files), listing.page)
    return 0


def diff_command(arguments: argparse.Namespace) -> int:
    """Print two runs side by side."""
    from study.run import compare

    found = compare.compare(arguments.run, arguments.other, arguments.runs_dir, arguments.files)
    _print(arguments.json, found, lambda content, _: compare.page(content))
    return 0


def export_command(arguments: argparse.Namespace) -> int:
    """Write parquet files."""
    from study.run.export import export

    written = export(
        arguments.runs_dir,
        arguments.out,
        arguments.sweeps or None,
        drop=arguments.drop,
        say=lambda line: print(line, file=sys.stderr),
    )
    for path in written:
        print(path)
    if not written:
        print(f"{arguments.runs_dir} holds no run of a submitted sweep: {arguments.out} stays as it is")
    return 0


def import_command(arguments: argparse.Namespace) -> int:
    """Fill a store from exported files."""
    from study.tracking import imports, store

    target = store.resolve(arguments.runs_dir, arguments.uri)
    return _report(arguments, imports.fill(arguments.files, target, restore=arguments.restore))


def sync_command(arguments: argparse.Namespace) -> int:
    """Mirror run folders, once or until interrupted."""
    import threading

    from study.tracking import store
    from study.tracking.mirror import Mirror

    source = arguments.source or arguments.runs_dir
    mirror = Mirror(_folder(source), arguments.uri, into=arguments.runs_dir)
    store.check(mirror.store)
    if not arguments.watch:
        return _report(arguments, mirror.sync(restore=arguments.restore))
    from signal import SIGINT, SIGTERM, signal

    stop = threading.Event()
    for number in (SIGINT, SIGTERM):
        signal(number, lambda *_: stop.set())
    if arguments.restore:
        mirror.sync(restore=True)
    print(f"mirroring {source} to {mirror.store.uri}; Ctrl-C ends after a last pass", file=sys.stderr)
    return _report(arguments, mirror.watch(stop, arguments.interval))


def remove_command(arguments: argparse.Namespace) -> int:
    """Remove runs wherever they are."""
    from study.console import confirm
    from study.tracking import remove, store

    found = remove.find(arguments.runs, arguments.runs_dir, arguments.files)
    for one in found:
        print(one)
    runs = "1 run" if len(found) == 1 else f"{len(found)} runs"
    if not arguments.yes:
        confirm(f"remove {runs} for good")
    target = store.resolve(arguments.runs_dir, arguments.uri)
    tracked = remove.remove(found, arguments.runs_dir, arguments.files, target)
    print(f"removed {runs}, tracked as {tracked}")
    return 0


def reconcile_command(arguments: argparse.Namespace) -> int:
    """Mend a store."""
    from study.tracking import store
    from study.tracking.mirror import Mirror
    from study.tracking.reconcile import reconcile

    mirror = Mirror(arguments.runs_dir, arguments.uri)
    store.check(mirror.store)
    return _report(arguments, reconcile(mirror))


def ui_command(arguments: argparse.Namespace) -> int:
    """Serve MLflow until interrupted."""
    from study.tracking.ui import serve

    return serve(arguments.runs_dir, arguments.files, arguments.port)


def _report(arguments: argparse.Namespace, report: Any) -> int:
    if arguments.json:
        print(report.json())
    else:
        print(report)
    for problem in [*report.notes, *report.problems, *([report.error] if report.error else [])]:
        print(f"study: {problem}", file=sys.stderr)
    return 0 if report.complete else 1


def _print(as_json: bool, content: Any, render: Any) -> None:
    if as_json:
        print(strict.dumps(content, indent=1))
        return
    from study.console import stdout

    console = stdout()
    console.print(render(content, console.width))


def _folder(path: Path) -> Path:
    from study.errors import UserError

    if not path.is_dir():
        raise UserError(f"command line: {path}: no such folder; allowed is a folder of runs")
    return path


def _seconds(text: str) -> float:
    value = decimal(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: allowed is above 0, at most 3600")
    return value


def _source(parser: argparse.ArgumentParser) -> None:
    _runs_dir(parser)
    parser.add_argument(
        "--files", type=Path, default=Path("results/runs"), metavar="DIR", help="exported runs (default: results/runs)"
    )
    parser.add_argument("--json", action="store_true", help="for a program to read")


def _runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs live (default: runs)"
    )


def _restore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--restore", action="store_true", help="bring back what was deleted in MLflow")


def _store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--uri", metavar="URI", help="the store (default: MLFLOW_TRACKING_URI, else sqlite beside the runs)"
    )
    parser.add_argument("--json", action="store_true", help="for a program to read")


def _add(subparsers: Any, name: str, short: str, text: str, epilog: str) -> Parser:
    parser: Parser = subparsers.add_parser(
        name,
        help=short,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser
