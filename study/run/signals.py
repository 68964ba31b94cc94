"""Stopping on request: a handler notes the signal, and the trainer stops at its next step."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class StopRequest:
    """While entered, TERM, INT and USR2 only set ``name``; a second INT raises ``KeyboardInterrupt``.

    Handlers are installed in the main thread alone, are not passed on to forked workers, and the previous ones are
    back after leaving.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._interrupts = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for caught in CAUGHT:
                self._previous[caught] = signal.signal(caught, self._note)
            _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous:
            _entered.remove(self)
        self.restore()

    def restore(self) -> None:
        """Put the previous handlers back."""
        for caught, handler in self._previous.items():
            signal.signal(caught, signal.SIG_DFL if handler is None else handler)  # None: not set from Python
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt


_entered: list[StopRequest] = []


def _restore_in_child() -> None:
    for request in reversed(_entered):
        request.restore()
    _entered.clear()


os.register_at_fork(after_in_child=_restore_in_child)
