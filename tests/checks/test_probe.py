"""The probe engine finds everything that a norm reads, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import broken_norms as broken
import pytest
import torch
from torch import Tensor, nn

from normexp.checks.probe import (
    EVERYWHERE,
    Probe,
    cuts,
    holds,
    moves,
)
from normexp.norms.batch import BatchNorm, FrozenBatchNorm
from normexp.norms.causal import CausalGroupNorm
from normexp.norms.group import GroupNorm, InstanceNorm, LayerNorm
from normexp.norms.none import NoNorm
from normexp.norms.zoo.batch import BatchRenorm


def reads(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Adds a function of the batch, such as a little of another sample."""
    return broken.Applies(lambda x: x + 0.01 * function(x))


class _WeightSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight.view(-1, *[1] * (x.ndim - 2))

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        centred = x - x.mean(0, keepdim=True)
        slope = (g * centred).sum([d for d in range(x.ndim) if d != 1])
        return g * weight.view(-1, *[1] * (x.ndim - 2)), slope


class WeightSlope(nn.Module):
    """An elementwise scale; its weight's gradient sees the batch mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return _WeightSlope.apply(x, self.weight)  # type: ignore[return-value]


class StateOnly(nn.Module):
    """Scales by fixed numbers in training, and keeps a mean that evaluation subtracts."""

    running: Tensor

    def __init__(self, read=lambda x: x.mean()) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("running", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running.lerp_(self.read(x.detach()), 0.1)
            return 1.0 * x
        return x - self.running


def one_missing(x: Tensor) -> Tensor:
    """NaN for one channel, of every sample alike."""
    return torch.cat([torch.full_like(x[:, :1], torch.nan), x[:, 1:]], 1)


MIXING = {
    "batch": BatchNorm(6),
    # In training its outputs are those of the running averages: nothing is clipped.
    "renorm": BatchRenorm(6, r_max=1000, d_max=1000, warmup=0, r_ramp_end=0, d_ramp_end=0),
    **{f"neighbour {d}": broken.ReadsFurther(0, d) for d in (1, 2, 3)},
    "first half": reads(lambda x: x[: len(x) // 2].mean(0, keepdim=True)),
    "second half": reads(lambda x: x[len(x) // 2 :].mean(0, keepdim=True)),
    "next": reads(lambda x: x.roll(1, 0)),
    "last": reads(lambda x: x[-1:]),
    "largest": reads(lambda x: x.amax(0, keepdim=True)),
    "bounded": reads(lambda x: torch.tanh(x).mean(0, keepdim=True)),
    "gradient of others": broken.MixesInBackward(),
    "gradient of a parameter": WeightSlope(),
    "state": StateOnly(),
    "state of the last": StateOnly(lambda x: x[-1].mean()),
}
MOVED = {
    **dict.fromkeys(("renorm", "gradient of others"), "gradient of the input"),
    "gradient of a parameter": "gradient of weight",
    **dict.fromkeys(("state", "state of the last"), "running"),
}
SEPARATE = {
    "none": NoNorm(6),
    "layer": LayerNorm(6),
    "instance": InstanceNorm(6),
    "group": GroupNorm(6, num_groups=3),
    "frozen": FrozenBatchNorm(6),
    "counter": StateOnly(lambda _: torch.ones(())),
    "missing values": broken.Applies(one_missing),
    "dropout": nn.Dropout(0.5),
}


def inputs(num_samples: int = 4, num_positions: int = 12) -> Tensor:
    return torch.randn(num_samples, 6, num_positions, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MIXING)
def test_other_samples_are_found_in_training(name: str):
    moved = Probe(MIXING[name].train(), (inputs(),)).reads_across(0, gradients=True, state=True)
    assert moved == MOVED.get(name, moved or "anything")


@pytest.mark.parametrize("name", SEPARATE)
def test_nothing_is_found_where_no_sample_is_read(name: str):
    for training in (True, False):
        probe = Probe(SEPARATE[name].train(training), (inputs(),))
        assert probe.reads_across(0, gradients=training, state=True) is None


def test_running_state_is_no_mixing_in_evaluation():
    for name in ("batch", "renorm", "state"):
        assert (
            Probe(MIXING[name].eval(), (inputs(),)).reads_across(0, gradients=False, state=True)
            is None
        )


def in_chunks(size: int) -> nn.Module:
    """Centres each chunk of a sequence separately."""
    centred = lambda chunk: chunk - chunk.mean(-1, keepdim=True)  # noqa: E731
    return broken.Applies(lambda x: torch.cat([centred(c) for c in x.split(size, -1)], -1))


@pytest.mark.parametrize("length", [6, 12, 64])
def test_later_positions_are_found_however_far(length: int):
    x = inputs(num_positions=length)
    for distance in {1, 2, length // 2, length - 2, length - 1}:
        assert Probe(broken.ReadsFurther(2, distance), (x,)).reads_later(), distance
    for size in (2, 3, 4, length // 2, length):
        assert Probe(in_chunks(size), (x,)).reads_later(), size
    for sound in (CausalGroupNorm(6, num_groups=3), NoNorm(6)):
        assert not Probe(sound, (x,)).reads_later()


@pytest.mark.parametrize("distance", [1, 5, 11])
def test_positions_and_channels_are_told_apart(distance: int):
    positions, channels = (
        Probe(broken.ReadsFurther(2, distance), (inputs(),)),
        Probe(reads(lambda x: x.roll(1, 1)), (inputs(),)),
    )
    assert positions.reads_across(2) and not positions.reads_across(1)
    assert channels.reads_across(1) and not channels.reads_across(2)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 24, 33])
def test_holds_separate_every_pair(count: int):
    masks = holds(count)
    for kept in range(count):
        for changed in set(range(count)) - {kept}:
            assert any(mask[kept] and not mask[changed] for mask in masks)
    assert all(0 < cut < count for cut in cuts(count))
    assert len(set(cuts(count))) == count - 1


def test_runs_leave_the_module_and_each_other_alone():
    for make in (broken.Averaging, broken.StartsFromItsBatch):
        module = make(6).train()
        start = {name: value.clone() for name, value in module.state_dict().items()}
        probe = Probe(module, (inputs(),))
        first, again = (probe.observe(upstream=EVERYWHERE) for _ in range(2))
        assert torch.equal(first.output, again.output)
        assert all(torch.equal(v, again.state[n]) for n, v in first.state.items())
        assert all(torch.equal(v, start[n]) for n, v in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())


def test_rounding_of_a_fourier_transform_is_no_dependence():
    def past(x: Tensor) -> Tensor:
        """Divides by a fading average of the positions so far."""
        length, square = x.shape[2], x.square().mean(dim=1, keepdim=True)
        decay = 0.5 ** torch.arange(length, dtype=x.dtype)
        product = torch.fft.rfft(square, n=2 * length) * torch.fft.rfft(decay, n=2 * length)
        average = torch.fft.irfft(product, n=2 * length)[..., :length].clamp(min=0)
        return x * torch.rsqrt(average + 1e-5)

    assert not Probe(broken.Applies(past), (inputs(),)).reads_later()


def test_nan_equals_nan_and_no_number():
    missing = torch.tensor([1.0, torch.nan, torch.inf])
    assert not moves(missing, missing.clone())
    assert moves(missing, torch.tensor([1.0, 0.0, torch.inf]))
    assert moves(torch.tensor([1.0, 0.0, torch.inf]), missing)
    assert not moves(torch.tensor([1.0, 0.0]), torch.tensor([1.00001, 0.0]))
