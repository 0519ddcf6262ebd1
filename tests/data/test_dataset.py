"""Building and checking a data set: splits, statistics, digest, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from normexp.data import (
    Augmentation,
    Data,
    Examples,
    Windows,
    build_image_data,
    build_text_data,
)
from normexp.data.dataset import content_digest, limit_train, validate
from normexp.data.images import compute_channel_moments
from normexp.data.sources import split_off_test, split_off_val
from normexp.errors import UserError


def examples(num_samples: int, num_classes: int = 3) -> Examples:
    generator = torch.manual_seed(num_samples)
    images = torch.randint(0, 256, (num_samples, 2, 4, 5), generator=generator, dtype=torch.uint8)
    images[:, 1] //= 3  # channels differ in mean and spread
    return Examples(images, torch.arange(num_samples) % num_classes)


def build(train: Examples, test: Examples, augmentation: Augmentation | None = None) -> Data:
    options: dict[str, Any] = {"val_fraction": 0.2, "split_seed": 0, "augmentation": augmentation}
    return build_image_data("toy", train, test, num_classes=3, **options)


def test_val_comes_out_of_train_and_test_stays():
    train, test = examples(100), examples(20)
    data = build(train, test)
    assert (len(data.train), len(data.val), len(data.test)) == (80, 20, 20)
    rows = torch.cat([data.train.tensors[0], data.val.tensors[0]]).flatten(1).tolist()
    assert sorted(rows) == sorted(train.inputs.flatten(1).tolist())
    assert torch.equal(data.test.tensors[0], test.inputs)
    assert data.input_shape == (2, 4, 5) and data.num_outputs == 3 and data.vocab_size is None
    assert build(train, test, Augmentation(0, False, 0)).augmentation is None  # all off
    validate(data)


@pytest.mark.parametrize(
    ("samples", "fraction"), [(100, 0.0), (100, 1.0), (100, -0.1), (100, 0.001), (1, 0.1)]
)
def test_fraction_that_empties_a_split_is_refused(samples: int, fraction: float):
    with pytest.raises(UserError, match=f"data.val_fraction={fraction} .* {samples} .*=0.1, or"):
        split_off_val(samples, fraction, 0)


def test_test_split_takes_a_fifth_of_each_class():
    targets = torch.tensor([0] * 50 + [1] * 20 + [2] * 10)
    rest, test = split_off_test(targets)
    assert torch.bincount(targets[test]).tolist() == [10, 4, 2]
    assert torch.equal(torch.cat([rest, test]).sort().values, torch.arange(80))


def test_channel_moments_equal_those_of_the_float_images():
    images = examples(50).inputs
    mean, std = compute_channel_moments(images)
    pixels = (images.double() / 255).transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.tensor(mean).double(), pixels.mean(dim=1))
    torch.testing.assert_close(torch.tensor(std).double(), pixels.std(dim=1, correction=0))
    constant = torch.full((4, 1, 2, 2), 51, dtype=torch.uint8)
    assert compute_channel_moments(constant) == (pytest.approx((0.2,)), (1.0,))


def test_model_inputs_follow_the_formula_under_a_replica_axis():
    data = build(examples(100), examples(20))
    images = torch.randint(0, 256, (3, 7, 2, 4, 5), dtype=torch.uint8)
    mean, std = (torch.tensor(v).view(2, 1, 1) for v in (data.mean, data.std))
    for shown in (data.model_inputs(images), data.to("cpu").model_inputs(images)):
        assert shown.dtype == torch.float32
        torch.testing.assert_close(shown, (images / 255 - mean) / std)


def test_digest_depends_on_content_shape_dtype_and_symbols():
    def digest(tensor: torch.Tensor, symbols: tuple[str, ...] | None = None) -> str:
        return content_digest([Windows(tensor, 2)], symbols)

    tokens = torch.arange(6)
    others = [digest(tokens + 1), digest(tokens.int()), digest(tokens.view(2, 3))]
    others += [digest(tokens, ("a", "b"))]
    assert digest(tokens) == digest(tokens.clone()) and len(digest(tokens)) == 16
    assert len({digest(tokens), *others}) == 5


GOOD = examples(20)
BAD_IMAGES = {
    "train.inputs is torch.float32": (Examples(GOOD.inputs.float(), GOOD.targets), GOOD),
    "20 images and 7 targets": (Examples(GOOD.inputs, GOOD.targets[:7]), GOOD),
    "targets has 3; num_outputs=3": (examples(20, num_classes=4), GOOD),
    r"test.inputs is torch.uint8 \(20, 2, 4, 3\)": (
        GOOD,
        Examples(GOOD.inputs[..., :3], GOOD.targets),
    ),
    "test is empty": (GOOD, Examples(GOOD.inputs[:0], GOOD.targets[:0])),
    "test.targets is torch.float32": (GOOD, Examples(GOOD.inputs, GOOD.targets.float())),
    "test.targets has -1": (GOOD, Examples(GOOD.inputs, GOOD.targets - 1)),
}


def strings(**changes: Any) -> Data:
    tokens = (torch.arange(24) % 9).view(6, 4)
    part = Examples(tokens, torch.tensor([0, 1] * 3), torch.ones(6, 4, dtype=torch.bool))
    fields: dict[str, Any] = dict.fromkeys(("train", "val", "test"), part)
    fields |= {"name": "toy", "task": "classification", "input_shape": (4,)}
    return Data(**fields | {"num_outputs": 2, "vocab_size": 9} | changes)


def text(**changes: Any) -> Data:
    return replace(build_text_data("toy", "abcde" * 12, 4, 1 / 3, 1 / 3), symbols=None, **changes)


def one_string(mask: torch.Tensor) -> Examples:
    return Examples(torch.zeros(1, 4).long(), torch.zeros(1).long(), mask)


BAD_TOKENS = {
    "inputs has 8; vocab_size=8": strings(vocab_size=8),
    r"must be torch.int64 \(6, 5\)": strings(input_shape=(5,)),
    "task='regression'": strings(task="regression"),
    "num_outputs=1 .*2 or more": strings(
        num_outputs=1,
        **dict.fromkeys(("train", "val", "test"), one_string(torch.ones(1, 4).bool())),
    ),
    "val is Windows": strings(val=text().val),
    "test.mask has a sample without": strings(test=one_string(torch.zeros(1, 4).bool())),
    "test.mask is torch.float32": strings(test=one_string(torch.ones(1, 4))),
    "test.tokens has 5; vocab_size=5": text(test=Windows(torch.arange(20) % 6, 4)),
}


@pytest.mark.parametrize("message", [*BAD_IMAGES, *BAD_TOKENS])
def test_inconsistent_data_are_refused(message: str):
    with pytest.raises(UserError, match=f"data=toy: .*{message}"):
        validate(BAD_TOKENS[message] if message in BAD_TOKENS else build(*BAD_IMAGES[message]))


def test_limited_training_split_is_a_subset_by_seed_and_part_of_a_larger_one():
    data = build(examples(100), examples(20))
    small, large, other = limit_train(data, 8, 0), limit_train(data, 30, 0), limit_train(data, 8, 1)
    rows = [part.train.tensors[0].flatten(1).tolist() for part in (small, large, data, other)]
    assert [len(row) for row in rows] == [8, 30, 80, 8]
    assert all(x in rows[1] for x in rows[0]) and all(x in rows[2] for x in rows[1])
    assert sorted(rows[0]) != sorted(rows[3])
    assert (small.val, small.test, small.mean, small.std) == (
        *(data.val, data.test, data.mean, data.std),
    )
    assert len({part.digest for part in (small, large, data, other)}) == 4
    validate(small)


def test_limited_text_is_its_first_blocks():
    data = build_text_data("text", "abcde" * 14, 4, val_fraction=0.2, test_fraction=0.2)
    small = limit_train(data, 3, 0)
    assert len(small.train) == 3 < len(data.train)
    assert torch.equal(
        small.train.tensors[0], data.train.tensors[0][:16]
    )  # the third block ends at any offset
    validate(small)
