"""A data set: splits, statistics, digest, refusals; its batches and their augmentation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from normexp.data import (
    Augmentation,
    Data,
    Examples,
    Windows,
    build_image_data,
    build_row_data,
    build_text_data,
)
from normexp.errors import UserError
from normexp.training.data.batches import TrainingBatches, epoch_order, window_offset
from normexp.training.data.dataset import (
    attach_prediction,
    describe_data,
    limit_train,
    validate,
    without_samples,
)
from normexp.training.data.images import compute_channel_moments
from normexp.training.data.sources import split_off_test, split_off_val


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
    ("samples", "fraction", "enough"),
    [(100, 0.0, 0.1), (100, 1.0, 0.1), (100, -0.1, 0.1), (100, 0.001, 0.1), (4, 0.1, 0.25)],
)
def test_fraction_that_empties_a_split_is_refused(samples: int, fraction: float, enough: float):
    said = f"data.val_fraction={fraction} .* {samples} .* data.val_fraction={enough}, or"
    with pytest.raises(UserError, match=said):
        split_off_val(samples, fraction, 0)
    train, val = split_off_val(samples, enough, 0)
    assert len(train) and len(val)
    with pytest.raises(UserError, match="give more samples"):
        split_off_val(1, fraction, 0)


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


def test_digest_depends_on_content_shape_dtype_and_symbols():
    def digest(tensor: torch.Tensor, symbols: tuple[str, ...] | None = None) -> str:
        parts = [Windows(tensor, 2)] * 3
        known = {"num_outputs": 9, "input_shape": (2,), "symbols": symbols}
        return Data("toy", "language_modeling", *parts, **known).digest

    tokens = torch.arange(6)
    others = [digest(tokens + 1), digest(tokens.int()), digest(tokens.view(2, 3))]
    others += [digest(tokens, ("a", "b"))]
    assert digest(tokens) == digest(tokens.clone()) and len(digest(tokens)) == 16
    assert len({digest(tokens), *others}) == 5


GOOD = examples(20)
BAD_IMAGES = {
    "train.inputs is torch.float32": (Examples(GOOD.inputs.float(), GOOD.targets), GOOD),
    r"train.inputs is torch.uint8 \(20, 2, 4, 5\) for 7 targets": (
        Examples(GOOD.inputs, GOOD.targets[:7]),
        GOOD,
    ),
    r"as if colours came last.*permute\(0, 3, 1, 2\)": (
        Examples(GOOD.inputs.repeat(1, 4, 1, 1)[..., :3], GOOD.targets),
        GOOD,
    ),
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


@pytest.mark.parametrize("std", [[63.0, 62.1], [0.0, 0.2], [float("nan"), 0.2], [0.2], None])
def test_mean_and_deviation_of_own_data_are_those_of_floats_0_to_1(std: list[float] | None):
    with pytest.raises(UserError, match="data.std=.*: must be 2 numbers from 1e-08 to 1"):
        replace(build(GOOD, GOOD), std=std)


def test_small_maps_of_many_channels_and_nearly_constant_ones_are_data():
    inputs = torch.zeros(20, 8, 4, 4, dtype=torch.uint8)
    inputs[::2, 0, 0, 0] = 1
    data = build(Examples(inputs, GOOD.targets), Examples(inputs, GOOD.targets))
    assert data.std is not None and 0 < data.std[0] < 0.001


@pytest.mark.parametrize("white", [1, 15])  # floats 0 to 1, and 12 bits, without scaling
def test_pictures_whose_scale_was_lost_are_refused(white: int):
    floats = torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    dark = Examples((floats * white).to(torch.uint8), GOOD.targets)
    with pytest.raises(UserError, match="^data=toy: train.inputs: nearly every pixel is between 0"):
        build(dark, dark)
    build(Examples((floats * 255).to(torch.uint8), GOOD.targets), GOOD)


def test_class_names_are_as_many_as_classes():
    with pytest.raises(UserError, match="class_names has 2 names for num_outputs=3"):
        validate(replace(build(GOOD, GOOD), class_names=("cat", "dog")))


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


def images(augmentation: Augmentation | None = None) -> Data:
    """Ten grey images of 4x4; the target of image i is i."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (10, 1, 4, 4), generator=generator).to(torch.uint8)
    parts = [Examples(pixels, torch.arange(10))] * 3
    own = {"mean": (0.5,), "std": (0.25,), "augmentation": augmentation}
    return Data("dots", "classification", *parts, num_outputs=10, input_shape=(1, 4, 4), **own)


@pytest.mark.parametrize("length", [0, 4, 7, 8, 9, 11, 12, 13, 40])
def test_targets_of_a_window_are_its_inputs_shifted_by_one_at_every_offset(length: int):
    block = 4
    windows = Windows(torch.arange(length) * 7, block)
    assert len(windows) == max(length - 1 - (block - 1), 0) // block
    offsets = torch.arange(block)[:, None]  # of each replica
    batch = windows.gather(torch.arange(len(windows)).expand(block, -1), offsets)
    for offset in range(block):
        for window in range(len(windows)):
            span = [7 * i for i in range(window * block + offset, window * block + offset + 5)]
            assert batch["inputs"][offset, window].tolist() == span[:-1]
            assert batch["targets"][offset, window].tolist() == span[1:]


def test_order_and_offset_depend_on_seed_and_epoch_only():
    first = epoch_order(0, 0, 101)
    assert torch.equal(first.sort().values, torch.arange(101))
    assert torch.equal(first, epoch_order(0, 0, 101))
    for seed, epoch in ((0, 1), (1, 0)):
        assert not torch.equal(first, epoch_order(seed, epoch, 101))
    assert {window_offset(0, epoch, 4) for epoch in range(200)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("drop_last", "seen"), [(True, [0, 4, 8, 12, 16]), (False, [0, 4, 8, 10, 14])]
)
def test_steps_of_an_epoch_cover_its_order_once(drop_last: bool, seen: list[int]):
    batches = TrainingBatches(images(), [4], 4, drop_last=drop_last)
    assert [batches.num_samples_before(step) for step in range(5)] == seen
    steps = batches.steps_per_epoch
    chunk = [*batches.chunk(steps, steps, torch.float64)]  # all of epoch 1
    order = epoch_order(4, 1, 10)[: 8 if drop_last else 10]
    assert torch.equal(torch.cat([batch["targets"][0] for batch in chunk]), order)
    raw = batches.data.train.gather(order)["inputs"].double()
    shown = torch.cat([batch["inputs"][0] for batch in chunk])
    torch.testing.assert_close(shown, (raw / 255 - 0.5) / 0.25)


@pytest.mark.parametrize("augmentation", [None, Augmentation(1, True, 0)])
def test_replicas_follow_their_seeds_and_chunks_equal_single_steps(augmentation):
    both = TrainingBatches(images(augmentation), [4, 9], 3, drop_last=True)
    alone = TrainingBatches(images(augmentation), [9], 3, drop_last=True)
    for step, batch in enumerate(both.chunk(3, 3), start=3):
        (single,) = alone.chunk(step, 1)
        assert torch.equal(batch["inputs"][1], single["inputs"][0])
        assert torch.equal(batch["targets"][1], single["targets"][0])
        assert not torch.equal(batch["targets"][0], batch["targets"][1])


def test_sorted_batches_hold_the_same_samples_in_the_order_of_their_classes():
    labels = torch.tensor([2, 0, 1] * 8)
    pixels = torch.arange(24, dtype=torch.uint8).view(24, 1, 1, 1)
    part = Examples(pixels, labels)
    known = {"num_outputs": 3, "input_shape": (1, 1, 1), "mean": (0.5,), "std": (0.25,)}
    data = Data("labels", "classification", part, part, part, **known)
    steps = {}
    for order in ("shuffled", "sorted"):
        batches = TrainingBatches(replace(data, order=order), [4, 9], 8, drop_last=True)
        steps[order] = batches.chunk(3, 3)
    for shuffled, in_order in zip(*steps.values(), strict=True):
        assert torch.equal(in_order["targets"], shuffled["targets"].sort(dim=1).values)
        assert not torch.equal(in_order["targets"], shuffled["targets"])
        for key in ("inputs", "targets"):
            assert torch.equal(in_order[key].sort(dim=1).values, shuffled[key].sort(dim=1).values)
        classes = labels[(in_order["inputs"].flatten(1) * 0.25 + 0.5).mul(255).round().long()]
        assert torch.equal(classes, in_order["targets"])


def test_windows_of_a_text_start_elsewhere_each_epoch():
    parts = [Windows(torch.arange(31), 5)] * 3
    own = {"num_outputs": 31, "input_shape": (5,), "vocab_size": 31}
    batches = TrainingBatches(
        Data("count", "language_modeling", *parts, **own), [2], 1, drop_last=True
    )
    for epoch in range(3):
        (batch,) = batches.chunk(epoch * batches.steps_per_epoch, 1)
        expected = int(epoch_order(2, epoch, 5)[0]) * 5 + window_offset(2, epoch, 5)
        assert int(batch["inputs"][0, 0, 0]) == expected
        assert torch.equal(batch["targets"], batch["inputs"] + 1)


def augment_one(image: Tensor, draws: Tensor, spec: Augmentation) -> Tensor:
    """One image (C, H, W), by padding, slicing and filling."""
    height, width = image.shape[1:]
    top, left, flip, cut_row, cut_column = draws.tolist()
    num_shifts = 2 * spec.crop_padding + 1
    top, left = top % num_shifts, left % num_shifts
    padded = torch.nn.functional.pad(image, [spec.crop_padding] * 4)
    image = padded[:, top : top + height, left : left + width]
    if spec.flip and flip % 2:
        image = image.flip(-1)
    if spec.cutout:
        image = image.clone()
        top = cut_row % height - spec.cutout // 2
        left = cut_column % width - spec.cutout // 2
        image[:, max(top, 0) : top + spec.cutout, max(left, 0) : left + spec.cutout] = 0
    return image


@pytest.mark.parametrize(
    ("padding", "flip", "cutout"), list(product([0, 2], [False, True], [0, 1, 4]))
)
def test_augmentation_equals_slicing_one_image_at_a_time(padding: int, flip: bool, cutout: int):
    spec = Augmentation(padding, flip, cutout)
    images = torch.randint(1, 256, (2, 20, 3, 6, 5), generator=torch.manual_seed(0)).byte()
    draws = torch.stack([spec.draw(seed, step=2, num_samples=20) for seed in (1, 2)])
    out = spec.apply(images, draws)
    assert out.dtype == torch.uint8
    for replica, own in enumerate(draws):
        for i, image in enumerate(images[replica]):
            assert torch.equal(out[replica, i], augment_one(image, own[i], spec))


def test_draws_of_a_sample_depend_on_seed_step_and_sample_alone():
    every = Augmentation(2, True, 3).draw(seed=4, step=9, num_samples=1000)
    assert len(every.unique()) > 4990
    for num_samples in (1, 7, 16, 17, 500):
        for other in (Augmentation(2, True, 3), Augmentation(0, False, 3)):
            assert torch.equal(other.draw(4, 9, num_samples), every[:num_samples])
    for seed, step in ((4, 1), (1, 9)):
        assert not (every == Augmentation(2, True, 3).draw(seed, step, 1000)).any(dim=1).any()


def rows_of(values: Tensor) -> Data:
    targets = torch.arange(len(values)) % 2
    own = Examples(values, targets)
    return build_row_data("rows", own, own, num_classes=2, val_fraction=0.25, split_seed=0)


def test_rows_of_numbers_keep_every_digit_and_are_scaled_by_feature():
    values = torch.randn(80, 3) * torch.tensor([1e-4, 1.0, 1e4]) + torch.tensor([0, 7, -1e5])
    values = torch.cat([values, torch.full((80, 1), 3.0)], dim=1)
    data = rows_of(values)
    validate(data)
    assert data.train.inputs.dtype == torch.float32 and data.input_shape == (4,)
    inputs = data.model_inputs(data.train.inputs, torch.float64)
    assert inputs.mean(dim=0) == pytest.approx(torch.zeros(4), abs=1e-9)
    assert inputs.std(dim=0, correction=0) == pytest.approx(torch.tensor([1.0, 1, 1, 0]))
    network = torch.nn.Linear(4, 2)
    attach_prediction(network, data)
    expected = network(data.model_inputs(data.test.inputs)).argmax(dim=1)
    assert network.predict(data.test.inputs) == [*map(str, expected.tolist())]  # type: ignore[operator]
    reloaded = without_samples(describe_data(data))
    assert torch.equal(reloaded.model_inputs(values), data.model_inputs(values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            torch.randn(8, 3).double(),
            r"float64 \(8, 3\) for 8 targets, must be torch.float32",
        ),
        (torch.randn(8, 3, 1, 1), r"\(8, 3, 1, 1\) for 8 targets, must be"),
        (torch.tensor([[0.0, 1], [0, torch.nan]] * 8), "feature 1 has a value that is not finite"),
    ],
)
def test_rows_that_are_none_are_refused(values: Tensor, message: str):
    with pytest.raises(UserError, match=message):
        rows_of(values)
