"""Arguments in any order: ``study train my.yaml --scale quick m=0.99``."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Words that stand after an option join the positional list named ``rest``, which argparse itself drops."""

    rest = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("type", int, whole)
        self.register("type", float, decimal)

    def error(self, message: str) -> NoReturn:
        """One line, as for all bad input, and exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known, extras = super().parse_known_args(args, namespace)
        words = [word for word in extras if self.rest and not word.startswith("-")]
        if words:
            setattr(known, self.rest, [*getattr(known, self.rest), *words])
        return known, [word for word in extras if word not in words]


def whole(text: str) -> int:
    """An argument of type ``int``."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a whole number") from None


def decimal(text: str) -> float:
    """An argument of type ``float``."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a number") from None
