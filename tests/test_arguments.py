"""A command line that cannot be meant is answered by one line and exit code 2, and nothing has been begun."""

from pathlib import Path

import pytest

from study.cli import main as cli


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("frobnicate", "study: argument COMMAND: invalid choice: 'frobnicate'"),
        ("report --nosuch", "study: unrecognized arguments: --nosuch"),
        ("runs ui --port x", "study runs ui: argument --port: 'x': allowed is a whole number"),
        ("runs sync --watch --interval -3", "study runs sync: argument --interval: -3: allowed is above 0, at most"),
        ("runs sync --watch --interval x", "study runs sync: argument --interval: 'x': allowed is a number"),
        ("sweep submit any.yaml --workers x", "study sweep submit: argument --workers: 'x': allowed is a whole"),
        ("data pack any --test-share x", "study data pack: argument --test-share: 'x': allowed is a number"),
        ("runs ui --port 99999", "study: command line: --port = 99999: allowed is"),
        ("sweep plan any.yaml --cluster mars", "study sweep plan: argument --cluster: invalid choice: 'mars'"),
        ("train m", "study: command line: m: no such file; allowed is a config file, or key=value"),
    ],
)
def test_one_line_and_exit_code_2(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    try:
        code = cli.main(words.split())
    except SystemExit as left:
        code = left.code
    out, error = capsys.readouterr()
    assert (code, out) == (2, "")
    assert error.startswith(said) and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
