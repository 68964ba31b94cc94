"""kNN and the fast linear probe against scikit-learn, and what frozen means."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch.nn import functional as F

from study.config.reading import resolve
from study.config.schema import Config
from study.data.images import Images, Split
from study.model.encoder import Encoder, build
from study.train.evaluate import encode, evaluate, fit_linear, frozen, knn_predict
from study.train.nearest import nearest

CPU = torch.device("cpu")


def blobs(n: int, C: int, classes: int, noise: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features as a ReLU and a pool leave them, around one centre a class."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, C, generator=torch.Generator().manual_seed(99))
    y = torch.randint(classes, (n,), generator=g)
    return (centres[y] + noise * torch.randn(n, C, generator=g)).relu(), y


def toy_images(seed: int = 0, n: int = 240, m: int = 90) -> Images:
    """Three classes of noisy colour."""
    rng = np.random.default_rng(seed)

    def split(count: int) -> Split:
        labels = np.arange(count, dtype=np.int64) % 3
        pixels = rng.integers(0, 120, (count, 3, 16, 16), dtype=np.uint8)
        pixels[np.arange(count), labels] += 100
        return Split(pixels, labels)

    return Images("toy", split(n), split(m), ("red", "green", "blue"), (0.3, 0.3, 0.3), (0.2, 0.2, 0.2), "digest")


def toy_config(**overrides: object) -> Config:
    return resolve(
        {
            "data": {"name": "toy", "size": 16, "eval_crop": 1.0},
            "encoder": {"arch": "tiny", "width": 4, "dim": 16, "bn": "plain", "bn_splits": 1},
            "dictionary": {"K": 64},
            "optimiser": {"batch": 32},
            "evaluation": {"knn_k": 20},
            **overrides,
        },
        "test",
    )


def tiny(config: Config) -> Encoder:
    torch.manual_seed(0)
    return build(config.encoder, config.data.size)


# ------------------------------------------------------------------------------------------------------ kNN


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3000), st.integers(1, 60), st.booleans(), st.integers(0, 2**31))
def test_nearest_gives_what_topk_gives(c: int, n: int, k: int, ties: bool, seed: int) -> None:
    similarity = torch.randn(c, n, generator=torch.Generator().manual_seed(seed))
    if ties:
        similarity = similarity.round()
    value, index = nearest(similarity, min(k, n))
    assert torch.equal(value.sort(descending=True).values, similarity.topk(min(k, n)).values)
    assert torch.equal(similarity.gather(1, index), value)
    assert all(len(set(row)) == len(row) for row in index.tolist())


@pytest.mark.parametrize(("n", "k", "T"), [(4000, 200, 0.1), (300, 7, 0.07), (50, 50, 0.1)])
def test_knn_predicts_what_scikit_learn_predicts(n: int, k: int, T: float) -> None:
    x, y = blobs(n, 12, 5, 1.5, seed=1)
    queries, truth = blobs(400, 12, 5, 1.5, seed=2)
    predicted = knn_predict(x, y, queries, 5, k, T)
    neighbours = KNeighborsClassifier(k, weights=lambda d: np.exp((1 - d) / T), metric="cosine", algorithm="brute")
    expected = neighbours.fit(x.double().numpy(), y.numpy()).predict(queries.double().numpy())
    assert (predicted.numpy() == expected).mean() > 0.995  # a vote decided by the last bits may fall either way
    assert 0.4 < (predicted == truth).double().mean() < 0.99


def test_knn_weighs_one_close_neighbour_above_two_far_ones() -> None:
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    labels = torch.tensor([2, 0, 0])
    near = torch.tensor([[1.0, 0.2]])  # cosines 0.98 and 0.20: exp(9.8) against 2·exp(2.0)
    assert knn_predict(bank, labels, near, 3, 3, 0.1).tolist() == [2]
    assert knn_predict(bank, labels, near, 3, 3, 10.0).tolist() == [0]  # nearly equal weights: the majority


def test_knn_takes_no_more_neighbours_than_images_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    x, y = blobs(30, 4, 3, 1.0, seed=1)
    with caplog.at_level(logging.WARNING):
        predicted = knn_predict(x, y, x, 3, 200, 0.1)
    assert "k = 200 is more than the 30 training images; k = 30 is used" in caplog.text
    assert torch.equal(predicted, knn_predict(x, y, x, 3, 30, 0.1))


def test_knn_does_not_overflow_at_a_low_temperature() -> None:
    x, y = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 3
    assert torch.equal(knn_predict(x, y, x, 3, 5, 1e-4), y)  # each image is its own nearest neighbour


# --------------------------------------------------------------------------------------------- linear probe


def test_linear_probe_minimises_what_scikit_learn_minimises() -> None:
    x, y = blobs(2000, 12, 5, 1.5, seed=1)
    test, truth = blobs(2000, 12, 5, 1.5, seed=2)
    weight, bias = fit_linear(x, y, 5, 100)
    reference = LogisticRegression(C=np.inf, max_iter=5000, tol=1e-8).fit(x.double().numpy(), y.numpy())
    ours = F.cross_entropy(x @ weight + bias, y).item()
    theirs = F.cross_entropy(torch.from_numpy(reference.decision_function(x.double().numpy())), y).item()
    assert ours == pytest.approx(theirs, rel=1e-4)
    predicted = (test @ weight + bias).argmax(1)
    assert (predicted.numpy() == reference.predict(test.numpy())).mean() > 0.995
    assert 0.5 < (predicted == truth).double().mean() < 0.99


def test_linear_probe_reaches_sgd_with_lr_30_on_unscaled_features() -> None:
    """The paper's optimiser on the same fixed features: 100 epochs, batch 256, ×0.1 at 60 and 80."""
    x, y = blobs(2048, 12, 5, 1.5, seed=1)
    test, truth = blobs(4000, 12, 5, 1.5, seed=2)
    x, test = x * 0.3, test * 0.3  # lr 30 suits features of about this size
    g = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(12, 5)
    torch.nn.init.normal_(layer.weight, std=0.01, generator=g)
    torch.nn.init.zeros_(layer.bias)
    sgd = torch.optim.SGD(layer.parameters(), lr=30, momentum=0.9)
    for epoch in range(100):
        sgd.param_groups[0]["lr"] = 30 * 0.1 ** ((epoch >= 60) + (epoch >= 80))
        for rows in torch.randperm(2048, generator=g).split(256):
            sgd.zero_grad()
            F.cross_entropy(layer(x[rows]), y[rows]).backward()
            sgd.step()
    theirs = (layer(test).argmax(1) == truth).double().mean()
    weight, bias = fit_linear(x, y, 5, 100)
    assert ((test @ weight + bias).argmax(1) == truth).double().mean() > theirs - 0.005


def test_linear_probe_is_bit_equal_when_repeated_and_shrugs_at_a_dead_feature() -> None:
    x, y = blobs(500, 6, 3, 1.0, seed=1)
    x[:, 2] = 0.7
    once, again = fit_linear(x, y, 3, 50), fit_linear(x, y, 3, 50)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(once, again, strict=True))
    assert not once[0][2].any()


# ------------------------------------------------------------------------------------------------ evaluate


def test_evaluation_reads_both_levels_of_one_pass_and_repeats_bit_equal() -> None:
    config, images = toy_config(), toy_images()
    encoder = tiny(config).train()
    shares: list[float] = []
    first = evaluate(encoder, images, config, CPU, linear=True, progress=shares.append)
    assert set(first) == {"knn", "knn_output", "linear"}
    assert all(0.8 < value <= 1 for value in first.values()), first
    assert shares == sorted(shares) and shares[-1] == 1
    assert encoder.training
    assert evaluate(encoder, images, config, CPU, linear=True) == first
    assert set(evaluate(encoder, images, config, CPU, linear=False)) == {"knn", "knn_output"}
    encoder.eval()
    x = encode(encoder, images, images.test, np.arange(90), config, CPU)
    view = images.test.images.astype(np.float32) / 255
    plain = torch.from_numpy((view - 0.3) / 0.2)
    with torch.no_grad():
        torch.testing.assert_close(x.features, encoder.features(plain), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.outputs, encoder(plain), rtol=1e-4, atol=1e-4)


def test_evaluation_with_bf16_agrees_with_fp32() -> None:
    images = toy_images()
    values = [
        evaluate(tiny(config), images, config, CPU, linear=True)
        for config in (toy_config(), toy_config(precision="bf16"))
    ]
    assert values[0] == pytest.approx(values[1], abs=0.05)


def test_the_bank_is_the_training_subset_only() -> None:
    config = toy_config(data={"name": "toy", "size": 16, "eval_crop": 1.0, "train_images": 60})
    images = toy_images()
    shares: list[float] = []
    evaluate(tiny(config), images, config, CPU, linear=False, progress=shares.append)
    assert shares[0] == 60 / 150


def test_test_labels_choose_nothing() -> None:
    """Only the count of hits may depend on them: relabelling the test images permutes hits, not predictions."""
    config, images = toy_config(), toy_images()
    relabelled = replace(images, test=Split(images.test.images, (images.test.labels + 1) % 3))
    encoder = tiny(config)
    true = evaluate(encoder, images, config, CPU, linear=True)
    shifted = evaluate(encoder, relabelled, config, CPU, linear=True)
    twice = replace(images, test=Split(images.test.images, (images.test.labels + 2) % 3))
    for name, value in evaluate(encoder, twice, config, CPU, linear=True).items():
        assert value + true[name] + shifted[name] == pytest.approx(1)


def test_a_diverged_encoder_reads_nan() -> None:
    config = toy_config()
    encoder = tiny(config)
    torch.nn.init.constant_(encoder.head[-1].weight, torch.nan)
    values = evaluate(encoder, toy_images(), config, CPU, linear=True)
    assert np.isnan(values["knn_output"]) and values["knn"] > 0.8 and values["linear"] > 0.8
    torch.nn.init.constant_(encoder.backbone.conv1.weight, torch.nan)
    assert all(map(np.isnan, evaluate(encoder, toy_images(), config, CPU, linear=True).values()))


def test_the_frozen_check_fails_in_train_mode_because_bn_moves() -> None:
    encoder = tiny(toy_config())
    x = torch.randn(8, 3, 16, 16)
    with frozen(encoder):
        encoder(x)
    with (
        pytest.raises(RuntimeError, match=r"not frozen: \d+ tensors changed, the first is backbone\.bn1"),
        frozen(encoder),
    ):
        encoder.train()
        encoder(x)


def test_the_frozen_check_fails_when_one_weight_moves_by_one_bit() -> None:
    encoder = tiny(toy_config())
    bias = encoder.head[-1].bias
    with pytest.raises(RuntimeError, match=r"1 tensors changed, the first is head\.0\.bias"), frozen(encoder):
        bias[3] = torch.nextafter(bias[3], torch.tensor(9.0))


def test_frozen_gives_back_each_modules_own_mode_even_after_an_error() -> None:
    encoder = tiny(toy_config()).train()
    encoder.backbone.bn1.eval()
    with pytest.raises(KeyError), frozen(encoder):
        assert not any(module.training for module in encoder.modules()) and not torch.is_grad_enabled()
        raise KeyError
    assert encoder.training and not encoder.backbone.bn1.training and torch.is_grad_enabled()
