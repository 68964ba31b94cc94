"""Everything in ``results/``, from the exported runs and the sweeps' YAML: the same input gives the same bytes."""

import os
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from study import strict
from study.errors import UserError
from study.report import document, figures, judge, load, page, style, tables
from study.report.load import SweepRuns
from study.report.page import Section
from study.report.verdict import Verdict
from study.run.files import write_atomic
from study.sweep import claims


def write(runs: Path, out: Path, sweeps: Path) -> list[Section]:
    """Make ``out/<scale>/`` for every scale that has runs.

    Args:
        runs: folder of the exported runs.
        out: where the scales' folders go; tables and figures in them that are no longer made are removed.
        sweeps: folder of the sweeps' YAML and of claims.yaml.

    Returns:
        The sections of all scales, for a terminal to show.

    Raises:
        UserError: no runs, a fault in one of the files, or ``out`` cannot be written; nothing is written then.
    """
    registered = claims.read(sweeps / "claims.yaml")
    order = list(dict.fromkeys(claim.sweep for claim in registered.values()))
    found = sorted(load.load(runs, sweeps), key=lambda sweep: (sweep.scale, _place(order, sweep.name)))
    for name, claim in registered.items():
        if not (sweeps / f"{claim.sweep}.yaml").is_file():
            raise UserError(f"{sweeps / 'claims.yaml'}: {name}.sweep = {claim.sweep}: allowed is a sweep in {sweeps}")
    for sweep in found:
        _ = sweep.histories  # read now: a torn file is found before anything is written
    written: list[Section] = []
    for scale, members in groupby(found, key=lambda sweep: sweep.scale):
        folder = out / scale
        here = list(members)
        judged = judge.judge_scale(registered, here)
        sections = [_write_sweep(sweep, mine, folder) for sweep, mine in zip(here, judged, strict=True)]
        _write_page(scale, sections, folder)
        written += sections
    return written


def _place(order: Sequence[str], name: str) -> int:
    """Sweeps stand in the order of their claims: momentum first; those without claims follow by name."""
    return order.index(name) if name in order else len(order)


def _write_sweep(sweep: SweepRuns, verdicts: Sequence[Verdict], folder: Path) -> Section:
    table = tables.build(sweep)
    for kind, text in (("csv", tables.to_csv), ("md", tables.to_markdown), ("tex", tables.to_tex)):
        _put(folder / "tables" / f"{sweep.name}.{kind}", text(table))
    pictures = []
    for drawn in figures.draw(sweep):
        for kind, content in style.render(drawn.figure).items():
            _put(folder / "figures" / f"{drawn.name}.{kind}", content)
        pictures.append(document.Picture(drawn.name, drawn.caption, drawn.alt))
    return Section(table, verdicts, pictures)


def _write_page(scale: str, sections: Sequence[Section], folder: Path) -> None:
    verdicts = [verdict.as_json() for section in sections for verdict in section.verdicts]
    _put(folder / "claims.json", strict.dumps(verdicts, indent=1, ensure_ascii=False) + "\n")
    blocks = page.blocks(scale, sections)
    _put(folder / "REPORT.md", document.to_markdown(blocks))
    names = [picture.name for section in sections for picture in section.pictures]
    drawings = {name: (folder / "figures" / f"{name}.svg").read_text(encoding="utf-8") for name in names}
    _put(folder / "report.html", document.to_html(f"MoCo, scale {scale}", blocks, drawings))
    _remove_others(folder / "tables", (section.table.sweep.name for section in sections))
    _remove_others(folder / "figures", names)


def _put(path: Path, content: str | bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path.parent}: {error.strerror}: allowed is a folder that can be written") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{path.parent}: Permission denied: allowed is a folder that can be written")
    write_atomic(path, content, durable=False)


def _remove_others(folder: Path, names: Iterable[str]) -> None:
    """Remove what an earlier report made of runs that are gone."""
    kept = set(names)
    for file in folder.glob("*.*") if folder.is_dir() else ():
        if file.stem not in kept:
            file.unlink()


_INCLUDE = re.compile(r"(<!-- include (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refresh(readme: Path, out: Path) -> None:
    """Put files of ``out`` between the marks ``<!-- include quick/tables/momentum.md -->`` and ``<!-- end -->``.

    Raises:
        UserError: a marked file does not exist.
    """

    def content(mark: re.Match[str]) -> str:
        file = out / mark[2]
        if not file.is_file():
            raise UserError(f"{readme}: include {mark[2]}: no such file in {out}")
        return f"{mark[1]}\n{file.read_text(encoding='utf-8')}\n{mark[3]}"

    text = readme.read_text(encoding="utf-8")
    write_atomic(readme, _INCLUDE.sub(content, text))
