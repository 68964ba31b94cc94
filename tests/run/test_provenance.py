import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from study.run import provenance


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A checkout whose code is what runs; the caller stands somewhere else."""
    root = tmp_path / "project"
    (root / "study").mkdir(parents=True)
    (root / "study" / "__init__.py").write_text("VALUE = 1\n")
    git(root, "init", "--initial-branch=trunk")
    git(root, "add", ".")
    git(root, "commit", "-m", "first")
    monkeypatch.setattr(provenance, "_ROOT", root)
    monkeypatch.delenv("STUDY_SNAPSHOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return root


def test_a_clean_checkout(project):
    head = git(project, "rev-parse", "HEAD")
    assert provenance.code() == {"commit": head, "branch": "trunk", "dirty": False, "untracked": [], "diff": None}


def test_changed_code_is_dirty_and_its_diff_is_kept(project):
    (project / "study" / "__init__.py").write_text("VALUE = 2  # é\n")
    (project / "study" / "new one.py").write_text("")
    found = provenance.code()
    assert found["dirty"] is True
    assert found["untracked"] == ["study/new one.py"]
    assert "-VALUE = 1\n+VALUE = 2  # é\n" in found["diff"]
    git(project, "add", ".")
    assert "+VALUE = 2" in provenance.code()["diff"], "staged changes are changes"


def test_a_report_made_again_leaves_the_code_clean(project):
    """Otherwise the second sweep of `make reproduce-all` is dirty by the results of the first."""
    (project / "results").mkdir()
    (project / "results" / "REPORT.md").write_text("old\n")
    git(project, "add", ".")
    git(project, "commit", "-m", "results")
    (project / "results" / "REPORT.md").write_text("new\n")
    assert provenance.code()["dirty"] is False
    (project / "study" / "__init__.py").write_text("VALUE = 2\n")
    assert "REPORT" not in provenance.code()["diff"]


def test_an_untracked_file_alone_is_not_dirty(project):
    (project / "note.txt").write_text("")
    found = provenance.code()
    assert (found["dirty"], found["untracked"], found["diff"]) == (False, ["note.txt"], None)


def test_a_long_diff_is_cut_and_says_so(project, monkeypatch):
    monkeypatch.setattr(provenance, "LONGEST_DIFF", 1000)
    (project / "study" / "__init__.py").write_text("x = 1\n" * 1000)
    diff = provenance.code()["diff"]
    assert len(diff) < 1100
    assert "(cut: " in diff


def test_a_detached_head_and_a_repository_without_a_commit(project):
    git(project, "checkout", "--detach")
    assert provenance.code()["branch"] == "(detached)"
    git(project, "checkout", "--orphan", "empty")
    found = provenance.code()
    assert (found["commit"], found["branch"], found["dirty"], found["diff"]) == (None, "empty", True, None)


def test_variables_that_git_sets_in_a_hook_do_not_lead_it_astray(project, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert provenance.code()["commit"] == git(project, "rev-parse", "HEAD")


def test_a_package_installed_inside_another_project_does_not_take_its_commit(project, monkeypatch):
    installed = project / ".venv" / "site-packages"
    (installed / "study").mkdir(parents=True)
    (installed / "study" / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "_ROOT", installed)
    assert provenance.code()["commit"] is None


def test_a_snapshot_of_the_code_remembers_where_it_came_from(project, tmp_path, monkeypatch):
    (project / "study" / "__init__.py").write_text("VALUE = 2\n")
    origin, copy = provenance.code(), tmp_path / "copy"
    copy.mkdir()
    monkeypatch.setattr(provenance, "_ROOT", copy)
    assert provenance.code()["commit"] is None
    (copy / provenance.SNAPSHOT).write_text(json.dumps(origin))
    assert provenance.code() == origin
    named = tmp_path / "named.json"
    named.write_text(json.dumps({**origin, "branch": "other"}))
    monkeypatch.setenv("STUDY_SNAPSHOT", str(named))
    assert provenance.code()["branch"] == "other"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"commit": 7}'])
def test_a_damaged_snapshot_is_no_reason_to_stop(project, tmp_path, monkeypatch, content):
    monkeypatch.setenv("STUDY_SNAPSHOT", str(tmp_path / "snapshot.json"))
    (tmp_path / "snapshot.json").write_text(content)
    provenance.collect(["study"])


def test_without_git_everything_else_is_there(project, monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = provenance.collect(["study", "train"])
    assert found["commit"] is None
    assert found["command"] == ["study", "train"]
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["cpu"]
    assert found["cores"] >= 1
    json.dumps(found)


def test_versions_are_read_without_importing_the_packages():
    source = (
        "import sys, json; from study.run import provenance; print(json.dumps(provenance.versions()));"
        "sys.exit(bool({'torch', 'mlflow', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert {"python", "torch", "torchvision", "moco-study"} <= json.loads(done.stdout).keys()


def test_the_job_is_named_as_the_scheduler_does(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert provenance.job_id() is None
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    assert provenance.job_id() == "13"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert provenance.job_id() == "12_0"
    assert provenance.collect([])["slurm"] == {
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_JOB_ID": "13",
    }


def test_the_diff_is_a_file_of_its_own_and_the_code_has_one_name(project, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    clean = provenance.collect([])
    assert provenance.fingerprint(clean) == clean["commit"]
    (project / "study" / "__init__.py").write_text("VALUE = 2\n")
    dirty = provenance.collect([])
    assert provenance.fingerprint(dirty).startswith(f"{clean['commit']}+")
    provenance.write(folder, dirty)
    assert "+VALUE = 2" in (folder / "provenance.diff").read_text()
    assert provenance.read(folder)["diff"] == "provenance.diff"
    provenance.write(folder, {**provenance.read(folder), "attempts": []})
    assert "+VALUE = 2" in (folder / "provenance.diff").read_text(), "writing it again keeps the diff"
    provenance.write(folder, clean)
    assert not (folder / "provenance.diff").exists()
    assert provenance.read(tmp_path / "absent") == {}
