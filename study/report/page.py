"""What stands on the page of a scale, in which order: the first sweep's table and the claims first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.config.reading import parse_yaml
from study.report import tables
from study.report.document import Block, Code, Grid, Heading, Picture, Text
from study.report.histories import CURVES
from study.report.judge import MEANINGLESS
from study.report.load import SweepRuns, named
from study.report.tables import Table
from study.report.verdict import Verdict

_NUMBERS = """\
Each number is the mean over the seeds of an arm at the last step of its run; nothing is a maximum over a run, and no
choice was made by the labels of the test split. ± is the standard deviation over seeds with ddof = 1; it is absent with
one seed. `n` counts the seeds behind the number, as “2 of 3” where some are missing. kNN: weighted, on pooled features;
linear: a linear classifier on features encoded once; pretext: share of queries whose positive wins strictly, over the
last 1/120 of the run; key cosine: the oldest stored keys against the same views encoded now, over the readings in the
middle half of the run; lag/run: 1/(1−m) steps over the length of the run."""

_PAPER = " `paper` is the paper's linear probe on ImageNet, in per cent, unless the sweep says otherwise."

_CLAIMS = """\
The claims of `sweeps/claims.yaml` on these sweeps. A claim is decided when the whole 95 % interval of its estimate lies
on one side of the threshold: the t-interval of the differences within each seed where the claim is registered as paired
and its arms have the same seeds, else Welch's with Satterthwaite's degrees of freedom. No arm's spread is taken for
another's. With one seed it is ± the noise that stands with the claim, and there is no p-value. Beside an undecided
claim stands what its seeds can tell and how many it would take, if the SDs are as measured; from three seeds that is
rough. After Holm: what is left of a primary claim when all of this scale, run or not, are asked at 5 % together."""

_NO_CLAIMS = "`sweeps/claims.yaml` has no claim on these sweeps."

_RUNS = """\
Each run's config, tags, final values and full histories are in `results/runs/`; this page is made of them."""


@dataclass(frozen=True)
class Section:
    """A sweep with everything made of it."""

    table: Table
    verdicts: Sequence[Verdict]
    pictures: Sequence[Picture]


def blocks(scale: str, sections: Sequence[Section]) -> list[Block]:
    """The page of one scale, its sections in the order given."""
    return [
        Heading(1, f"Momentum Contrast, reproduced at scale {scale}"),
        *([Text(f"**{MEANINGLESS[scale].capitalize()}.**")] if scale in MEANINGLESS else []),
        *_opening(sections[0]),
        Heading(2, "Claims"),
        *_verdicts([verdict for section in sections for verdict in section.verdicts]),
        *(block for i, section in enumerate(sections) for block in _section(section, first=i == 0)),
        Heading(2, "How the numbers are made"),
        Text(_NUMBERS + (_PAPER if any(section.table.sweep.paper for section in sections) else "")),
        Heading(2, "Deviations from the paper"),
        deviations(scale),
        Heading(2, "Where the runs come from"),
        *_provenance([section.table.sweep for section in sections]),
    ]


def _opening(section: Section) -> list[Block]:
    sweep = section.table.sweep
    beside = ", ours beside the paper's" if any(row.paper for row in section.table.rows) else ""
    return [Text(f"**{sweep.title}**{beside}:"), *_table(section.table), *section.pictures[:1]]


def _table(table: Table) -> list[Block]:
    """A sweep's table, and what its columns mean."""
    header, rows = tables.printed(table)
    floors = sum(row.arm.floor is not None for row in table.rows)
    return [Grid(header, rows, len(table.axes), floors), Text(tables.legend(table))]


def _verdicts(verdicts: Sequence[Verdict]) -> list[Block]:
    """The claims with their answers, below what they say of their registration."""
    if not verdicts:
        return [Text(_NO_CLAIMS)]
    registered = {each.registered: [v.id for v in verdicts if v.registered == each.registered] for each in verdicts}
    said = [
        Text(text if len(registered) == 1 else f"{', '.join(names)}: {text}")
        for text, names in registered.items()
        if text
    ]
    rows = [[f"**{each.answer}**", each.after_holm, each.statement, each.source, each.reason] for each in verdicts]
    return [Text(_CLAIMS), *said, Grid(["verdict", "after Holm", "claim", "source", "because"], rows, 5)]


def _section(section: Section, first: bool) -> list[Block]:
    table, sweep = section.table, section.table.sweep
    found: list[Block] = [Heading(2, sweep.title)]
    if sweep.description:
        found.append(Text(sweep.description))
    found += [] if first else _table(table)
    if sweep.paper:
        found.append(Text(_marks(sweep)))
    missing = tables.missing(table)
    if missing:
        found.append(Text(f"Missing: {'; '.join(missing)}."))
    if apart := tables.made_apart(table):
        found.append(Text(f"The runs of this table were {apart}."))
    found += section.pictures[1 if first else 0 :]
    if section.verdicts:
        found.append(Heading(3, f"{sweep.title}: what the verdicts rest on"))
        rows = [[f"**{each.answer}**", each.id, each.rule, each.evidence] for each in section.verdicts]
        found.append(Grid(["verdict", "claim", "rule", "numbers"], rows, 4))
    if sweep.axes != ("run",):
        found += [Text("Run it again (what is done is not trained twice):"), Code(_again(sweep))]
    return found


_MARKS = {"T": "read in its text", "F": "read off a figure", "R": "read in the authors' released code or notes"}


def _marks(sweep: SweepRuns) -> str:
    """How the paper's numbers were read: most of them in one way, and the others by name."""
    read: dict[str, list[str]] = {}
    for row in sweep.paper:
        arm = ", ".join(named(axis, row[axis]) for axis in sweep.axes if axis in row)
        read.setdefault(str(row.get("mark", "")), []).append(f"{arm} ({row['value']})")
    (most, _), *others = sorted(read.items(), key=lambda item: -len(item[1]))
    but = "".join(f", but for {', '.join(arms)}, which is {_way(mark)}" for mark, arms in others)
    return f"The paper's numbers are {_way(most)}{but}."


def _way(mark: str) -> str:
    return _MARKS.get(mark, "of unstated origin")


def _again(sweep: SweepRuns) -> str:
    return (
        f"study sweep submit sweeps/{sweep.name}.yaml --scale {sweep.scale} --wait\nstudy runs export && study report"
    )


def deviations(scale: str) -> Grid:
    """Those of `deviations.yaml` that apply at this scale, numbered from 1."""
    file = Path(__file__).with_name("deviations.yaml")
    entries: list[Mapping[str, Any]] = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    applicable = [entry for entry in entries if scale in entry.get("scales", [scale])]
    rows = [
        [str(number), *(str(entry[key]).strip() for key in ("what", "paper", "here", "why", "verdict"))]
        for number, entry in enumerate(applicable, start=1)
    ]
    return Grid(["no.", "what", "paper", "here", "why", "could it change a verdict?"], rows, 6)


_ORIGIN = ("commit", "dirty", "numerics", "python", "torch", "cpu", "gpus")
"""Last parts of the tags that say where a run came from; hosts and paths stay out of the page."""


def _provenance(sweeps: Sequence[SweepRuns]) -> list[Block]:
    rows = []
    cost: dict[str, float] = {}
    for sweep in sweeps:
        done = [run for run in sweep.runs if run.state == "finished"]
        origin = [_distinct(sweep, name) for name in _ORIGIN]
        on_gpu = bool(_distinct(sweep, "gpus"))
        hours = sum(run.train_seconds * (1 if on_gpu else run.threads) for run in done) / 3600
        unit = "GPU" if on_gpu else "core"
        cost[unit] = cost.get(unit, 0.0) + hours
        whole = sum(
            sweep.histories.count[CURVES[0]][row] == run.steps
            for row, run in enumerate(sweep.runs)
            if run.state == "finished" and not run.is_probe
        )
        pretrained = sum(not run.is_probe for run in done)
        rows.append(
            [
                sweep.name,
                str(len(done)),
                f"{hours:.2f} {unit}-h",
                f"{whole} of {pretrained}",
                *origin,
            ]
        )
    header = ["sweep", "runs", "cost", "whole histories", *_ORIGIN]
    kept = [i for i, _ in enumerate(header) if i < 4 or any(row[i] for row in rows)]
    return [
        Text(_RUNS),
        Text(
            f"Measured cost of the finished runs: {' and '.join(f'{h:.2f} {unit}-hours' for unit, h in cost.items())}."
        ),
        Grid([header[i] for i in kept], [[row[i] for i in kept] for row in rows], 1),
    ]


def _distinct(sweep: SweepRuns, name: str) -> str:
    values = {
        value for run in sweep.runs for tag, value in run.tags.items() if tag.rpartition(".")[2] == name and value
    }
    shown = sorted(value[:12] if name == "commit" else value for value in values)
    return ", ".join(shown)
