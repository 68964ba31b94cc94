"""Encoders from and to other programs: which tensors are read, that all of them are, and what others find in a file."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from model_fixture import images, tiny
from torch import Tensor, nn
from torch.nn import functional as F

from study.cli.main import main
from study.config.reading import resolve
from study.config.schema import Config
from study.errors import UserError
from study.model import layouts
from study.model.encoder import Encoder
from study.model.moco import MoCo
from study.run import record
from study.train import interop

State = dict[str, Tensor]


def shake(model: nn.Module) -> State:
    """BN and biases other than as initialised, where a swap of two would not be seen; the state."""
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        if not tensor.is_floating_point():
            tensor.fill_(7)
        elif tensor.ndim == 1:
            tensor.add_(torch.rand_like(tensor), alpha=0.2)
    return model.state_dict()


def trained(config: Config | None = None) -> Encoder:
    encoder = MoCo(config or tiny(), 100).f_q
    shake(encoder)
    return encoder.eval()


def torchvision_names(encoder: Encoder) -> State:
    """As the authors' ``moco/builder.py`` names one: the head is the fc of torchvision's network."""
    heads = {"head.0.": "fc.0." if len(encoder.head) > 1 else "fc.", "head.2.": "fc.2."}
    names: State = {}
    for name, tensor in encoder.state_dict().items():
        head = next((new + name.removeprefix(old) for old, new in heads.items() if name.startswith(old)), name)
        names[head.removeprefix("backbone.")] = tensor
    return names


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def file(folder: Path, content: Any, name: str = "encoder.pth") -> Path:
    torch.save(content, folder / name)
    return folder / name


def finished_run(runs: Path, config: Config, poison_keys: bool = False) -> MoCo:
    """A run of no steps, as the trainer leaves one."""
    model = MoCo(config, 100)
    shake(model.f_q)
    if poison_keys:
        for tensor in model.f_k.state_dict().values():
            tensor.fill_(-1)
    with record.start(runs, config, command=["test"]) as run:
        run.save(0, {"model": model.state_dict(), "optimiser": {}})
        run.progress(phase="evaluate", step=0, steps=0, images_per_s=0.0)
        run.finish({"knn": 0.5})
    return model


def refused(path: Path, config: Config | None = None) -> str:
    with pytest.raises(UserError) as error:
        interop.load(interop.read(path), config or tiny())
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("prefix", ["module.encoder_q.", "encoder_q.", "f_q.", "module.", ""])
@pytest.mark.parametrize("names", [torchvision_names, nn.Module.state_dict])
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_every_prefix_gives_the_same_bits(
    tmp_path: Path, prefix: str, names: Callable[[Encoder], State], head: str
) -> None:
    config = tiny({"head": head})
    encoder = trained(config)
    source = interop.read(file(tmp_path, prefixed(prefix, names(encoder))))
    assert source.said == {"arch": "tiny", "width": 4, "head": head, "dim": 8}
    loaded = interop.load(source, config).eval()
    assert torch.equal(loaded.features(images(4)), encoder.features(images(4)))
    assert torch.equal(loaded(images(4)), encoder(images(4)))


@pytest.mark.parametrize("version", [1, 2])
def test_the_authors_checkpoint_is_its_query_encoder(tmp_path: Path, version: int) -> None:
    q, k = torchvision.models.resnet18(num_classes=128), torchvision.models.resnet18(num_classes=128)
    if version == 2:
        for model in (q, k):
            model.fc = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), model.fc)
    for tensor in k.state_dict().values():
        tensor.fill_(-1)
    state = prefixed("module.encoder_q.", shake(q)) | prefixed("module.encoder_k.", k.state_dict())
    state |= {"module.queue": torch.randn(128, 16), "module.queue_ptr": torch.zeros(1).long()}
    path = file(tmp_path, {"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": {"state": {}}})
    source = interop.read(path)
    assert source.said == {
        "arch": "resnet18",
        "stem": "imagenet",
        "head": "mlp" if version == 2 else "linear",
        "dim": 128,
    }
    assert source.left_out == ("encoder_k", "queue", "queue_ptr")
    encoder = interop.load(source, resolve(source.tree(), "test")).eval()
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(encoder(x), F.normalize(q.eval()(x)), atol=1e-5, rtol=1e-4)


def test_a_runs_folder_and_its_checkpoint_are_f_q_and_never_f_k(tmp_path: Path) -> None:
    config = tiny(epochs=0)
    model = finished_run(tmp_path, config, poison_keys=True)
    folder = tmp_path / config.signature
    for path in (folder, next(folder.glob("checkpoints/*.pt"))):
        source = interop.read(path)
        assert source.config == config and source.step == 0
        loaded = interop.load(source, config).state_dict()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.f_q.state_dict().items())


def test_a_checkpoint_that_was_moved_still_loads_with_a_config_given(tmp_path: Path) -> None:
    config = tiny(epochs=0)
    finished_run(tmp_path / "runs", config)
    moved = next((tmp_path / "runs").glob("*/checkpoints/*.pt")).rename(tmp_path / "moved.pt")
    source = interop.read(moved)
    assert source.config is None and source.signature == config.signature
    interop.load(source, resolve(source.tree(), "test"))


def test_weights_without_bns_counters_load(tmp_path: Path) -> None:
    """As torchvision publishes them."""
    encoder = trained()
    state = {name: t for name, t in torchvision_names(encoder).items() if "num_batches_tracked" not in name}
    loaded = interop.load(interop.read(file(tmp_path, state)), tiny()).eval()
    assert torch.equal(loaded.features(images(4)), encoder.features(images(4)))


def test_another_scale_keeps_the_architecture_of_the_file(tmp_path: Path) -> None:
    config = tiny(epochs=0)
    finished_run(tmp_path, config)
    tree = interop.read(tmp_path / config.signature).tree({"encoder": {"arch": "resnet18"}, "data": {"name": "other"}})
    assert tree["encoder"]["arch"] == "tiny" and tree["encoder"]["width"] == 4 and tree["data"] == {"name": "other"}


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("arch", ["resnet18", "resnet50", "resnext50", "resnet50w2", "resnet50w4"])
def test_names_and_shapes_tell_the_architecture(tmp_path: Path, arch: str, stem: str) -> None:
    with torch.device("meta"):
        state = MoCo(run_of(arch, stem), 100).f_q.state_dict()
    light = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in state.items()}  # one number in the file
    said = {"arch": arch, "stem": stem, "head": "linear", "dim": 8}
    assert interop.read(file(tmp_path, light)).said == said


# --------------------------------------------------------------------------------------------- what is refused


def test_a_wrong_architecture_names_the_first_keys_that_do_not_fit(tmp_path: Path) -> None:
    path = file(tmp_path, torchvision_names(trained()))
    line = refused(path, resolve({"encoder": {"arch": "resnet18", "dim": 8}}, "test"))
    assert "encoder.arch = resnet18, encoder.stem = imagenet" in line
    assert "is missing: layer1.1.conv1.weight, layer1.1.bn1.weight, layer1.1.bn1.bias and " in line
    assert "has another shape: conv1.weight (4×3×3×3, not 64×3×7×7), bn1.weight (4, not 64)" in line
    assert "resnet50w4" in line
    deeper = torchvision_names(trained()) | {"layer4.0.conv1.weight": torch.zeros(1)}
    assert "is not in it: layer4.0.conv1.weight; allowed" in refused(file(tmp_path, deeper))


@pytest.mark.parametrize("prefix", ["module.encoder_k.", "module.base_encoder.", "model."])
def test_a_prefix_that_fits_nothing_is_never_a_random_encoder(tmp_path: Path, prefix: str) -> None:
    line = refused(file(tmp_path, prefixed(prefix, torchvision_names(trained()))))
    assert "is missing: conv1.weight, bn1.weight, bn1.bias and " in line


@pytest.mark.parametrize("absent", ["conv1.weight", "layer3.0.bn2.running_var", "fc.bias"])
def test_one_absent_tensor_is_refused(tmp_path: Path, absent: str) -> None:
    state = torchvision_names(trained())
    del state[absent]
    line = refused(file(tmp_path, state))
    assert ("is no whole network that is known here" in line) == (absent != "fc.bias")
    assert f"is missing: {absent.replace('fc.', 'head.0.')};" in line


def test_a_whole_head_may_be_absent(tmp_path: Path) -> None:
    encoder = trained()
    state = {name: tensor for name, tensor in torchvision_names(encoder).items() if not name.startswith("fc.")}
    source = interop.read(file(tmp_path, state))
    assert not source.has_head and source.said == {"arch": "tiny", "width": 4}
    loaded = interop.load(source, tiny()).eval()
    assert torch.equal(loaded.features(images(4)), encoder.features(images(4)))


class Code:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"", "cannot be read as tensors"),
        (b"no checkpoint", "cannot be read as tensors"),
        (Code(), "cannot be read as tensors"),
        ([torch.zeros(3)], "holds list: allowed is tensors by name"),
        ({}, "holds dict: allowed is tensors by name"),
        ({"epoch": 3, "model": {"a": torch.zeros(3)}}, "holds epoch, model: allowed is tensors by name"),
        ({"state_dict": {}}, "holds state_dict: allowed is tensors by name"),
    ],
    ids=["absent", "empty", "text", "code", "list", "nothing", "another layout", "an empty layout"],
)
def test_what_is_no_checkpoint_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "encoder.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert said in refused(path)
    assert not (tmp_path / "executed").exists()


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = file(tmp_path, torchvision_names(trained()))
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot be read as tensors" in refused(path)
    finished_run(tmp_path, tiny(epochs=0))
    own = next(tmp_path.glob("*/checkpoints/*.pt"))
    content = bytearray(own.read_bytes())
    content[len(content) // 2] ^= 1
    own.write_bytes(content)
    assert "damaged" in refused(own)


# ---------------------------------------------------------------------------------------------------- export


def exported(config: Config, to: str, folder: Path) -> tuple[Encoder, Path]:
    """A finished run of shaken weights, through the command."""
    model = finished_run(folder / "runs", config)
    out = folder / f"exported{layouts.SUFFIXES[to]}"
    run = str(folder / "runs" / config.signature)
    assert main(["encoder", "export", run, "--to", to, "--out", str(out)]) == 0
    return model.f_q.eval(), out


def run_of(arch: str, stem: str = "imagenet") -> Config:
    encoder = {"arch": arch, "stem": stem, "dim": 8, "bn": "plain", "bn_splits": 1}
    return tiny(encoder, size=32, epochs=0, kind="in-batch")  # no second encoder in the file


@pytest.mark.parametrize(("arch", "stem"), [("resnet18", "imagenet"), ("resnet18", "cifar"), ("resnet50", "imagenet")])
def test_torchvision_loads_an_export_as_the_command_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arch: str, stem: str
) -> None:
    encoder, path = exported(run_of(arch, stem), "torchvision", tmp_path)
    names: dict[str, Any] = {"torch": torch, "torchvision": torchvision, "nn": nn}
    exec(capsys.readouterr().err, names)
    model = names["model"].eval()
    state = torch.load(path, weights_only=True)
    assert model.load_state_dict(state, strict=False) == (["fc.weight", "fc.bias"], [])
    model.fc = nn.Identity()
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(F.normalize(model(x)), F.normalize(encoder.features(x)), atol=1e-5, rtol=1e-4)
    assert all(torch.equal(tensor, state[name]) for name, tensor in encoder.backbone.state_dict().items())
    assert state.study["config"]["encoder"]["arch"] == arch and state.study["step"] == 0


def test_timm_finds_its_names_and_no_other(tmp_path: Path) -> None:
    """timm's ResNet has torchvision's names, and with num_classes=0 no fc; its own loader is strict."""
    _, path = exported(run_of("resnet18"), "timm", tmp_path)
    model = torchvision.models.resnet18()
    model.fc = nn.Identity()
    model.load_state_dict(torch.load(path, weights_only=True))


def test_detectron2_finds_every_tensor_of_its_resnet50(tmp_path: Path) -> None:
    """The names are those of detectron2's ResNet: a stem, and res2 to res5 with a shortcut in each first block."""
    encoder, path = exported(run_of("resnet50"), "detectron2", tmp_path)
    layers = ["stem.conv1"]
    for stage, blocks in zip((2, 3, 4, 5), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            convolutions = ["conv1", "conv2", "conv3", *(["shortcut"] if block == 0 else [])]
            layers += [f"res{stage}.{block}.{convolution}" for convolution in convolutions]
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {f"{layer}.weight" for layer in layers} | {f"{layer}.norm.{name}" for layer in layers for name in norm}

    content = pickle.loads(path.read_bytes())
    assert content["__author__"] == "MOCO" and content["matching_heuristics"] is True
    assert content["study"]["encoder"]["arch"] == "resnet50"
    arrays = content["model"]
    assert arrays.keys() == expected
    state = encoder.backbone.state_dict()
    pairs = {
        "conv1.weight": "stem.conv1.weight",
        "bn1.running_mean": "stem.conv1.norm.running_mean",
        "layer1.0.downsample.0.weight": "res2.0.shortcut.weight",
        "layer2.0.downsample.1.running_var": "res3.0.shortcut.norm.running_var",
        "layer3.5.conv2.weight": "res4.5.conv2.weight",
        "layer4.2.bn3.bias": "res5.2.conv3.norm.bias",
        "layer4.2.bn3.num_batches_tracked": "res5.2.conv3.norm.num_batches_tracked",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(torch.from_numpy(arrays[theirs]), state[ours]), theirs
    assert all(torch.equal(torch.from_numpy(a), t) for a, t in zip(arrays.values(), state.values(), strict=True))


def test_an_older_numpy_reads_the_detectron2_pickle() -> None:
    content = layouts.render({"bn1.bias": torch.arange(3.0)}, "detectron2", {})
    assert b"numpy" in content and b"_core" not in content
    array = pickle.loads(content)["model"]["stem.conv1.norm.bias"]
    assert array.tolist() == [0, 1, 2] and array.flags.writeable


@pytest.mark.parametrize(
    ("config", "to", "said"),
    [
        (tiny(epochs=0), "timm", "encoder.arch = tiny: allowed is resnet18, resnet50, resnext50"),
        (tiny(epochs=0), "detectron2", "encoder.arch = tiny: allowed is resnet18"),
        (tiny({"arch": "pixels"}, epochs=0), "torchvision", "encoder.arch = pixels: allowed is"),
        (run_of("resnet18", "cifar"), "detectron2", "encoder.stem = cifar: allowed is imagenet"),
    ],
)
def test_a_network_that_a_program_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Config, to: str, said: str
) -> None:
    finished_run(tmp_path / "runs", config)
    out = tmp_path / f"out{layouts.SUFFIXES[to]}"
    command = ["encoder", "export", config.signature, "--runs-dir", str(tmp_path / "runs"), "--to", to]
    assert main([*command, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not out.exists()


def test_bad_input_is_one_line_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, out = tiny(epochs=0), tiny(epochs=0, seed=1), tmp_path / "out.pth"
    runs = tmp_path / "runs"
    for config in (one, two):
        finished_run(runs, config)
    unfinished = tiny()
    with record.start(runs, unfinished, command=["test"]) as run:
        run.save(3, {"model": MoCo(unfinished, 100).state_dict(), "optimiser": {}})
    (tmp_path / "empty").mkdir()

    def line(run: str, *more: str) -> str:
        assert main(["encoder", "export", run, "--to", "torchvision", "--runs-dir", str(runs), *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    to_out = ("--out", str(out))
    assert "no such file, and no such run" in line("nothing", *to_out)
    twin = runs / f"{one.signature[:6]}zzzzzz"
    twin.mkdir()
    (twin / "config.yaml").touch()
    assert f"allowed is one of {one.signature}, {twin.name}" in line(one.signature[:6], *to_out)
    assert "state = killed: allowed is finished" in line(unfinished.signature, *to_out)
    assert "config.yaml: cannot be read" in line(str(tmp_path / "empty"), *to_out)
    assert "allowed is a name that ends in .pth" in line(one.signature, "--out", str(tmp_path / "out.pkl"))
    assert "no such folder" in line(one.signature, "--out", str(tmp_path / "absent/out.pth"))
    assert not out.exists()
    out.write_text("mine")
    assert "exists; allowed is another name, or --force" in line(one.signature, *to_out)
    assert out.read_text() == "mine"
    assert main(["encoder", "export", str(runs / one.signature), "--to", "torchvision", *to_out, "--force"]) == 0
    assert interop.read(out).signature == one.signature
    newest = next((runs / unfinished.signature).glob("checkpoints/*.pt"))
    assert main(["encoder", "export", str(newest), "--to", "torchvision", *to_out, "--force"]) == 0
    assert interop.read(out).step == 3


# ------------------------------------------------------------------------------------------------- end to end


def test_a_run_and_its_export_are_worth_what_the_run_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = ("--runs-dir", str(tmp_path)), str(tmp_path / "tiny.pth")

    def last(*command: str) -> dict[str, Any]:
        assert main(command) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    run = last("train", "--scale", "smoke", "--threads", "1", "--json", *runs)
    final, signature = run["final"], run["signature"]
    assert last("encoder", "probe", signature[:6], "--json", *runs) == {
        "checkpoint": run["dir"],
        "signature": signature,
        "step": 16,
        "final": final,
    }
    assert main(["encoder", "export", signature, "--to", "torchvision", "--out", out, *runs]) == 0
    assert "`study encoder probe" in capsys.readouterr().err
    found = last("encoder", "probe", out, "--json")
    assert found["signature"] == signature and found["step"] == 16
    assert found["final"] == {name: value for name, value in final.items() if name != "knn_output"}
    other = last("encoder", "probe", out, "--json", "evaluation.knn_k=1", "evaluation.linear_epochs=0")
    assert other["final"].keys() == {"knn"} and other["final"] != found["final"]
    renamed = file(tmp_path, prefixed("module.", dict(torch.load(out, weights_only=True))), "renamed.pth")
    assert last("encoder", "probe", str(renamed), "--scale", "smoke", "--json")["final"] == found["final"]
