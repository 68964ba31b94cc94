"""MLflow's UI as a reader meets it: exported and local runs, links that open on arms, columns and curves."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracking_fixture import fresh_store, held, line, make, sweep

from study.errors import UserError
from study.run import export
from study.run.facts import Place
from study.tracking import ui, view
from study.tracking.store import Store, resolve

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported runs without folders here, one of which diverged, and a local run of another sweep; moved since."""
    root = tmp_path_factory.mktemp("project")
    away, here = root / "away", root / "before" / "runs"
    diverged = make(away, 2, steps=7, final={"knn": math.nan, "train/loss": math.nan})
    with (diverged / "metrics.jsonl").open("a") as file:
        file.write(line(8, {"train/loss": math.nan, "train/lr": 0.03}))
    sweep(away, [*(make(away, seed, steps=60) for seed in range(2)), diverged])
    export.export(away, root / "before" / "results")
    shutil.rmtree(away)
    fresh_store(here)
    sweep(here, [make(here, 5)], name="mechanisms")
    list(ui.fill(here, root / "before" / "results", resolve(here)))
    (root / "before").rename(root / "moved")
    return root / "moved"


@pytest.fixture(scope="module")
def served(project: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """`study runs ui` itself: the address and the links that it prints, by `sweep arms|curves`."""
    command = [sys.executable, "-u", "-m", "study", "runs", "ui", "--port", "5800"]
    paths = ["--runs-dir", str(project / "runs"), "--files", str(project / "results")]
    with subprocess.Popen([*command, *paths], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        links, name, address = {}, "", ""
        for line in process.stdout:
            words = line.split()
            if len(words) == 2 and words[0] in {"arms", "curves"}:
                links[f"{name} {words[0]}"] = words[1]
            elif line.startswith("MLflow serves"):
                address = words[4].rstrip(";")
                break
            elif len(words) == 1:
                name = words[0]
        yield address, links
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    with socket.socket() as probe, pytest.raises(OSError):
        probe.connect(("127.0.0.1", int(address.rpartition(":")[2])))


def test_all_runs_are_served_and_artifacts_survive_a_move(served: tuple[str, dict[str, str]], project: Path) -> None:
    from mlflow import MlflowClient

    address, links = served
    assert sorted(links) == [
        "mechanisms-smoke arms",
        "mechanisms-smoke curves",
        "momentum-smoke arms",
        "momentum-smoke curves",
    ]
    found = held(address)
    assert sorted(experiment for experiment, _ in found) == ["mechanisms-smoke", *["momentum-smoke"] * 3]
    local = next(run for (experiment, _), run in found.items() if experiment == "mechanisms-smoke")
    client = MlflowClient(address, address)
    assert "seed: 5" in Path(client.download_artifacts(local["id"], "config.yaml")).read_text()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_links_open_arms_columns_and_curves(served: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1900, "height": 1400})
        page.goto(served[1]["momentum-smoke arms"])
        for text in ("m=0.99 seed=0", "m=0.99 seed=1", "arm.m", "study.seed", "knn", "0.51"):
            expect(page.get_by_text(text, exact=True).first).to_be_visible(timeout=30_000)
        page.goto("about:blank")
        page.goto(served[1]["momentum-smoke curves"])
        for name in ("knn", "train/loss"):
            expect(page.get_by_role("heading", name=name, level=4).first).to_be_visible(timeout=30_000)
        expect(page.locator(".scatterlayer .trace").first).to_be_attached(timeout=30_000)
        if folder := os.environ.get("STUDY_SCREENSHOTS"):
            page.wait_for_timeout(2000)
            page.screenshot(path=Path(folder) / "curves.png")
        browser.close()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_diverged_run_has_its_loss_curve_and_a_view_that_has_it_first(served: tuple[str, dict[str, str]]) -> None:
    from playwright.sync_api import expect, sync_playwright

    address, links = served
    run = next(run for run in held(address).values() if "diverged" in run["tags"])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1900, "height": 1400})
        first, last = (page.locator(f'[row-index="{row}"] a', has_text="m=0.99 seed=") for row in (0, 2))
        page.goto(links["momentum-smoke arms"])
        expect(first).to_have_text("m=0.99 seed=1", timeout=30_000)
        expect(last).to_have_text("m=0.99 seed=2")
        page.get_by_text("Arms and curves").click()
        page.get_by_text("Diverged first").click()
        expect(first).to_have_text("m=0.99 seed=2", timeout=30_000)
        expect(page.get_by_text("8", exact=True)).to_be_visible()  # the step
        experiment = links["momentum-smoke arms"].split("/experiments/")[1].partition("/")[0]
        page.goto("about:blank")
        page.goto(f"{address}/#/experiments/{experiment}/runs/{run['id']}")
        expect(page.get_by_text("Diverged at step 8").first).to_be_visible(timeout=30_000)
        page.get_by_role("tab", name="Model metrics").click()
        expect(page.get_by_role("heading", name="loss", exact=True)).to_be_visible(timeout=30_000)
        browser.close()


def test_the_view_is_small_enough_for_a_tag_and_the_same_each_time() -> None:
    place = Place("mechanisms", "imagenet", "t", "d", tuple(f"a.long.axis.name.{i}" for i in range(12)), "probe/top1")
    kept = view.tags(place)
    assert list(kept) == ["mlflow.sharedViewState.study", "mlflow.sharedViewState.study-diverged"]
    assert view.tags(place) == kept
    for value in kept.values():
        assert len(value) < 5000 and json.loads(value)["state"].startswith("deflate;")


def test_nothing_to_show_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs, and no exported ones"):
        list(ui.fill(tmp_path, tmp_path, Store("sqlite:////nowhere/x.db", tmp_path, "store")))


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ui.free_port(port) != port


def test_a_proxy_is_not_asked_for_a_server_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # answers nobody
    monkeypatch.setattr(urllib.request, "_opener", None)  # which keeps the proxies of its first use
    with ui.server(fresh_store(tmp_path), 5700) as address:
        assert address.startswith("http://127.0.0.1:57")
