"""Where tables go: a terminal, whose width they keep to, or a pipe, which has none."""

import os
import sys
from typing import TYPE_CHECKING

from study.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

UNBOUNDED = 1000
"""Columns of a pipe: nothing is cut there, unless COLUMNS says so."""


def stdout() -> "Console":
    """A console on stdout; like a terminal, COLUMNS has a width."""
    from rich.console import Console

    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    return Console(width=UNBOUNDED if piped else None, highlight=False)


def confirm(question: str) -> None:
    """Ask on the terminal.

    Raises:
        UserError: the answer is no, or nobody can answer.
    """
    if not sys.stdin.isatty():
        raise UserError(f"command line: {question}: nobody is here to say yes; allowed is --yes")
    if input(f"{question}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError(f"{question}: not done")
