"""``dvc repro`` makes the report from the committed runs alone: no training, no server, nothing changed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_clone_reproduces_the_committed_report_without_training(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, files):  # what a clone of this tree would hold, changes that await a commit included
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    (clone / ".venv").symlink_to(Path(sys.prefix))
    environment = os.environ | {"PYTHONPATH": str(clone), "DVC_NO_ANALYTICS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("git", "init", "-q")
    run("git", "add", "--all", "--force")
    run("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "clone")
    dvc = str(Path(sys.prefix) / "bin" / "dvc")
    printed = run(dvc, "repro", "--force", "--single-item", "report")
    assert "Running stage 'report'" in printed
    printed = run(dvc, "repro", "report")
    assert "Running stage 'sweep'" not in printed and "Running stage 'data'" not in printed
    assert run("git", "status", "--porcelain", "results") == "", "results/ is not what its runs give"
