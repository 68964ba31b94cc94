"""Encoders: torchvision's networks under torchvision's names, unit vectors out, one initialisation a seed."""

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from study.config.schema import Encoder as Cfg
from study.model.encoder import Encoder, build
from study.model.norm import SplitBatchNorm


def cfg(arch: str, **values: object) -> Cfg:
    return Cfg.model_validate({"arch": arch, "bn": "plain", "bn_splits": 1, **values})


def parameters(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("arch", "block", "depth", "options"),
    [
        ("resnet18", BasicBlock, [2, 2, 2, 2], {}),
        ("resnet50", Bottleneck, [3, 4, 6, 3], {}),
        ("resnext50", Bottleneck, [3, 4, 6, 3], {"groups": 32, "width_per_group": 4}),
    ],
)
def test_backbone_has_torchvisions_parameters(arch: str, block: type, depth: list[int], options: dict) -> None:
    with torch.device("meta"):
        theirs = torchvision.models.ResNet(block, depth, **options)
        ours = build(cfg(arch), 224)
    theirs.fc = nn.Identity()
    assert list(parameters(ours.backbone).items()) == list(parameters(theirs).items())
    assert ours.channels == 512 * block.expansion


def test_backbone_gives_torchvisions_features() -> None:
    theirs, ours = torchvision.models.resnet18().eval(), build(cfg("resnet18"), 64).eval()
    theirs.fc = nn.Identity()
    ours.backbone.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.features(x), theirs(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("arch", "times", "channels"), [("resnet50w2", 2, 4096), ("resnet50w4", 4, 8192)])
def test_a_wide_resnet_has_every_layer_widened(arch: str, times: int, channels: int) -> None:
    with torch.device("meta"):
        narrow, wide = build(cfg("resnet50"), 224), build(cfg(arch), 224)
    assert wide.channels == channels
    for (name, shape), wide_shape in zip(
        parameters(narrow.backbone).items(), parameters(wide.backbone).values(), strict=True
    ):
        widened = [size if name == "conv1.weight" and d == 1 else times * size for d, size in enumerate(shape[:2])]
        assert list(wide_shape) == [*widened, *shape[2:]], name


def test_tiny_is_three_blocks_behind_a_stride_2_stem() -> None:
    encoder = build(cfg("tiny", stem="cifar", width=4), 32)
    maps: list[tuple[int, ...]] = []
    for module in encoder.modules():
        if isinstance(module, BasicBlock):
            module.register_forward_hook(lambda _m, _i, out: maps.append(tuple(out.shape[1:])))
    assert encoder.features(torch.randn(2, 3, 32, 32)).shape == (2, 16)
    assert maps == [(4, 16, 16), (8, 8, 8), (16, 4, 4)]
    assert build(cfg("tiny"), 32).channels == 64


def test_the_cifar_stem_keeps_the_resolution() -> None:
    backbone = build(cfg("resnet18", stem="cifar"), 32).backbone
    seen: list[Tensor] = []
    backbone.get_submodule("layer1").register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    backbone.eval()(torch.randn(1, 3, 32, 32))
    assert seen[0].shape == (1, 64, 32, 32)


@pytest.mark.parametrize(("head", "layers"), [("linear", [nn.Linear]), ("mlp", [nn.Linear, nn.ReLU, nn.Linear])])
def test_the_head_is_one_layer_or_two_with_a_relu(head: str, layers: list[type]) -> None:
    encoder = build(cfg("tiny", width=4, head=head, dim=6), 32)
    assert [type(layer) for layer in encoder.head] == layers
    assert encoder(torch.randn(3, 3, 32, 32)).shape == (3, 6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("arch", ["tiny", "pixels"])
def test_an_embedding_is_a_unit_vector_in_fp32(arch: str, autocast: bool) -> None:
    encoder: Encoder = build(cfg(arch, width=4), 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        q = encoder(torch.randn(4, 3, 16, 16))
        features = encoder.features(torch.randn(4, 3, 16, 16))
    assert q.dtype == features.dtype == torch.float32 and features.shape == (4, encoder.channels)
    torch.testing.assert_close(q.norm(dim=1), torch.ones(4))


def test_pixels_are_their_own_features_without_a_parameter() -> None:
    encoder, x = build(cfg("pixels"), 8), torch.randn(2, 3, 8, 8)
    assert not encoder.state_dict() and torch.equal(encoder.features(x), x.flatten(1))


@pytest.mark.parametrize("splits", [1, 4])
def test_bn_is_split_as_the_config_says(splits: int) -> None:
    norms = [
        m
        for m in build(Cfg(arch="tiny", width=4, bn="split", bn_splits=splits), 32).modules()
        if isinstance(m, nn.BatchNorm2d)
    ]
    assert len(norms) == 9
    assert (
        all(isinstance(m, SplitBatchNorm) and m.splits == 4 for m in norms)
        if splits == 4
        else all(type(m) is nn.BatchNorm2d for m in norms)
    )


def test_weights_and_maps_stay_channels_last() -> None:
    encoder = build(cfg("tiny", width=4), 32)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    seen: list[Tensor] = []
    encoder.backbone.get_submodule("layer3").register_forward_hook(lambda _m, _i, out: seen.append(out))
    encoder(x)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in encoder.parameters() if p.ndim == 4)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
