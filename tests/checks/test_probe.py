"""The probe engine finds everything that a norm reads, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import broken_norms as broken
import pytest
import torch
from torch import Tensor, nn

from normexp.norms.batch import BatchNorm
from normexp.norms.sample import InstanceNorm, LayerNorm, NoNorm
from normexp.norms.sequence import CausalGroupNorm
from normexp.training.checks.probe import Probe, cuts, holds, moves


def reads(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Adds a function of the batch, such as a little of another sample."""
    return broken.Applies(lambda x: x + 0.01 * function(x))


class StateOnly(nn.Module):
    """Scales by fixed numbers in training, and keeps a mean that evaluation subtracts."""

    running: Tensor

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("running", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running.lerp_(self.read(x.detach()), 0.1)
            return 1.0 * x
        return x - self.running


# What moves if other samples do; None where no sample is read.
MOVED: dict[str, tuple[nn.Module, str | None]] = {
    "batch": (BatchNorm(6), "output"),
    "two further": (broken.ReadsFurther(0, 2), "output"),
    "first half": (
        reads(lambda x: x[: len(x) // 2].mean(0, keepdim=True)),
        "gradient of the input",
    ),
    "last": (reads(lambda x: x[-1:]), "output"),
    "gradient": (broken.MixesInBackward(), "gradient of the input"),
    "state": (StateOnly(torch.mean), "running"),
    "none": (NoNorm(6), None),
    "layer": (LayerNorm(6), None),
    "instance": (InstanceNorm(6), None),
    "counter": (StateOnly(lambda _: torch.ones(())), None),
    "dropout": (nn.Dropout(0.5), None),
    "in place": (broken.Applies(lambda x: x.mul_(2)), None),
}


def inputs(num_positions: int = 12) -> Tensor:
    return torch.randn(4, 6, num_positions, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MOVED)
def test_other_samples_are_found_in_training(name: str):
    norm, moved = MOVED[name]
    probe = Probe(norm.train(), (inputs(),))
    assert probe.reads_across(0, gradients=True, state=True) == moved


def in_chunks(size: int) -> nn.Module:
    """Centres each chunk of a sequence separately."""
    centred = lambda chunk: chunk - chunk.mean(-1, keepdim=True)  # noqa: E731
    return broken.Applies(lambda x: torch.cat([centred(c) for c in x.split(size, -1)], -1))


@pytest.mark.parametrize("length", [6, 12, 64])
def test_later_positions_are_found_however_far(length: int):
    x = inputs(length)
    for distance in {1, 2, length // 2, length - 2, length - 1}:
        assert Probe(broken.ReadsFurther(2, distance), (x,)).reads_later(), distance
    for size in (2, 3, 4, length // 2, length):
        assert Probe(in_chunks(size), (x,)).reads_later(), size
    for sound in (CausalGroupNorm(6, num_groups=3), NoNorm(6)):
        assert not Probe(sound, (x,)).reads_later()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 24, 33])
def test_each_of_two_samples_or_positions_is_changed_while_the_other_is_held(count: int):
    masks = holds(count)
    for kept in range(count):
        for changed in set(range(count)) - {kept}:
            assert any(mask[kept] and not mask[changed] for mask in masks)
    assert [*cuts(count, count)] == [*range(1, count)] and len(cuts(100, 4)) == 4


def test_nan_equals_nan_and_no_number():
    missing = torch.tensor([1.0, torch.nan, torch.inf])
    assert not moves(missing, missing.clone())
    assert moves(missing, torch.tensor([1.0, 0.0, torch.inf]))
    assert moves(torch.tensor([1.0, 0.0, torch.inf]), missing)
    assert not moves(torch.tensor([1.0, 0.0]), torch.tensor([1.00001, 0.0]))
