"""Rows as a file that is kept, as a table, as JSON lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.bench import GROUPS, cost
from study.run.files import write_atomic

FILE = "bench.json"


def write(out: Path, group: str, rows: Sequence[dict[str, Any]]) -> None:
    """Put a group's rows in ``out/bench.json`` in place of its earlier ones, and draw those of the group ``cost``."""
    out.mkdir(parents=True, exist_ok=True)
    order = list(GROUPS)
    kept = [row for row in read(out) if row["group"] != group and row["group"] in order]
    whole = sorted([*kept, *rows], key=lambda row: order.index(row["group"]))
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in whole)
    write_atomic(out / FILE, f"[\n{lines}\n]\n", durable=False)
    if group == "cost":
        cost.draw(list(rows), out)


def read(out: Path) -> list[dict[str, Any]]:
    """The rows of ``out/bench.json``, none where there is no such file."""
    path = out / FILE
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return found


def print_json(rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line."""
    for row in rows:
        print(json.dumps(row, ensure_ascii=False), flush=True)


def print_table(out: Path, groups: Sequence[str]) -> None:
    """Goal and measured beside each other, then what the notes say."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [row for row in read(out) if row["group"] in groups and row["group"] != "cost"]
    table = Table("figure", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("goal", "measured", "spread", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    notes = []
    for row in rows:
        unit = f" {row['unit']}" if row["unit"] else ""
        low, high = row["spread"]
        mark = {True: Text("met", "green"), False: Text("not met", "red"), None: Text("")}[row["met"]]
        goal = f"{row['goal']}{unit}" if row["goal"] else ""
        if row["note"]:
            notes.append(f"{row['name']}: {row['note']}")
        table.add_row(row["name"], goal, f"{row['value']:g}{unit}", f"{low:g}–{high:g}", str(row["n"]), mark)
    console = Console(highlight=False)
    if rows:
        console.print(table)
        for note in notes:
            console.print(note, style="dim")
        busiest = max(row["load"] for row in rows)
        console.print(f"\n{'; '.join(sorted({row['machine'] for row in rows}))}; load while measuring up to {busiest}")
    if "cost" in groups:
        console.print(f"cost against batch, K, image size and threads: drawn in {out}/cost.svg")
    console.print(f"written: {out}/{FILE}")
