"""Figures show every arm, in words and colours that all can read, and are the same bytes each time."""

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from report_fixture import ROOT, STORED, SWEEPS, write

from study.report import figures, load, style
from study.report.drawing import Drawn, here
from study.report.histories import OLDEST
from study.report.load import SweepRuns
from study.sweep import grid
from study.sweep.grid import Point

SHAPES = ("momentum", "mechanisms", "dictionary-momentum", "shuffle")
"""One axis of momenta; two axes with a numeric one; two axes with words; one axis of words."""


@pytest.fixture(scope="module", params=SHAPES)
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepRuns, list[Drawn]]:
    """The figures of a real sweep whose first arm diverged in every seed."""
    folder = tmp_path_factory.mktemp("runs")
    sweep = grid.load(SWEEPS / f"{request.param}.yaml", "cpu")
    first = sweep.points[0].labels

    def change(point: Point, final: dict[str, float]) -> dict[str, float]:
        return dict.fromkeys(final, math.nan) if point.labels == first else final

    write(folder, sweep, steps=60, every=6, change=change)
    (runs,) = load.load(folder, SWEEPS)
    return runs, list(figures.draw(runs))


def texts(one: Drawn) -> list[Text]:
    """What is written in a figure, but for the ticks: those beyond the axes are not drawn."""
    with mpl.rc_context(style.RC):
        FigureCanvasAgg(one.figure).draw()
    ticks = {label for axes in one.figure.axes for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels()}
    found = one.figure.findobj(lambda artist: isinstance(artist, Text) and artist not in ticks)
    return [text for text in found if isinstance(text, Text) and text.get_visible() and text.get_text().strip()]


def grid_of(tmp_path: Path, axes: str, *, name: str = "mine", **more: Any) -> SweepRuns:
    """The runs of a user's own sweep, without the paper's numbers."""
    sweeps = tmp_path / "sweeps"
    (sweeps / "scales").mkdir(parents=True)
    (sweeps / "scales/quick.yaml").write_text((STORED / "sweeps/scales/quick.yaml").read_text())
    floors = "floors: {random init: {optimiser.epochs: 0}, raw pixels: {optimiser.epochs: 0, encoder.arch: pixels}}"
    (sweeps / f"{name}.yaml").write_text(f"name: {name}\ntitle: Mine\nseeds: [0, 1]\naxes: {axes}\n{floors}\n")
    write(tmp_path / "runs", grid.load(sweeps / f"{name}.yaml", "quick"), steps=60, every=6, **more)
    (runs,) = load.load(tmp_path / "runs", sweeps)
    return runs


WORDS = "{T: [0.07, 0.2, 0.5], K: {small: {dictionary.K: 64}, large: {dictionary.K: 128}}}"


@pytest.mark.parametrize(
    "axes",
    [
        "{T: [0.07, 0.2], 'LABEL': {small: {dictionary.K: 64}, large: {dictionary.K: 128}}}",
        "{T: {'LABEL': {T: 0.1}, warm: {T: 0.2}}}",
    ],
    ids=["axis", "value"],
)
def test_a_label_with_a_broken_formula_is_written_as_it_is(tmp_path: Path, axes: str) -> None:
    label = r"$\bad{$ a"
    made = list(figures.draw(grid_of(tmp_path, axes.replace("LABEL", label))))
    assert any(label in text.get_text() for one in made for text in texts(one))
    ticks = [tick.get_text() for one in made for axes in one.figure.axes for tick in axes.get_xticklabels()]
    assert ticks and not any("mathdefault" in tick for tick in ticks), "nor is a number written as a formula"
    assert all(style.render(one.figure)["svg"] for one in made)


def test_every_sweep_has_its_figures(drawn: tuple[SweepRuns, list[Drawn]]) -> None:
    sweep, made = drawn
    assert [one.name for one in made] == [sweep.name, f"{sweep.name}-training", f"{sweep.name}-consistency"]
    for arm in sweep.arms:
        said = re.search(rf"(?:^|[:;] ){re.escape(arm.name)} ([\d.]+|diverged)", made[0].alt)
        assert said is not None, "the words give every number that there is"
        assert (said[1] == "diverged") == bool(arm.diverged)
    written = " ".join(text.get_text() for text in texts(made[0])).replace("\n", " ")
    for words in ("last epoch (20)", "nothing selected", "ddof = 1", "n = 3"):
        assert words in made[0].alt and words in written, "how the numbers were made stands in the figure, and is said"


def test_an_arm_that_diverged_is_seen(drawn: tuple[SweepRuns, list[Drawn]]) -> None:
    assert any(text.get_text() == "diverged" for text in texts(drawn[1][0]))


def test_a_missing_reading_is_no_divergence(tmp_path: Path) -> None:
    words = "{encoder.bn: [plain, split, shuffle]}"

    def change(point: Point, final: dict[str, float]) -> dict[str, float]:
        return dict.fromkeys(final, math.nan) if point.labels == {"encoder.bn": "split"} else final

    runs = grid_of(tmp_path, words, change=change)
    runs.histories.readings[OLDEST][list(runs.measured[0].rows)] = math.nan
    one = next(iter(figures.draw(runs)))
    found = [[text.get_text() for text in axes.texts] for axes in one.figure.axes]
    assert [("diverged" in panel, "no reading" in panel) for panel in found] == [
        (True, False),
        (True, False),
        (True, True),
    ]


def test_a_cosine_ends_at_one(tmp_path: Path) -> None:
    runs = grid_of(tmp_path, "{encoder.bn: [plain, shuffle]}")
    for values in runs.histories.readings.values():
        values[:] = 1.0
    first, *_, last = figures.draw(runs)
    assert last.figure.axes[0].get_ylim()[1] == 1
    cosine = first.figure.axes[-1]
    assert cosine.get_xlim()[1] == 1 and cosine.get_xlim()[0] < 0.96
    assert not cosine.containers[0].lines[0].get_clip_on(), "a dot on the edge is whole"


@pytest.mark.parametrize("shared", ["all", "encoder", "none"])
def test_a_title_names_what_all_runs_share(tmp_path: Path, shared: str) -> None:
    sweep = grid_of(tmp_path, "{encoder.bn: [plain, shuffle]}")
    configs = [dict(run.config) for arm in sweep.measured for run in arm.runs]
    if shared != "all":
        configs[-1]["data.name"] = "mine"
    if shared == "none":
        configs[-1]["encoder.arch"] = "resnet50"
    arms = [
        dataclasses.replace(arm, runs=tuple(dataclasses.replace(run, config=configs.pop(0)) for run in arm.runs))
        for arm in sweep.measured
    ]
    sweep = dataclasses.replace(sweep, arms=tuple(arms))
    titles = {"all": "Here: Fashion-MNIST, small ResNet", "encoder": "Here: small ResNet", "none": "Here"}
    assert here(sweep) == titles[shared]
    assert next(iter(figures.draw(sweep))).figure.axes[0].get_title(loc="left") == titles[shared]


@pytest.mark.parametrize("axes", [WORDS, "{m: [0, 0.9, 0.99]}"])
def test_names_fit_at_every_resolution_without_the_papers_numbers(tmp_path: Path, axes: str) -> None:
    one = next(iter(figures.draw(grid_of(tmp_path, axes))))
    assert len(one.figure.axes) == 1, "no empty panel for the paper"
    for dpi in (72, 100, 200):
        one.figure.set_dpi(dpi)
        cut = [text.get_text() for text in texts(one) if text.get_window_extent().x1 > one.figure.bbox.x1]
        assert not cut, f"cut off at {dpi} dpi"


def test_no_line_runs_through_the_name_of_one_that_ends_before_it(tmp_path: Path) -> None:
    def keep(point: Point) -> bool:
        return point.floor is not None or point.labels != {"T": 0.5, "K": "large"}

    one = next(iter(figures.draw(grid_of(tmp_path, WORDS, keep=keep, change=lambda point, final: {"knn": point.seed}))))
    (axes,) = one.figure.axes
    (name,) = [text for text in texts(one) if text.get_text() == "large"]
    box = name.get_window_extent()
    for line in axes.lines:
        path = line.get_transform().transform_path(line.get_path())
        assert not path.intersects_bbox(box, filled=False), "both lines have the same values"


def test_a_name_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    write(tmp_path, grid.load(SWEEPS / "batch.yaml", "cpu"), steps=60, every=6)  # small batches lack a second rule
    (runs,) = load.load(tmp_path, SWEEPS)
    training = next(one for one in figures.draw(runs) if one.name == "batch-training")
    found = {
        (line.get_label(), line.get_color())
        for axes in training.figure.axes
        for line in axes.lines
        if not str(line.get_label()).startswith("_")
    }
    panels = [{line.get_label() for line in axes.lines} for axes in training.figure.axes]
    assert any(one < other for one in panels for other in panels), "a panel lacks names that another has"
    assert len(found) == len({label for label, _ in found}) == len({colour for _, colour in found}) > 2


def test_a_name_has_one_colour_and_place_in_all_figures(tmp_path: Path) -> None:
    write(
        tmp_path, grid.load(SWEEPS / "mechanisms.yaml", "quick"), steps=60, every=6
    )  # a queue of one batch has no age
    (runs,) = load.load(tmp_path, SWEEPS)
    legends = [
        [
            (text.get_text(), handle.get_color())
            for text, handle in zip(legend.get_texts(), legend.get_lines(), strict=True)
        ]
        for one in figures.draw(runs)
        for legend in one.figure.legends
    ]
    assert len(legends) == 2 and len(legends[1]) > 1
    assert legends[1] == [entry for entry in legends[0] if entry in legends[1]]


def test_each_curve_stands_beside_the_floors_of_its_own_metric() -> None:
    (sweep,) = load.load(STORED / "runs", STORED / "sweeps")
    one = next(iter(figures.draw(sweep)))
    written = {text.get_text(): text.get_color() for text in texts(one)}
    for label in ("kNN", "linear"):
        named = [text for text in written if re.fullmatch(rf"(random init|raw pixels), {label} [\d.]+", text)]
        assert len(named) == 2 and {written[text] for text in named} == {written[label]}
        dashed = {
            float(np.mean(line.get_ydata())): line.get_color()
            for line in one.figure.axes[0].lines
            if line.get_linestyle() == "--"
        }
        for text in named:
            height = float(text.rsplit(" ", 1)[1])
            assert any(abs(y - height) < 0.06 and colour == written[text] for y, colour in dashed.items())


def test_a_word_in_place_of_a_number_stands_at_no_value() -> None:
    (sweep,) = load.load(STORED / "runs", STORED / "sweeps")
    one = next(iter(figures.draw(sweep)))
    assert "fails,\nno number" in [text.get_text() for text in texts(one)]
    (cross,) = [line for line in one.figure.axes[1].lines if line.get_marker() == "x"]
    assert list(cross.get_ydata()) == [0] and cross.get_transform() == one.figure.axes[1].get_xaxis_transform()


def test_no_floor_strikes_the_length_of_the_run_through() -> None:
    (sweep,) = load.load(STORED / "runs", STORED / "sweeps")
    one = next(iter(figures.draw(sweep)))
    (length,) = [text for text in texts(one) if "length of the run" in text.get_text()]
    box = length.get_bbox_patch()
    assert box is not None and mpl.colors.to_hex(box.get_facecolor()) == style.PAPER
    assert length.get_zorder() > max(line.get_zorder() for line in one.figure.axes[0].lines)


def test_nothing_is_cut_off_and_no_two_names_overlap(drawn: tuple[SweepRuns, list[Drawn]]) -> None:
    for one in drawn[1]:
        canvas = one.figure.bbox
        boxes = []
        for text in texts(one):
            box = text.get_window_extent()
            assert canvas.x0 - 1 <= box.x0 and box.x1 <= canvas.x1 + 1, f"{one.name}: {text.get_text()!r} is cut off"
            assert canvas.y0 - 1 <= box.y0 and box.y1 <= canvas.y1 + 1, f"{one.name}: {text.get_text()!r} is cut off"
            boxes.append((text.get_text(), box.shrunk(0.8, 0.7)))
        for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
            assert not box_a.overlaps(box_b), f"{one.name}: {a!r} and {b!r} overlap"


def test_figures_of_the_measured_runs_explain_themselves() -> None:
    made = {one.name: one for sweep in load.load(ROOT / "results/runs", SWEEPS) for one in figures.draw(sweep)}
    for one in made.values():
        shifted = [axes.yaxis.get_offset_text().get_text() for axes in one.figure.axes if texts(one)]
        assert not any(shifted), f"{one.name}: its numbers are to be added to {shifted}"
        assert not any("-\n" in text.get_text() for text in texts(one)), f"{one.name}: a name is broken"
    assert "Not drawn, with keys of fewer than two of these ages: newest." in made["eviction-consistency"].alt
    captions = {name: one.caption for name, one in made.items()}
    assert "rises first" not in captions["batch-training"], "end-to-end stores no random keys"
    assert "with a queue or bank it rises first" in captions["mechanisms-training"]
    assert "by the present key encoder or the present f_q (for a bank" in captions["age-consistency"]
    assert "encoded by the present key encoder, against" in captions["momentum-consistency"]
    titles = {name: [axes.get_title(loc="left") for axes in one.figure.axes] for name, one in made.items()}
    assert "1 to 2 readings a run for each age above 1." in made["momentum-consistency"].alt
    assert "Cosine: 2 readings a run." in made["shuffle"].alt
    written = {name: [[text.get_text() for text in axes.texts] for axes in made[name].figure.axes] for name in made}
    for name, line in (
        ("batch", "learning-rate rule"),
        ("mechanisms", "mechanism"),
        ("dictionary-momentum", "dictionary"),
    ):
        assert all(f"lines: {line}" in panel for panel in written[name]), "words such as “linear” say what they are"
    assert titles["batch-training"] == ["lr rule: linear", "lr rule: fixed", "", ""]
    assert titles["dictionary-momentum-consistency"] == ["dictionary: queue 4096"]


def test_files_carry_no_date_and_no_version() -> None:
    (sweep,) = load.load(STORED / "runs", STORED / "sweeps")
    files = style.render(next(iter(figures.draw(sweep))).figure)
    assert not re.search(rb"<dc:date>|CreationDate|\d{4}-\d\d-\d\dT|[Mm]atplotlib v", files["svg"] + files["pdf"])
    assert b"Software" not in files["png"]


def test_a_large_grid_has_its_table_only(tmp_path: Path) -> None:
    sweeps = tmp_path / "sweeps"
    (sweeps / "scales").mkdir(parents=True)
    (sweeps / "scales/quick.yaml").write_text((STORED / "sweeps/scales/quick.yaml").read_text())
    values = [round(0.01 * i, 2) for i in range(50)]
    (sweeps / "large.yaml").write_text(
        f"name: large\ntitle: Large\naxes: {{weight_decay: {values}}}\n".replace("weight", "optimiser.weight")
    )
    write(tmp_path / "runs", grid.load(sweeps / "large.yaml", "quick"), steps=4, every=2)
    (runs,) = load.load(tmp_path / "runs", sweeps)
    assert len(runs.measured) == 50 and list(figures.draw(runs)) == []


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ground", ["#ffffff", "#0d1117"])
def test_colours_are_readable_on_the_light_and_the_dark_page(ground: str) -> None:
    for colour in style.COLOURS:
        high, low = sorted((luminance(colour), luminance(ground)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, f"{colour} on {ground}"


@given(st.lists(st.floats(0, 300), min_size=1, max_size=8), st.floats(1, 20))
def test_names_moved_apart_keep_order_distance_and_centre(heights: list[float], gap: float) -> None:
    natural = sorted(heights)
    moved = style.spread(natural, gap)
    assert len(moved) == len(natural)
    assert all(b - a >= gap - 1e-6 for a, b in itertools.pairwise(moved))
    assert sum(moved) == pytest.approx(sum(natural), abs=1e-6)
    if all(b - a >= gap for a, b in itertools.pairwise(natural)):
        assert moved == pytest.approx(natural)


def test_the_style_is_not_left_behind() -> None:
    before = dict(mpl.rcParams)
    (sweep,) = load.load(STORED / "runs", STORED / "sweeps")
    next(iter(figures.draw(sweep)))
    assert {key: mpl.rcParams[key] for key in style.RC} == {key: before[key] for key in style.RC}
