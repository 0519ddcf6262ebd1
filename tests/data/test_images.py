from __future__ import annotations

from typing import Any

import pytest
import torch

from normexp.data import Augmentation, Data, Examples, Windows, build_image_data, validate
from normexp.data.images import compute_channel_moments
from normexp.errors import UserError


def examples(num_samples: int, num_classes: int = 3, seed: int = 0) -> Examples:
    generator = torch.manual_seed(seed)
    images = torch.randint(0, 256, (num_samples, 2, 4, 5), generator=generator, dtype=torch.uint8)
    images[:, 1] //= 3  # channels differ in mean and spread
    return Examples(images, torch.arange(num_samples) % num_classes)


def build(train: Examples, test: Examples, augmentation: Augmentation | None = None) -> Data:
    names = ("a", "b", "c")
    return build_image_data(
        "toy",
        train,
        test,
        class_names=names,
        val_fraction=0.2,
        split_seed=0,
        augmentation=augmentation,
    )


def test_channel_moments_equal_those_of_the_float_images():
    images = examples(50).inputs
    mean, std = compute_channel_moments(images)
    pixels = (images.double() / 255).transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.tensor(mean).double(), pixels.mean(dim=1))
    torch.testing.assert_close(torch.tensor(std).double(), pixels.std(dim=1, correction=0))


def test_constant_channel_has_standard_deviation_one():
    images = torch.full((4, 1, 2, 2), 51, dtype=torch.uint8)
    assert compute_channel_moments(images) == (pytest.approx((0.2,)), (1.0,))


def test_normalised_train_images_have_mean_zero_and_std_one_per_channel():
    data = build(examples(100), examples(20, seed=1))
    assert isinstance(data.train, Examples)
    shown = data.model_inputs(data.train.inputs)
    assert shown.dtype == torch.float32
    pixels = shown.transpose(0, 1).flatten(1)
    torch.testing.assert_close(pixels.mean(dim=1), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(pixels.std(dim=1, correction=0), torch.ones(2), atol=1e-5, rtol=0)


def test_model_inputs_follow_the_formula_under_a_replica_axis():
    data = build(examples(100), examples(20))
    images = torch.randint(0, 256, (3, 7, 2, 4, 5), dtype=torch.uint8)
    mean, std = (torch.tensor(v).view(2, 1, 1) for v in (data.mean, data.std))
    torch.testing.assert_close(data.model_inputs(images), (images / 255 - mean) / std)


def test_val_comes_out_of_train_and_test_stays():
    train, test = examples(100), examples(20, seed=1)
    data = build(train, test)
    assert (len(data.train), len(data.val), len(data.test)) == (80, 20, 20)
    assert isinstance(data.test, Examples) and torch.equal(data.test.inputs, test.inputs)
    assert data.input_shape == (2, 4, 5) and data.num_outputs == 3 and data.vocab_size is None


def test_moving_data_keeps_digest_and_normalisation():
    data = build(examples(100), examples(20))
    moved = data.to("cpu")
    assert moved.digest == data.digest and len(data.digest) == 16
    assert moved.model_inputs(examples(2).inputs).shape == (2, 2, 4, 5)


def test_digest_follows_the_content():
    train = examples(100)
    first = build(train, examples(20)).digest
    train.inputs[7, 0, 0, 0] ^= 1
    assert first != build(train, examples(20)).digest


def test_augmentation_that_is_off_is_none():
    data = build(examples(100), examples(20), Augmentation(0, False, 0))
    assert data.augmentation is None


def invalid_examples() -> list[tuple[Examples, Examples, str]]:
    good = examples(20)
    floats = Examples(good.inputs.float(), good.targets)
    smaller = Examples(good.inputs[..., :3], good.targets)
    empty = Examples(good.inputs[:0], good.targets[:0])
    uneven = Examples(good.inputs, good.targets[:7])
    return [
        (floats, good, r"torch.float32 \(20, 2, 4, 5\), must be torch.uint8"),
        (good, smaller, r"test.inputs is torch.uint8 \(20, 2, 4, 3\), must be"),
        (good, floats, "test.inputs is torch.float32"),
        (examples(20, num_classes=4), good, "targets has 3; num_outputs=3 allows 0 to 2"),
        (good, empty, "test is empty"),
        (uneven, good, "20 images and 7 targets"),
        (good, Examples(good.inputs, good.targets.float()), "test.targets is torch.float32"),
        (good, Examples(good.inputs, good.targets - 1), "test.targets has -1"),
        (good, Examples(good.inputs, good.targets, good.inputs > 3), "images have no mask"),
    ]


@pytest.mark.parametrize(("train", "test", "message"), invalid_examples())
def test_inconsistent_images_are_refused(train: Examples, test: Examples, message: str):
    with pytest.raises(UserError, match=f"data=toy: .*{message}"):
        build(train, test)


def token_data(**changes: Any) -> Data:
    tokens = (torch.arange(24) % 9).view(6, 4)
    part = Examples(tokens, torch.tensor([0, 1] * 3), torch.ones(6, 4, dtype=torch.bool))
    fields: dict[str, Any] = {
        "train": part,
        "val": part,
        "test": part,
        "num_outputs": 2,
        "vocab_size": 9,
    }
    fields |= {"name": "toy", "task": "classification", "input_shape": (4,)}
    return Data(**fields | changes)


def window_data(**changes: Any) -> Data:
    part = Windows(torch.arange(20) % 5, 4)
    fields: dict[str, Any] = {
        "train": part,
        "val": part,
        "test": part,
        "num_outputs": 5,
        "vocab_size": 5,
        "bytes_per_token": {"train": 1.0, "val": 1.0, "test": 1.0},
    }
    fields |= {"name": "toy", "task": "language_modeling", "input_shape": (4,)}
    return Data(**fields | changes)


def test_consistent_tokens_pass_and_are_shown_unchanged():
    for data in (token_data(), window_data()):
        assert validate(data) is data
        tokens = torch.arange(4)
        assert data.model_inputs(tokens) is tokens


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (token_data(vocab_size=8), "inputs has 8; vocab_size=8 allows 0 to 7"),
        (token_data(input_shape=(5,)), r"must be torch.int64 \(6, 5\)"),
        (token_data(class_names=("a",)), "1 class_names for num_outputs=2"),
        (token_data(symbols=("a",)), "1 symbols for vocab_size=9"),
        (token_data(task="regression"), "task='regression' must be"),
        (token_data(val=window_data().val), "val is Windows; classification needs Examples"),
        (
            token_data(
                test=Examples(
                    torch.zeros(1, 4).long(), torch.zeros(1).long(), torch.zeros(1, 4).bool()
                )
            ),
            "test.mask has a sample without a real token",
        ),
        (
            token_data(
                test=Examples(torch.zeros(1, 4).long(), torch.zeros(1).long(), torch.ones(1, 4))
            ),
            "test.mask is torch.float32",
        ),
        (window_data(num_outputs=6), "vocab_size=5 must be num_outputs=6"),
        (window_data(bytes_per_token=None), "bytes_per_token=None must be above 0"),
        (window_data(input_shape=(3,)), r"block_size=4 differs from input_shape=\(3,\)"),
        (
            window_data(val=Windows(torch.arange(7) % 5, 4)),
            "val has 7 tokens; block_size=4 needs at least 8",
        ),
        (window_data(test=Windows(torch.arange(20) % 6, 4)), "test.tokens has 5; vocab_size=5"),
    ],
)
def test_inconsistent_tokens_are_refused(data: Data, message: str):
    with pytest.raises(UserError, match=f"data=toy: .*{message}"):
        validate(data)
