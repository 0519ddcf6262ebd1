"""k micro-batches and k ghost sub-batches of the same samples are one training, to 1e-12."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from training_cases import (
    assert_same_state,
    batch_norm,
    build_module,
    convnet,
    image_data,
    resnet20,
    state_of,
    text_data,
    text_encoder,
    train,
)

from normexp.batching.sizes import Sizes
from normexp.norms.factory import NormFactory
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm
from normexp.norms.rms import RMSNorm
from normexp.norms.slots import Slots


class StrangerNorm(nn.Module):
    """A norm that the project does not know: divides by a running mean of |x| over the batch."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.register_buffer("size", torch.ones(num_features))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (N, C, *)
        shape = (1, -1, *[1] * (x.ndim - 2))
        if self.training:
            size = x.abs().mean(dim=(0, *range(2, x.ndim)))
            self.size = 0.8 * self.size + 0.2 * size.detach()  # reassigned, as many do
            self.count += 1
        else:
            size = self.size
        return x / (size + 0.1).view(shape) * self.weight.view(shape)


CASES = {
    "convnet": (convnet, image_data),
    "resnet20": (resnet20, image_data),
    "text_encoder": (text_encoder, text_data),
}


def assert_same_training(tmp_path: Path, first: Sizes, *others: Sizes, **choices):
    expected = train(build_module(sizes=first, lr=0.01, **choices), tmp_path / "first.ckpt")
    for index, sizes in enumerate(others):
        found = train(build_module(sizes=sizes, lr=0.01, **choices), tmp_path / f"{index}.ckpt")
        assert_same_state(found, expected, 1e-12)


@pytest.mark.parametrize("make_norm", [batch_norm, StrangerNorm], ids=["batch", "stranger"])
@pytest.mark.parametrize("case", CASES)
def test_accumulation_equals_ghost_sub_batches(tmp_path: Path, case: str, make_norm):
    model, data = CASES[case]
    common = {"model": model, "make_norm": make_norm, "data": data()}
    assert_same_training(tmp_path, Sizes(8, None, 2), Sizes(8, 2), Sizes(8, 4, 2), **common)


SLOTS = {
    "convnet": Slots(act="tlu", conv="scaled_weight_standardized"),
    "resnet20": Slots(conv="weight_standardized", residual_scale=0.0),
    "text_encoder": Slots(placement="peri", qk_norm=True, residual_scale=0.5),
}


@pytest.mark.parametrize("case", SLOTS)
def test_accumulation_equals_ghost_sub_batches_with_slots(tmp_path: Path, case: str):
    model, data = CASES[case]

    def with_slots(norm: NormFactory) -> nn.Module:
        sizes = {"norm_batch_size": norm.norm_batch_size}
        return model(NormFactory(norm.make, view=norm.view, slots=SLOTS[case], **sizes))

    assert_same_training(tmp_path, Sizes(8, 2), Sizes(8, None, 2), model=with_slots, data=data())


@pytest.mark.parametrize("case", CASES)
def test_accumulation_equals_ghost_when_the_last_part_is_short(tmp_path: Path, case: str):
    model, data = CASES[case]
    count = 22 if case == "text_encoder" else 46  # a last batch of 6, in parts of 4 and 2
    make_norm = StrangerNorm if case == "convnet" else batch_norm  # the former merges by shares
    common = {"model": model, "data": data(count), "drop_last": False, "make_norm": make_norm}
    assert_same_training(tmp_path, Sizes(8, 4), Sizes(8, None, 4), **common)


PER_SAMPLE = {
    "group": lambda c: GroupNorm(c, eps=1e-5, num_groups=4),
    "layer": lambda c: LayerNorm(c, eps=1e-5),
    "rms": lambda c: RMSNorm(c, eps=1e-5),
}


@pytest.mark.parametrize("norm", PER_SAMPLE)
def test_norm_within_samples_trains_alike_under_every_split(tmp_path: Path, norm: str):
    sizes = (Sizes(8), Sizes(8, 2), Sizes(8, None, 4), Sizes(8, 1))
    assert_same_training(tmp_path, *sizes, make_norm=PER_SAMPLE[norm])


def test_running_state_of_a_split_step_holds_the_moments_of_all_its_samples(tmp_path: Path):
    """The input of the first site does not depend on the split, so nor must its running state."""
    runs = [build_module(sizes=s, lr=1e-30) for s in (Sizes(8), Sizes(8, 2), Sizes(8, None, 2))]
    for index, run in enumerate(runs):
        train(run, tmp_path / f"{index}.ckpt")
    full = state_of(runs[0])
    for run in runs[1:]:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            key = f"norm1.norm.{name}"
            torch.testing.assert_close(state_of(run)[key], full[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_groups", "other"),
    [(1, LayerNorm), (None, InstanceNorm)],
    ids=["one_group_is_layer", "a_group_per_channel_is_instance"],
)
def test_group_norm_trains_as_layer_and_instance_at_its_ends(tmp_path: Path, num_groups, other):
    norms = [lambda c: GroupNorm(c, eps=1e-5, num_groups=num_groups or c), partial(other, eps=1e-5)]
    runs = [
        train(build_module(make_norm=norm), tmp_path / f"{index}.ckpt", precision="32-true")
        for index, norm in enumerate(norms)
    ]
    assert_same_state(*runs, 1e-6)
