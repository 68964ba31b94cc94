"""The report says what the stored runs say, the same each time, and hides nothing that is missing."""

import csv
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_fixture import METRICS, ROOT, RUNS, STORED, write

from study.cli import main as cli
from study.errors import UserError
from study.report import document, histories, judge, load, page, tables
from study.report import write as report
from study.report.load import SweepRuns
from study.sweep import claims, grid
from study.sweep.grid import Point

SMALL = STORED / "sweeps"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the stored runs."""
    out = tmp_path_factory.mktemp("results")
    report.write(STORED / "runs", out, SMALL)
    return out / "quick"


def one(folder: Path) -> SweepRuns:
    (sweep,) = load.load(folder, SMALL)
    return sweep


def rows(text: str) -> dict[str, dict[str, str]]:
    return {row["m"]: row for row in csv.DictReader(text.splitlines())}


def runs_of(folder: Path) -> list[dict[str, object]]:
    return pq.read_table(folder / "momentum-quick.runs.parquet").to_pylist()


@pytest.mark.parametrize("name", ["tables/momentum.csv", "tables/momentum.md", "tables/momentum.tex", "claims.json"])
def test_the_golden_report_is_made_from_the_stored_runs(made: Path, name: str) -> None:
    """To accept a change on purpose: `python tests/report/test_report.py` writes tests/report/golden again."""
    assert (made / name).read_text() == (STORED / "golden" / Path(name).name).read_text()


def test_two_of_three_seeds_are_counted_and_named(made: Path) -> None:
    found = [
        json.loads(str(run["final"]))["knn"] for run in runs_of(STORED / "runs") if '"m": 0.9}' in str(run["labels"])
    ]
    row = rows((made / "tables/momentum.csv").read_text())["0.9"]
    assert len(found) == 2 and row["n"] == "2"
    assert float(row["knn"]) == pytest.approx(np.mean(found), abs=1e-6)
    assert float(row["knn_sd"]) == pytest.approx(abs(found[0] - found[1]) / math.sqrt(2), abs=1e-6)
    assert "| 0.9 | 55.2 | 2 of 3 |" in (made / "tables/momentum.md").read_text()
    assert "m = 0.9: n = 2 of 3 (1 not run)" in (made / "REPORT.md").read_text()


def test_a_floor_that_no_seed_changes_is_one_number(made: Path, tmp_path: Path) -> None:
    """Three stored runs of raw pixels that are equal count as one; if ever they differ, they are what was measured."""
    stored = [run for run in runs_of(STORED / "runs") if run["floor"] == "raw pixels"]
    assert len(stored) == 3 and len({str(run["final"]) for run in stored}) == 1
    assert "| raw pixels | – | 1 | 74.2 | " in (made / "tables/momentum.md").read_text()
    assert "| random init | – | 3 | 66.1 ± 0.0 | " in (made / "tables/momentum.md").read_text()

    def change(point: Point, final: dict[str, float]) -> dict[str, float]:
        return {**final, "knn": final["knn"] + 0.01 * point.seed}

    sweep = grid.load(SMALL / "momentum.yaml", "quick")
    other = [
        dataclasses.replace(point, config=point.config.model_copy(update={"seed": 1}), seed=1, signature="beef")
        for point in sweep.points
        if point.floor == "raw pixels"
    ]
    write(tmp_path, dataclasses.replace(sweep, points=(*sweep.points, *other)), steps=8, every=4, change=change)
    assert rows(tables.to_csv(tables.build(one(tmp_path))))["raw pixels"]["n"] == "2"


def test_arms_made_by_different_numerics_are_named_on_the_page(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "different numerics" not in (made / "REPORT.md").read_text()
    runs, out = tmp_path / "runs", tmp_path / "results"
    shutil.copytree(STORED / "runs", runs)
    file = runs / "momentum-quick.runs.parquet"
    found = pq.read_table(file).to_pylist()
    for run in found[:2]:
        run["tags"] = json.dumps(json.loads(run["tags"]) | {"study.numerics": "2"})
    pq.write_table(pa.Table.from_pylist(found, schema=RUNS), file)
    assert cli.main(["report", "--runs", str(runs), "--out", str(out), "--sweeps", str(SMALL)]) == 0
    said = f"made by different numerics, so not to be compared in every digit: {len(found) - 2} by 1, 2 by 2"
    assert said in capsys.readouterr().out and said in (out / "quick" / "REPORT.md").read_text()


def test_a_run_that_diverged_is_no_number(made: Path, tmp_path: Path) -> None:
    assert "m = 0.999: n = 2 of 3 (1 diverged)" in (made / "REPORT.md").read_text()
    sweep = grid.load(SMALL / "momentum.yaml", "quick")

    def change(point: Point, final: dict[str, float]) -> dict[str, float]:
        return dict.fromkeys(final, math.inf) if point.labels.get("m") == 0 else final

    write(tmp_path, sweep, steps=8, every=4, change=change)
    table = tables.build(one(tmp_path))
    row = rows(tables.to_csv(table))["0"]
    assert (row["n"], row["knn"], row["knn_sd"]) == ("0", "diverged", "")
    assert "| 0 | fails | 0 of 3 | diverged |" in tables.to_markdown(table)
    assert "nan" not in tables.to_csv(table).lower() and "inf" not in tables.to_csv(table)


def test_means_are_of_the_last_epoch_and_never_of_maxima(tmp_path: Path) -> None:
    """Three ways to reduce seeds and epochs that papers mix; in these runs they differ, and the table has the first."""
    sweep = grid.load(SMALL / "momentum.yaml", "quick")
    write(tmp_path, sweep, steps=24, every=4, change=lambda point, final: {**final, "knn": final["knn"] - 0.05})
    metrics = pq.read_table(tmp_path / "momentum-quick.metrics.parquet")
    chosen = {str(run["signature"]): run for run in runs_of(tmp_path) if run["labels"] == '{"m": 0.99}'}
    knn = {
        signature: [
            row["value"] for row in metrics.to_pylist() if row["name"] == "knn" and row["signature"] == signature
        ]
        for signature in chosen
    }
    last = np.mean([json.loads(str(run["final"]))["knn"] for run in chosen.values()])
    mean_of_maxima = np.mean([max(values) for values in knn.values()])
    maximum_of_means = np.max(np.mean(list(knn.values()), axis=0))
    table = float(rows(tables.to_csv(tables.build(one(tmp_path))))["0.99"]["knn"])
    assert table == pytest.approx(last, abs=1e-6)
    assert mean_of_maxima - last > 0.04 and maximum_of_means - last > 0.04


def test_histories_are_whole(made: Path, tmp_path: Path) -> None:
    sweep = one(STORED / "runs")
    steps = np.array([run.steps for run in sweep.runs])
    assert (sweep.histories.count["train/excess_loss"] == steps).all() and steps.max() == 24
    assert "| momentum | 17 | 0.18 core-h | 17 of 17 |" in (made / "REPORT.md").read_text()
    for kind in ("runs", "metrics"):
        file = STORED / "runs" / f"momentum-quick.{kind}.parquet"
        table = pq.read_table(file)
        gone = (
            pa.compute.and_(
                pa.compute.equal(table["step"], 5), pa.compute.equal(table["signature"], table["signature"][0])
            )
            if kind == "metrics"
            else None
        )
        pq.write_table(table.filter(pa.compute.invert(gone)) if gone is not None else table, tmp_path / file.name)
    lost = one(tmp_path)
    assert (lost.histories.count["train/excess_loss"] != [run.steps for run in lost.runs]).sum() == 1


def test_bins_keep_the_mean_of_what_was_logged() -> None:
    sweep = one(STORED / "runs")
    metrics = pq.read_table(sweep.metrics_file).to_pylist()
    for row, run in enumerate(sweep.runs):
        logged = [m["value"] for m in metrics if m["signature"] == run.signature and m["name"] == "train/accuracy"]
        binned = sweep.histories.value["train/accuracy"][row]
        assert np.isfinite(binned).sum() == len(logged), "24 steps fall into 24 of the bins"
        if logged:
            assert np.nanmean(binned) == pytest.approx(np.mean(logged))
            assert np.nanmax(sweep.histories.share["train/accuracy"][row]) == 1.0


def test_consistency_is_read_in_the_middle_of_the_run() -> None:
    sweep = one(STORED / "runs")
    metrics = pq.read_table(sweep.metrics_file).to_pylist()
    row, run = next((row, run) for row, run in enumerate(sweep.runs) if run.labels == {"m": 0})
    name = "consistency/cosine_oldest"
    middle = [
        m["value"] for m in metrics if (m["signature"], m["name"]) == (run.signature, name) and 6 <= m["step"] <= 18
    ]
    assert len(middle) == 3  # of the readings at 4, 8, …, 24
    assert sweep.histories.readings[name][row] == pytest.approx(np.mean(middle))
    assert sweep.histories.times[name][row] == 3 and sweep.histories.counted(name) == "3 readings a run"
    assert "encoded now, 3 readings a run in its middle half" in tables.legend(tables.build(sweep))
    sweep.histories.times[name][row] = 1
    assert sweep.histories.counted(name) == "1 to 3 readings a run" and sweep.histories.counted("none") == ""


def test_scales_never_share_a_cell(tmp_path: Path) -> None:
    sweeps = tmp_path / "sweeps"
    (sweeps / "scales").mkdir(parents=True)
    for name in ("momentum.yaml", "claims.yaml"):
        (sweeps / name).write_text((SMALL / name).read_text())
    for scale, epochs in (("quick", 3), ("cpu", 6)):
        text = (SMALL / "scales/quick.yaml").read_text().replace("epochs: 3", f"epochs: {epochs}")
        (sweeps / f"scales/{scale}.yaml").write_text(text)
        write(tmp_path / "runs", grid.load(sweeps / "momentum.yaml", scale), steps=8, every=4)
    found = load.load(tmp_path / "runs", sweeps)
    assert [sweep.scale for sweep in found] == ["cpu", "quick"]
    for sweep in found:
        assert {row.n for row in tables.build(sweep).rows if row.arm.floor != "raw pixels"} == {3}
    trained = [{run.signature for arm in sweep.measured for run in arm.runs} for sweep in found]
    assert len(trained[0]) == len(trained[1]) == 12 and not trained[0] & trained[1]


def test_the_page_needs_neither_network_nor_script(made: Path) -> None:
    page = (made / "report.html").read_text()
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", page))
    assert all(address.startswith("http://www.w3.org/") for address in addresses), addresses
    assert not re.search(r"<script|<link|<iframe|@import|<img|url\((?!#)", page)
    assert page.count('<svg role="img" aria-label="') == page.count("<figure>") == 3
    assert re.findall(r"</?(?:main|nav|body|html)\b", page).count("<main") == 1
    links, anchors = re.findall(r'href="#([a-z0-9-]+)"><', page), re.findall(r'<h\d id="([^"]+)"', page)
    assert set(re.findall(r'<a href="#([^"]+)"', page)) <= set(anchors), links
    assert "prefers-color-scheme: dark" in page


def test_pages_begin_with_the_momentum_table_and_the_claims(made: Path) -> None:
    text = (made / "REPORT.md").read_text()
    table, claims, rest = (text.index(mark) for mark in ("| m | paper | n |", "## Claims", "## Momentum of"))
    assert table < claims < rest and table < 200
    for picture in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (made / picture).is_file()
    assert "study sweep submit sweeps/momentum.yaml --scale quick" in text
    assert "Deviations from the paper" in text and "0123456789ab" in text


def test_text_is_escaped_in_html_and_tables_in_markdown() -> None:
    grid_ = document.Grid(["a|b", "n"], [["<x> & **y**", "1"]], 1)
    page = document.to_html("t", [document.Heading(2, "A & B"), grid_], {})
    assert "&lt;x&gt; &amp; <strong>y</strong>" in page and "<x>" not in page
    assert r"a\|b" in document.to_markdown([grid_])


def test_marked_blocks_of_a_readme_are_refreshed(made: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    marks = "<!-- include quick/tables/momentum.md -->\n{}<!-- end -->\n"
    readme.write_text("before\n" + marks.format("stale\n") + "after\n")
    report.refresh(readme, made.parent)
    text = readme.read_text()
    assert (made / "tables/momentum.md").read_text() in text and "stale" not in text
    assert text.startswith("before\n<!-- include") and text.endswith("<!-- end -->\nafter\n")
    report.refresh(readme, made.parent)
    assert readme.read_text() == text
    readme.write_text(marks.format("").replace("momentum", "nothing"))
    with pytest.raises(UserError, match="nothing"):
        report.refresh(readme, made.parent)


def test_single_runs_are_an_arm_each(tmp_path: Path) -> None:
    write(tmp_path, grid.load(SMALL / "momentum.yaml", "quick"), steps=8, every=4)
    file = tmp_path / "momentum-quick.runs.parquet"
    lone = [
        {**run, "sweep": "train", "scale": "", "axes": "[]", "labels": "{}", "floor": None} for run in runs_of(tmp_path)
    ]
    file.unlink()
    pq.write_table(pa.Table.from_pylist(lone, schema=RUNS), tmp_path / "train.runs.parquet")
    (tmp_path / "momentum-quick.metrics.parquet").rename(tmp_path / "train.metrics.parquet")
    sweep = one(tmp_path)
    assert sweep.scale == "single" and len(sweep.measured) == len(lone)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="study runs export"):
        load.load(tmp_path, SMALL)
    (tmp_path / "x-quick.runs.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(UserError, match=r"x-quick\.runs\.parquet") as error:
        load.load(tmp_path, SMALL)
    assert "\n" not in str(error.value)
    table = pa.Table.from_pylist(runs_of(STORED / "runs")).drop_columns(["labels"])
    pq.write_table(table, tmp_path / "x-quick.runs.parquet")
    with pytest.raises(UserError, match="labels"):
        load.load(tmp_path, SMALL)


@pytest.mark.parametrize("harm", ["missing", "truncated", "empty", "another table"])
def test_histories_that_cannot_be_read_are_one_line_and_nothing_is_written(tmp_path: Path, harm: str) -> None:
    """Even if it is the last that is torn."""
    runs, out = tmp_path / "runs", tmp_path / "out"
    shutil.copytree(STORED / "runs", runs)
    lone = [{**run, "sweep": "train", "scale": "", "axes": "[]", "labels": "{}"} for run in runs_of(runs)]
    pq.write_table(pa.Table.from_pylist(lone, schema=RUNS), runs / "train.runs.parquet")
    file = Path(shutil.copy(runs / "momentum-quick.metrics.parquet", runs / "train.metrics.parquet"))
    if harm == "missing":
        file.unlink()
    elif harm == "another table":
        pq.write_table(pa.table({"a": [1]}), file)
    else:
        file.write_bytes(file.read_bytes()[: 1000 if harm == "truncated" else 0])
    with pytest.raises(UserError, match=r"train\.metrics\.parquet") as error:
        report.write(runs, out, SMALL)
    assert "\n" not in str(error.value) and not out.exists()


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nothing"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="allowed is a folder that can be written") as error:
        report.write(STORED / "runs", tmp_path / out, SMALL)
    assert "\n" not in str(error.value) and error.value.exit_code == 2
    assert (tmp_path / "file").read_text() == "mine"


def arguments(*more: str) -> list[str]:
    return ["report", "--runs", str(STORED / "runs"), "--sweeps", str(SMALL), *more]


def test_a_readme_that_is_absent_is_found_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments("--out", str(tmp_path / "out"), "--readme", str(tmp_path / "gone.md"))) == 2
    assert "gone.md: no such file\n" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_one_sweep_can_be_shown_and_all_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    runs.mkdir()
    for path in (path for name in ("age", "eviction") for path in ROOT.glob(f"results/runs/{name}-quick.*")):
        shutil.copy(path, runs)
    command = ["report", "--runs", str(runs), "--sweeps", str(ROOT / "sweeps"), "--out", str(out), "--show"]
    assert cli.main([*command, "mine"]) == 2
    assert capsys.readouterr().err.endswith("--show = mine: allowed is age-quick, eviction-quick\n")
    assert not out.exists()
    assert cli.main([*command, "age-quick"]) == 0
    said = capsys.readouterr().out
    assert grid.load(ROOT / "sweeps/age.yaml", "quick").title in said
    assert grid.load(ROOT / "sweeps/eviction.yaml", "quick").title not in said
    assert {path.stem for path in out.glob("quick/tables/*.csv")} == {"age", "eviction"}


def test_a_reader_that_has_gone_makes_no_traceback(tmp_path: Path) -> None:
    """As in `study report | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        command = [sys.executable, "-m", "study", *arguments("--out", str(tmp_path))]
        buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, cwd=ROOT, env=buffered, stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")
    assert (tmp_path / "quick/report.html").is_file()


def test_the_page_says_what_was_known_and_what_its_columns_mean(made: Path) -> None:
    text = (made / "REPORT.md").read_text()
    claims = text[text.index("## Claims") : text.index("| verdict |")].replace("\n", " ")
    assert claims.count("Registered before the runs (commit 0123456). Known then was a pilot.") == 1
    legend = (made / "tables/momentum.md").read_text().splitlines()[-1]
    assert legend in text
    for column in ("paper: ImageNet top-1 in %", "pretext (%): ", "key cosine: ", "lag/run: "):
        assert column in legend
    assert "by themselves say nothing about features" in text
    assert "Measured cost of the finished runs: 0.18 core-hours." in text
    html = (made / "report.html").read_text()
    assert "also at this floor: m = 0.9 |" in text and "also at this floor: m = 0.9<" in html
    assert "| **holds** | holds, p = 0.0028 | m = 0 fails. |" in text and "<td>holds, p = 0.0028</td>" in html
    assert "| **holds** | – | m = 0.9 does worse than m = 0.99. |" in text


OWN_CLAIM = """mine:
  {sweep: own, statement: Warm wins., source: me, test: order, arms: [{T: 0.1}, {T: 0.2}]%s}
"""


@pytest.mark.parametrize("claimed", ["", OWN_CLAIM % "", OWN_CLAIM % ", registered: On Monday."])
def test_a_page_of_a_users_own_sweep_says_nothing_of_the_paper_and_of_other_claims(
    tmp_path: Path, claimed: str
) -> None:
    sweeps = tmp_path / "sweeps"
    (sweeps / "scales").mkdir(parents=True)
    (sweeps / "scales/quick.yaml").write_text((SMALL / "scales/quick.yaml").read_text())
    (sweeps / "own.yaml").write_text(
        "name: own\ntitle: Own\nbase: {dictionary: {kind: in-batch, K: null}}\naxes: {T: [0.1, 0.2]}\n"
    )
    (sweeps / "claims.yaml").write_text(claimed)
    write(tmp_path / "runs", grid.load(sweeps / "own.yaml", "quick"), steps=60, every=6)
    report.write(tmp_path / "runs", tmp_path / "out", sweeps)
    text = (tmp_path / "out/quick/REPORT.md").read_text()
    text = text[: text.index("## Deviations")]
    assert "paper" not in text and "rises first" not in text and "before the runs" not in text
    assert ("has no claim on these sweeps" in text) == (not claimed)
    assert (
        ("| verdict | after Holm | claim | source | because |" in text)
        == ("| Warm wins. | me |" in text)
        == bool(claimed)
    )
    assert ("\n\nOn Monday.\n\n" in text) == ("Monday" in claimed)


def test_registrations_that_differ_name_their_claims() -> None:
    claimed = claims.read(SMALL / "claims.yaml")
    claimed["slow-wins"] = claimed["slow-wins"].model_copy(update={"registered": ""})
    (verdicts,) = judge.judge_scale(claimed, [one(STORED / "runs")])
    texts = [block.text for block in page._verdicts(verdicts) if isinstance(block, document.Text)]
    assert texts[1:] == ["zero-fails: Registered before the runs (commit 0123456). Known then was a pilot."]


def test_how_the_papers_numbers_were_read_is_said_of_arms() -> None:
    sweep = dataclasses.replace(one(STORED / "runs"), paper=({"m": 0.9, "value": 1.0, "mark": "F"},) * 3)
    assert page._marks(sweep) == "The paper's numbers are read off a figure."
    sweep = dataclasses.replace(sweep, paper=({"m": 0, "value": "fails", "mark": "T"}, *sweep.paper))
    assert (
        page._marks(sweep)
        == "The paper's numbers are read off a figure, but for m = 0 (fails), which is read in its text."
    )


@pytest.mark.parametrize("scale", ["quick", "gpu", "imagenet"])
def test_deviations_are_numbered_without_gaps(scale: str) -> None:
    numbers = [row[0] for row in page.deviations(scale).rows]
    assert numbers == [str(i + 1) for i in range(len(numbers))] and len(numbers) > 3


def test_the_command_makes_the_same_bytes_without_torch_and_mlflow(made: Path, tmp_path: Path) -> None:
    """Another process, another time, a folder with an older report in it: the same bytes, and nothing stale."""
    code = (
        "import argparse, sys\n"
        "from study.cli import report\n"
        "assert not {'numpy', 'pyarrow', 'matplotlib', 'pydantic'} & set(sys.modules), 'slow to start'\n"
        "parser = argparse.ArgumentParser()\n"
        "report.register(parser.add_subparsers())\n"
        "arguments = parser.parse_args(sys.argv[1:])\n"
        "assert arguments.func(arguments) == 0\n"
        "assert not {'torch', 'mlflow'} & set(sys.modules)\n"
    )
    (tmp_path / "quick" / "tables").mkdir(parents=True)
    (tmp_path / "quick" / "tables" / "gone.csv").write_text("of a sweep that is no longer there")
    (tmp_path / "quick" / "mine.txt").write_text("not ours to remove")
    where = ("--runs", str(STORED / "runs"), "--out", str(tmp_path), "--sweeps", str(SMALL))
    done = subprocess.run([sys.executable, "-c", code, "report", *where], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 of 3" in done.stdout and "HOLDS     m = 0 fails." in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 80

    (tmp_path / "quick" / "mine.txt").unlink()
    first, second = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (made, tmp_path / "quick")
    )
    assert first == second
    assert {path.suffix for path in first} == {".csv", ".md", ".tex", ".json", ".html", ".svg", ".png", ".pdf"}


def test_a_thousand_runs_are_read_and_reduced_whole(tmp_path: Path) -> None:
    """1,000 runs × 12 metrics × 200 values; the goal for the whole report, figures included, is 10 s (`make bench`)."""
    count, steps = 1000, 200
    names = sorted([*histories.CURVES, "train/loss", "train/lr", *(f"consistency/cosine_age_{a}" for a in range(1, 8))])
    template = runs_of(STORED / "runs")[0]
    signatures = [f"{i:012x}" for i in range(count)]
    rows_ = [
        {**template, "signature": signature, "seed": i, "labels": json.dumps({"m": i % 250 / 250}), "floor": None}
        for i, signature in enumerate(signatures)
    ]
    pq.write_table(pa.Table.from_pylist(rows_, schema=RUNS), tmp_path / "momentum-quick.runs.parquet")
    columns = {
        "signature": pa.array(np.repeat(signatures, len(names) * steps)),
        "name": pa.array(np.tile(np.repeat(names, steps), count)),
        "step": np.tile(np.arange(1, steps + 1), count * len(names)),
        "value": np.zeros(count * len(names) * steps),
        "time_ms": np.zeros(count * len(names) * steps, dtype=np.int64),
    }
    pq.write_table(pa.table(columns).cast(METRICS), tmp_path / "momentum-quick.metrics.parquet")
    sweep = one(tmp_path)
    table = tables.build(sweep)
    assert len(table.rows) == 254 and sweep.histories.count["knn"].sum() == count * steps


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        report.write(STORED / "runs", Path(folder), SMALL)
        for name in ("tables/momentum.csv", "tables/momentum.md", "tables/momentum.tex", "claims.json"):
            shutil.copy(Path(folder) / "quick" / name, STORED / "golden" / Path(name).name)
