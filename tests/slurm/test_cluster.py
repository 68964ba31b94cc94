"""The user's cluster.yaml."""

from pathlib import Path

import pytest
import sweep_files

from study.cli import main as cli
from study.errors import UserError
from study.slurm import cluster
from study.slurm.cluster import Cluster

EXAMPLE = Path(__file__).parents[2] / "cluster.example.yaml"


def test_without_a_file_slurm_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cluster.load(None, "momentum", "quick") == Cluster.model_validate({})


def test_scale_and_sweep_change_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "partition: a\ntime: 60\ncpus: 2\ngpus: 1\n"
        "scales: {gpu: {time: 120, cpus: 3, partition: b}}\n"
        "sweeps: {momentum: {cpus: 4, partition: c}, momentum-gpu: {partition: d}}\n"
    )
    found = cluster.load(path, "momentum", "gpu")
    assert (found.partition, found.time, found.cpus, found.gpus) == ("d", 120, 4, 1)
    assert cluster.load(path, "momentum", "cpu").partition == "c"
    assert cluster.load(path, "other", "gpu").partition == "b"
    assert cluster.load(path, "other", "cpu").partition == "a"


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30", 90), ("1:30:00", 90), ("0:00:30", 1), ("2-00:00", 2880), ('"1-12:00:00"', 2160)],
)
def test_a_time_is_written_as_slurm_writes_it(tmp_path: Path, text: str, minutes: int) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"time: {text}")
    assert cluster.load(path, "s", "smoke").time == minutes


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("partion: gpu", 'partion = "gpu": unknown key; allowed is partition'),
        ("scales: {gpu: {cpu: 3}}", "scales.gpu.cpu = 3: unknown key"),
        ("sweeps: {other: {time: soon}}", 'sweeps.other.time = "soon": allowed is minutes, hours:minutes,'),
        ("time: 99:99", 'time = "99:99": allowed is minutes, hours:minutes,'),
        ("time: 1:00:60", 'time = "1:00:60": allowed is minutes, hours:minutes,'),
        ("scales: {smok: {time: 3}}", 'scales.smok = {"time": 3}: no scale; allowed is cpu, gpu, '),
        ("gpus: -1", "gpus = -1: allowed is"),
        ("memory: 16 GB", 'memory = "16 GB": allowed is text such as 16G'),
        ("scales: [gpu]", "scales = "),
        ("sbatch: {array: 0-3}", "sbatch.array = "),
        ("sbatch: {job_name: mine}", "sbatch.job_name = "),
        ("sbatch: {partition: x}", 'sbatch.partition = "x": stands in the key partition of this file'),
        ("sbatch: {cpus_per_task: 2}", "sbatch.cpus_per_task = 2: stands in the key cpus of this file"),
        ("sbatch: {mem: 1G}", "stands in the key memory"),
        ("cpus: 1\ncpus: 2", "twice"),
    ],
)
def test_bad_input_is_one_line_that_names_the_key(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        cluster.load(path, "momentum", "gpu")
    assert str(error.value).startswith(str(path))
    assert fault in str(error.value)
    assert "\n" not in str(error.value)


def test_a_scale_beside_the_sweep_may_have_its_resources(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("scales: {tiny: {time: 3}, other: {time: 4}}")
    (tmp_path / "scales").mkdir()
    (tmp_path / "scales" / "other.yaml").write_text("")
    assert cluster.of_sweep(path, sweep_files.sweep(tmp_path, "axes: {m: [0, 0.5]}")).time == 3


@pytest.mark.parametrize(
    ("text", "said"), [("partion: gpu", "cluster.yaml: partion"), (None, "cluster.yaml: cannot be read")]
)
def test_its_faults_are_told_where_there_is_no_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    monkeypatch.setenv("PATH", "")
    path = tmp_path / "cluster.yaml"
    if text:
        path.write_text(text)
    sweep = str(sweep_files.write(tmp_path, "axes: {m: [0, 0.5]}"))
    words = [sweep, "--scale", "tiny", "--cluster", "slurm", "--cluster-config", str(path)]
    for verb in ("plan", "submit"):
        assert cli.main(["sweep", verb, *words, "--runs-dir", str(tmp_path / "runs")]) == 2
        out, error = capsys.readouterr()
        assert out == "" and said in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        cluster.load(tmp_path / "none.yaml", "s", "smoke")


def test_processes_follow_the_gpus() -> None:
    assert Cluster(gpus=8).tasks_per_node == 8
    assert Cluster(gpus=0).tasks_per_node == 1
    assert Cluster(gpus=8, tasks=1).tasks_per_node == 1


def test_the_example_is_valid_and_shows_every_key() -> None:
    for scale in ("smoke", "gpu", "imagenet"):
        cluster.load(EXAMPLE, "momentum", scale)
    text = EXAMPLE.read_text()
    assert [key for key in Cluster.model_fields if f"\n{key}:" not in text and f"\n# {key}:" not in text] == []
