"""Compiled loops: kept where they can be, shared between threads without a gap."""

from typing import Any

import pytest
import torch

from study.data import loops


def test_loops_compile_where_there_is_no_place_to_keep_them() -> None:
    nowhere: dict[str, Any] = {}
    exec("def add(x):\n    return x + 1", nowhere)  # of no file
    assert loops.kept(nowhere["add"])(1) == 2


@pytest.mark.parametrize(("threads", "n"), [(1, 7), (3, 7), (8, 7), (3, 1), (2, 0)])
def test_each_row_is_done_once_whatever_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int, n: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    done: list[int] = []
    loops.share(lambda start, stop: done.extend(range(start, stop)), n)
    assert sorted(done) == list(range(n))


def test_what_fails_in_a_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def work(start: int, stop: int) -> None:
        if start:
            raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        loops.share(work, 4)
