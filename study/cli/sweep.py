"""``study sweep plan | submit | status | logs | cancel``."""

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from study import strict
from study.arguments import Parser, whole

if TYPE_CHECKING:
    from study.launch.plan import Plan
    from study.sweep.grid import Sweep

EPILOG = """\
A sweep is a YAML file: arms along its axes, floors, seeds, the paper's numbers. A scale (sweeps/scales/S.yaml) says how
large the runs are: smoke (seconds), quick (a minute), cpu (CIFAR-10, minutes), gpu, imagenet (the paper's own).

examples:
  study sweep plan sweeps/momentum.yaml --scale quick        what is done, what is missing, what the rest costs
  study sweep submit sweeps/momentum.yaml --scale quick      train what is missing or failed, on all cores
  study sweep status sweeps/momentum.yaml --watch            from another terminal
  study sweep logs sweeps/momentum.yaml m=0.99 -f            what one point prints
  study sweep submit sweeps/momentum.yaml --scale gpu --cluster slurm"""

ARGUMENTS = (
    "key=value sets a config key that all points share, such as optimiser.epochs=3: the points are other runs then."
)

PLAN = """\
states: done · diverged (done, without numbers: a result) · running · pending (a cluster has it) · unknown (the cluster
does not answer) · missing (never started, or stopped: it continues) · failed · blocked (a probe whose pre-training
failed) · removed (submitted once, no longer in the grid: reported, never touched)

The cost comes from finished runs of the same shape in RUNS_DIR, or else from the sweep's header; the source is said."""

SUBMIT = """\
Local: so many `study train` at a time, each with its own threads. Ctrl-C lets them save and leave, a second one kills
them; the same command continues. A point that failed leaves the others alone. Another launcher on the same sweep, or on
another with the same points, never trains one twice.
Slurm: what is missing goes to the queue as arrays, from a snapshot of the code; resources come from cluster.yaml.
It returns at once. With --wait it stays, shows the table and logs to MLflow; Ctrl-C then leaves the jobs running.

exit codes: 0 all done or in other hands · 1 a point failed, or sbatch refused some · 2 bad input · 130 Ctrl-C"""

POINT = """\
POINT is the beginning of a signature, or a sweep's file and words of the point's name:
  study sweep {verb} 3f2a9c
  study sweep {verb} sweeps/momentum.yaml m=0.99 seed=0 --scale quick"""

SHOWN = 40
"""Commands that a dry run lists."""

FOLLOW_S = 0.5
"""Seconds between two looks of `logs -f`."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``study sweep``."""
    sweep = _add(subparsers, "sweep", "plan, run and watch a grid of runs", "Grids of runs, from their YAML.", EPILOG)
    verbs = sweep.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)

    plan = _add(verbs, "plan", "what is done, what is missing, and what the rest costs", "Show a sweep's plan.", PLAN)
    _sweep_arguments(plan)
    _cluster_arguments(plan)
    plan.add_argument("--json", action="store_true", help="for a program to read")
    plan.set_defaults(func=plan_command)

    text = "Run what of a sweep is missing or failed."
    submit = _add(verbs, "submit", "run what is missing or failed", text, SUBMIT)
    _sweep_arguments(submit)
    _cluster_arguments(submit)
    submit.add_argument("--dry-run", action="store_true", help="show what would run, and make nothing")
    submit.add_argument("--wait", action="store_true", help="stay until every point is done, also those in other hands")
    submit.add_argument("--yes", action="store_true", help="do not ask before a large submission to Slurm")
    submit.add_argument("--threads", type=_positive, metavar="N", help="local: threads a point (default: 1)")
    submit.add_argument("--no-mirror", action="store_true", help="do not log to MLflow (Slurm: only --wait does)")
    submit.set_defaults(func=submit_command)

    text = "One table: what each point is doing, its speed, the time left, and why it failed."
    status = _add(verbs, "status", "what each point is doing", text, PLAN.partition("\n\nThe cost")[0])
    _sweep_arguments(status)
    status.add_argument("--json", action="store_true", help="for a program to read")
    status.add_argument("--watch", action="store_true", help="redraw until nothing runs any more, or Ctrl-C")
    status.set_defaults(func=status_command)

    logs = _add(verbs, "logs", "what a point printed", "Show the log of a point.", POINT.format(verb="logs"))
    _point_arguments(logs)
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the point ends")
    logs.set_defaults(func=logs_command)

    text = "Stop the running points of a sweep, or some of them; each saves first, and can be continued."
    cancel = _add(verbs, "cancel", "stop running points; they save first", text, POINT.format(verb="cancel"))
    _point_arguments(cancel)
    cancel.add_argument("--yes", action="store_true", help="do not ask, however many points")
    cancel.set_defaults(func=cancel_command)


def _add(subparsers: Any, name: str, short: str, text: str, epilog: str) -> Any:
    return subparsers.add_parser(
        name,
        help=short,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale", default="quick", metavar="S", help="smoke, quick, cpu, gpu, imagenet (default: quick)"
    )
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="where runs live (default: runs)"
    )


def _sweep_arguments(parser: Parser) -> None:
    parser.rest = "overrides"
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="the sweep")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=ARGUMENTS)
    _common(parser)
    parser.add_argument("--all", action="store_true", help="show each point of a long sweep")


def _cluster_arguments(parser: Parser) -> None:
    parser.add_argument("--cluster", choices=("local", "slurm"), default="local", help="where to run (default: local)")
    parser.add_argument("--cluster-config", type=Path, metavar="FILE", help="Slurm: resources (default: cluster.yaml)")
    parser.add_argument(
        "--workers", type=_positive, metavar="N", help="local: points at a time (default: a core or GPU each)"
    )


def _point_arguments(parser: Parser) -> None:
    parser.rest = "point"
    parser.add_argument("point", nargs="+", metavar="POINT", help="a signature, or a sweep's file and words of a name")
    _common(parser)


def _positive(text: str) -> int:
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: allowed is 1 or more")
    return value


# ---------------------------------------------------------------------------------------------------------- handlers


def plan_command(arguments: argparse.Namespace) -> int:
    """``study sweep plan``."""
    from dataclasses import asdict

    from study.slurm import submit as slurm
    from study.sweep import check

    sweep = _load(arguments)
    check.check(sweep)
    plan = _plan(sweep, arguments)
    workers = _workers(plan, arguments)  # reads cluster.yaml: its faults are said even where there is no Slurm
    allowed = slurm.limits() if arguments.cluster == "slurm" else None
    if arguments.json:
        cluster = asdict(allowed) if allowed else {}
        print(strict.dumps(plan.as_json(workers) | {"cluster": cluster}, ensure_ascii=False))
        return 0
    _show(plan, arguments)
    if allowed:
        print(f"the cluster allows {allowed}")
    return 0


def submit_command(arguments: argparse.Namespace) -> int:
    """``study sweep submit``."""
    from study.data import images
    from study.launch import local, record
    from study.slurm import submit as slurm
    from study.sweep import check
    from study.tracking import store

    sweep = _load(arguments)
    check.check(sweep)
    plan = _plan(sweep, arguments)
    _show(plan, arguments)
    if arguments.cluster == "local" and not arguments.dry_run:
        for name in dict.fromkeys(row.point.config.data.name for row in plan.to_run):
            images.load(name)
    if not (arguments.dry_run or arguments.no_mirror):
        store.check(store.resolve(arguments.runs_dir), arguments.cluster)
    if arguments.cluster == "slurm":
        code = slurm.submit(
            sweep,
            [row.point for row in plan.to_run],
            runs_dir=arguments.runs_dir,
            cluster_config=arguments.cluster_config,
            yes=arguments.yes,
            dry_run=arguments.dry_run,
        )
        return code or (_wait(sweep, arguments) if arguments.wait and not arguments.dry_run else 0)
    options = local.options(plan, workers=arguments.workers, threads=arguments.threads, wait=arguments.wait)
    if arguments.dry_run:
        print(f"would run {len(plan.to_run):,} points, {options.workers} at a time with --threads {options.threads}:")
        for row in plan.to_run if arguments.all else plan.to_run[:SHOWN]:
            print(f"  study train {arguments.runs_dir / row.point.signature / 'config.yaml'}  # {row.point.name}")
        return 0
    record.write(sweep, arguments.runs_dir)
    return local.launch(plan, arguments.runs_dir, options, mirror=not arguments.no_mirror)


def _wait(sweep: "Sweep", arguments: argparse.Namespace) -> int:
    """Follow a sweep on Slurm, with the mirror beside it; the jobs need neither."""
    from study.launch import local, watch

    with local.mirrored(arguments.runs_dir, print, wanted=not arguments.no_mirror):
        try:
            plan = watch.watch(lambda: _plan(sweep, arguments), everything=arguments.all)
        except KeyboardInterrupt:
            print(
                "study: the jobs go on; `study sweep status` shows them, `study sweep cancel` stops them, and "
                "`study runs sync` logs to MLflow",
                file=sys.stderr,
            )
            return 130
    return int(not plan.counts.keys() <= {"done", "diverged", "removed"})


def status_command(arguments: argparse.Namespace) -> int:
    """``study sweep status``."""
    from study.console import stdout
    from study.launch import table, watch

    sweep = _load(arguments)
    if arguments.json:
        print(strict.dumps(_plan(sweep, arguments).as_json(1), ensure_ascii=False))
    elif arguments.watch:
        watch.watch(lambda: _plan(sweep, arguments), everything=arguments.all)
    else:
        stdout().print(table.of_status(_plan(sweep, arguments), everything=arguments.all))
    return 0


def logs_command(arguments: argparse.Namespace) -> int:
    """``study sweep logs``."""
    from study.errors import UserError
    from study.launch import plan
    from study.slurm import submit as slurm

    chosen = {point["signature"]: point["name"] for _, point in _points(arguments)}
    if len(chosen) > 1:
        some = ", ".join(f"{name} ({signature})" for signature, name in list(chosen.items())[:5])
        raise UserError(f"command line: {' '.join(arguments.point)}: {len(chosen)} points; allowed is one of {some} …")
    signature = next(iter(chosen))
    folder = arguments.runs_dir / signature
    paths = [
        path for path in (folder / "log.txt", slurm.log_of(arguments.runs_dir, signature)) if path and path.exists()
    ]
    if not paths:
        raise UserError(f"{folder}: nothing has been printed; allowed is a point that was started")
    newest = max(paths, key=lambda path: path.stat().st_mtime)
    with newest.open(encoding="utf-8", errors="replace") as file:
        while True:
            running = plan.state_of(folder)[0] == "running"  # before reading, so that the last lines are not missed
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if not (arguments.follow and running):
                return 0
            time.sleep(FOLLOW_S)


def cancel_command(arguments: argparse.Namespace) -> int:
    """``study sweep cancel``."""
    from study.launch import local, record
    from study.slurm import ledger
    from study.slurm import submit as slurm

    points = _points(arguments)
    by_sweep: dict[str, set[str]] = {}
    for sweep_id, point in points:
        by_sweep.setdefault(sweep_id, set()).add(point["signature"])
    running = local.running_here(arguments.runs_dir, {point["signature"] for _, point in points})
    slurm.confirm("cancel", len(running), yes=arguments.yes)
    if len(arguments.point) == 1 and arguments.point[0].endswith(".yaml"):  # all of it: what waits must not start
        local.stop_launchers(arguments.runs_dir, points[0][0])
    for pid in running.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    print(f"asked {len(running)} running {'point' if len(running) == 1 else 'points'} on this machine to save and stop")
    code = 0
    for sweep_id, signatures in by_sweep.items():
        sent = ledger.latest(ledger.arrays(arguments.runs_dir)).keys() & signatures
        if sent and (sweep := record.reload(arguments.runs_dir, sweep_id)):
            code |= slurm.cancel(sweep, runs_dir=arguments.runs_dir, signatures=sent, yes=arguments.yes)
    return code


# ---------------------------------------------------------------------------------------------------- what they share


def _load(arguments: argparse.Namespace) -> "Sweep":
    from study.cli.overrides import read_overrides
    from study.sweep import grid

    return grid.load(arguments.sweep, arguments.scale, read_overrides(arguments.overrides))


def _plan(sweep: "Sweep", arguments: argparse.Namespace) -> "Plan":
    """The plan, with what Slurm knows: one query, and none if no point was ever submitted to it."""
    from study.launch import plan
    from study.slurm import submit as slurm

    queue = {signature: (job.state, job.reason) for signature, job in slurm.jobs(arguments.runs_dir, sweep).items()}
    return plan.make(sweep, arguments.runs_dir, queue)


def _show(plan: "Plan", arguments: argparse.Namespace) -> None:
    from study.console import stdout
    from study.launch import table

    stdout().print(table.of_plan(plan, _workers(plan, arguments), everything=arguments.all))


def _workers(plan: "Plan", arguments: argparse.Namespace) -> int:
    """Points side by side: on Slurm as many as the user allows, since nobody knows when which of them starts."""
    from study.launch import local
    from study.slurm import cluster

    if arguments.cluster == "slurm":
        resources = cluster.of_sweep(arguments.cluster_config, plan.sweep)
        return resources.parallel or max(1, len(plan.to_run))
    return local.options(plan, workers=arguments.workers).workers


def _points(arguments: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Sweep's id and recorded point, of the submitted points that the command line names."""
    from study.errors import UserError
    from study.launch import record

    first, *words = arguments.point
    if first.endswith(".yaml"):
        sweep_id = f"{Path(first).stem}-{arguments.scale}"
        points = [(sweep_id, point) for point in record.points(arguments.runs_dir, sweep_id)]
        if not points:
            raise UserError(f"{first}: nothing was submitted at scale {arguments.scale} to {arguments.runs_dir}")
        named = [(i, point) for i, point in points if all(f" {word} " in f" {point['name']} " for word in words)]
    else:
        points = [(i, point) for i in record.ids(arguments.runs_dir) for point in record.points(arguments.runs_dir, i)]
        named = [(i, point) for i, point in points if point["signature"].startswith(tuple(arguments.point))]
    if not named:
        some = ", ".join(dict.fromkeys(point["name"] for _, point in points[:5])) or "a submitted point; there is none"
        raise UserError(f"command line: {' '.join(arguments.point)}: no such point; allowed is {some} …")
    return named
