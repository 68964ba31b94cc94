"""Where tables go: a terminal, whose width they keep to, or a pipe, which has none."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

UNBOUNDED = 1000
"""Columns of a pipe: nothing is cut there, unless COLUMNS says so."""


def stdout() -> "Console":
    """A console on stdout; like a terminal, COLUMNS has a width."""
    from rich.console import Console

    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS", "").isdigit()
    return Console(width=UNBOUNDED if piped else None, highlight=False)
