"""What a person waits for at the command line: help, plans, reports, lists of runs, Slurm."""

import shutil
from collections.abc import Callable

from study.bench import stored
from study.bench.measure import Bench, command, take_turns, timed
from study.report import load, tables
from study.run import listing
from study.sweep import grid
from study.tracking import imports, store

SCALE = "cpu"
POINTS = 10_000
LENGTH = 200
"""Steps of a history: with twelve metrics, 2,400 values a run."""
TRACKED_RUNS, TRACKED_LENGTH = 1_000, 20
"""What the tracker is filled with: shorter histories than the report's, which favours the tracker."""


def commands(bench: Bench) -> None:
    """``study --help``, and ``study sweep plan`` of 10,000 points."""
    command("--help")
    bench.add("study --help", [command("--help").seconds for _ in range(bench.repeats)], "s", at_most=0.3)
    sweep = stored.sweeps(bench.folder / "plan", POINTS)
    words = ("sweep", "plan", str(sweep), "--scale", SCALE, "--runs-dir", str(bench.folder / "plan" / "runs"))
    seconds = [command(*words).seconds for _ in range(bench.repeats)]
    bench.add("study sweep plan, 10,000 points", seconds, "s", at_most=2.0)


def report(bench: Bench) -> None:
    """``study report`` of 1,000 and of 10,000 runs, their ratio, and the memory that it holds."""
    seconds: dict[int, list[float]] = {}
    for runs in (1_000, 10_000):
        folder = bench.folder / f"report-{runs}"
        path = stored.sweeps(folder / "sweeps", runs)
        stored.export(folder / "runs", grid.load(path, SCALE), LENGTH)
        words = ("--runs", str(folder / "runs"), "--out", str(folder / "out"), "--sweeps", str(folder / "sweeps"))
        done = [command("report", *words) for _ in range(bench.repeats)]
        seconds[runs] = [one.seconds for one in done]
        name = f"study report, {runs:,} runs × 12 metrics × {LENGTH} points"
        bench.add(name, seconds[runs], "s", at_most=10.0 if runs == 1_000 else None)
        gigabytes = [one.peak_bytes / 1e9 for one in done]
        bench.add(f"study report, {runs:,} runs: peak memory", gigabytes, "GB", at_most=1.0)
        shutil.rmtree(folder)
    times = [many / few for many, few in zip(seconds[10_000], seconds[1_000], strict=True)]
    bench.add("study report, 10,000 runs ÷ 1,000 runs", times, "", at_most=10.0, note="10 is linear")


def tracker(bench: Bench) -> None:
    """Seconds of a table of runs through MLflow's client ÷ the same from exported files, both without the imports."""
    folder = bench.folder / "tracker"
    path = stored.sweeps(folder / "sweeps", TRACKED_RUNS)
    stored.export(folder / "exported", grid.load(path, SCALE), TRACKED_LENGTH)
    target = store.resolve(folder / "tracked", f"sqlite:///{folder.absolute() / 'mlflow.db'}")
    filled = imports.fill(folder / "exported", target)
    if not filled.complete:
        raise RuntimeError(f"the store of the bench: {filled.error or filled.problems[0]}")

    sides = {
        "mlflow": timed(_through_mlflow(target.uri)),
        "`study runs list`": timed(lambda: listing.runs(folder / "none", folder / "exported")),
        "the report's tables": timed(
            lambda: [tables.build(each) for each in load.load(folder / "exported", path.parent)]
        ),
    }
    seconds = take_turns(sides, bench.repeats)
    for name in list(sides)[1:]:
        bench.add(
            f"MLflow ÷ {name}, {filled.runs:,} runs",
            seconds["mlflow"] / seconds[name],
            "",
            at_least=10.0,
            note=f"exported files; MLflow: search_runs, and get_metric_history of knn; 12 × {TRACKED_LENGTH} points",
        )


def _through_mlflow(uri: str) -> Callable[[], None]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)

    def table() -> None:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        page = client.search_runs(experiments)
        runs = list(page)
        while page.token:
            page = client.search_runs(experiments, page_token=page.token)
            runs += page
        for run in runs:
            client.get_metric_history(run.info.run_id, "knn")

    return table


def slurm(bench: Bench) -> None:
    """Submitting 10,000 points to a Slurm that answers at once, and asking what became of them."""
    path = stored.sweeps(bench.folder / "slurm" / "sweeps", POINTS)
    submitted, asked, queries = [], [], []
    for repeat in range(bench.repeats):
        folder = bench.folder / "slurm" / str(repeat)
        programs = stored.slurm(folder)
        words = (str(path), "--scale", SCALE, "--runs-dir", str(folder / "runs"))
        slurm_too = ("--cluster", "slurm", "--no-mirror", "--yes")
        submitted.append(command("sweep", "submit", *words, *slurm_too, cwd=folder, path=programs).seconds)
        (folder / "calls").unlink()
        asked.append(command("sweep", "status", *words, cwd=folder, path=programs).seconds)
        queries.append(len((folder / "calls").read_text().splitlines()))
        shutil.rmtree(folder)
    bench.add("study sweep submit, 10,000 points to Slurm", submitted, "s", at_most=10.0)
    bench.add("study sweep status, 10,000 points on Slurm", asked, "s", at_most=2.0)
    bench.add("questions to Slurm by that status", queries, "", at_most=1)
