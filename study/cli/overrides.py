"""The ``key=value`` words of a command line."""

import sys
from collections.abc import Iterable
from typing import Any


def read_overrides(words: Iterable[str]) -> dict[str, Any]:
    """The tree of ``key=value`` words, each echoed on stderr.

    Raises:
        UserError: a word is no ``key=value``, or a key stands twice.
    """
    from study.config.reading import flatten, parse_overrides
    from study.config.schema import render

    overrides = parse_overrides(words)
    for key, value in flatten(overrides).items():
        print(f"override: {key} = {render(value)}", file=sys.stderr)
    return overrides
