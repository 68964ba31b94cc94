"""Data sets of a test's own."""

import urllib.request
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """STUDY_DATA for one test; a proxy that answers nobody keeps every download from happening."""
    for proxy in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it is made at the first use, and keeps the proxies of then
    monkeypatch.setenv("STUDY_DATA", str(tmp_path / "data"))
    return tmp_path / "data"
