"""What a training says of foreign norms with one fault each, and of unusual ones without."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_norms import Affine, Bare, pooled
from checks_cases import convnet, encoder, gpt, image_data, padded_data, text_data
from torch import Tensor, nn
from torch.nn import functional

from normexp.batching.sizes import Sizes
from normexp.build import foreign_factory
from normexp.checks.preflight import Traits, examine
from normexp.errors import UserError
from normexp.norms.factory import NormFactory

Make = Callable[[int], nn.Module]
EPS = 1e-5


def examine_images(make: Make) -> Traits:
    return examine(convnet(NormFactory(make)), image_data(), Sizes(16), drop_last=True)


def examine_texts(make: Make) -> Traits:
    norm = NormFactory(make, view="sequence")
    return examine(gpt(norm), text_data(), Sizes(8), drop_last=True)


def examine_padded(make: Make) -> Traits:
    norm = NormFactory(foreign_factory(make, target="mine", eps=EPS), view="sequence")
    lengths = (2, 3, 4, 5, 6, 8, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 8)
    return examine(encoder(norm), padded_data(lengths), Sizes(8), drop_last=True)


def as_vector(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.view(1, -1, *[1] * (x.ndim - 2))


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPS)


class RMS(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * as_vector(self.weight, x)


# ---------------------------------------------------------------- weak dependence

GATES: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    **{f"{start:g}": (start, lambda gate: gate) for start in (1e-7, 1e-2)},
    "sigmoid(-10)": (-10.0, torch.sigmoid),
    "softplus(-20)": (-20.0, functional.softplus),
}


class Gated(RMS):
    """Adds something forbidden, behind a gate."""

    def __init__(self, num_features: int, gate: str, forbidden: Callable[[Tensor], Tensor]) -> None:
        super().__init__(num_features)
        start, self.opening = GATES[gate]
        self.gate = nn.Parameter(torch.full((num_features,), start))
        self.forbidden = forbidden

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = super().forward(x) + as_vector(self.opening(self.gate), x) * self.forbidden(rms(x))
        return out if mask is None else out * mask.unsqueeze(1)


def next_position(x: Tensor) -> Tensor:
    return functional.pad(x[..., 1:], (0, 1))


def batch_mean(x: Tensor) -> Tensor:
    return x.mean(pooled(x), keepdim=True)


def mean_of_positions(x: Tensor) -> Tensor:
    return x.mean(dim=-1, keepdim=True)


@pytest.mark.parametrize("gate", GATES)
def test_leak_behind_a_gate_is_refused(gate: str):
    with pytest.raises(UserError, match="later position moves an earlier output at blocks.0"):
        examine_texts(lambda n: Gated(n, gate, next_position))


@pytest.mark.parametrize("gate", GATES)
def test_mixing_behind_a_gate_is_a_trait(gate: str):
    assert examine_images(lambda n: Gated(n, gate, batch_mean)).mixes_samples


@pytest.mark.parametrize("gate", GATES)
def test_padding_behind_a_gate_is_refused(gate: str):
    with pytest.raises(UserError, match="norm reads padding at blocks.0"):
        examine_padded(lambda n: Gated(n, gate, mean_of_positions))


class CastsToFloat32(Gated):
    """Without a change, a layer of its own cannot run in float64."""

    def __init__(self, num_features: int, gate: str) -> None:
        super().__init__(num_features, gate, next_position)
        self.layer = nn.Linear(num_features, num_features)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = super().forward(self.layer(x.to(torch.float32).movedim(1, -1)).movedim(-1, 1), mask)
        return out.to(x.dtype)


class OnlyFloat32(Gated):
    def __init__(self, num_features: int, gate: str) -> None:
        super().__init__(num_features, gate, next_position)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("takes float32")
        return super().forward(x, mask)


@pytest.mark.parametrize("make", [CastsToFloat32, OnlyFloat32])
def test_leak_behind_a_gate_of_code_for_float32_is_refused(make: type[Gated], caplog):
    caplog.set_level("INFO")
    with pytest.raises(UserError, match="later position moves an earlier output at blocks.0"):
        examine_texts(lambda n: make(n, "1e-07"))
    assert ("cannot be computed in float64" in caplog.text) is (make is OnlyFloat32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_of_a_fourier_transform_is_no_leak(dtype: torch.dtype):
    class PastByFourier(Bare):
        """Divides by a fading average of the positions so far."""

        def forward(self, x: Tensor) -> Tensor:
            length, square = x.shape[2], x.square().mean(dim=1, keepdim=True).to(dtype)
            decay = 0.5 ** torch.arange(length, dtype=dtype)
            product = torch.fft.rfft(square, n=2 * length) * torch.fft.rfft(decay, n=2 * length)
            past = torch.fft.irfft(product, n=2 * length)[..., :length].clamp(min=0)
            return x * torch.rsqrt(past.to(x.dtype) + EPS)

    traits = examine_texts(PastByFourier)
    assert not traits.leaks_future and not traits.leaks_future_in_training


# ---------------------------------------------------------------- phases

PHASES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "one step in 64": (lambda steps: steps % 64 == 0, True),
    "after 100 steps": (lambda steps: steps > 100, True),
    "never": (lambda steps: steps < 0, False),
}


@pytest.mark.parametrize("phase", PHASES)
def test_mixing_in_some_steps_is_found_before_a_training(phase: str):
    is_open, mixes = PHASES[phase]

    class Phased(RMS):
        def __init__(self, num_features: int) -> None:
            super().__init__(num_features)
            self.register_buffer("steps", torch.zeros(num_features, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.training:
                self.get_buffer("steps").add_(1)
                out = out - is_open(self.get_buffer("steps")).all() * batch_mean(out)
            return out

    assert examine_images(Phased).mixes_samples is mixes


# ---------------------------------------------------------------- faults that are refused


class Detached(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class DetachedInLargeBatches(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach() if len(x) > 8 else x)


class PlainList(Bare):
    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.weights = [nn.Parameter(torch.ones(num_features))]

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * as_vector(self.weights[0], x)


class CentresInPlace(RMS):
    def forward(self, x: Tensor) -> Tensor:
        x.data.sub_(x.data.mean(dim=1, keepdim=True))
        return super().forward(x)


class HookOnOriginal(Affine):
    """A closure moves the average of the norm that made it, not of its copies."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("average", torch.zeros(num_features))

        def follow(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            del module
            self.get_buffer("average").lerp_(inputs[0].detach().mean(pooled(inputs[0])), 0.1)

        self.register_forward_hook(follow)


class CopiesStartFresh(RMS):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesStartFresh:
        del memo
        return CopiesStartFresh(len(self.weight))


REFUSED: dict[type[nn.Module], str] = {
    Detached: "no gradient reaches the input of the norm at norm1",
    DetachedInLargeBatches: "no gradient reaches the input of the norm at norm1",
    PlainList: "require a gradient but are no parameters",
    CentresInPlace: "norm at norm1.* writes to its input in place in training",
    HookOnOriginal: "changes tensors outside of it",
    CopiesStartFresh: "deep copy of the network has another norm1.norm.weight",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_fault_is_refused_before_training(make: type[nn.Module]):
    # As for a training, whose networks are copies of what the constructors return.
    network = copy.deepcopy(convnet(NormFactory(make)))
    with pytest.raises(UserError, match=REFUSED[make]):
        examine(network, image_data(), Sizes(16), drop_last=True)


class Masked(RMS):
    """RMS over all real values of a text; subclasses lose the mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        seen = self.seen(mask)
        real = torch.ones_like(x[:, :1]) if seen is None else seen.unsqueeze(1).to(x.dtype)
        dims = list(range(1, x.ndim))
        size = (x * real).square().sum(dims, keepdim=True) / real.sum(dims, keepdim=True)
        return x * torch.rsqrt(size + EPS) * as_vector(self.weight, x)

    def seen(self, mask: Tensor | None) -> Tensor | None:
        return mask


class DropsMaskIfFirstIsFull(Masked):
    def seen(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is not None and bool(mask[0].all()) else mask


class DropsMaskAboveEight(Masked):
    def seen(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is not None and len(mask) > 8 else mask


class DropsMaskAtTimes(Masked):
    def seen(self, mask: Tensor | None) -> Tensor | None:
        return None if self.training and float(torch.rand(())) < 0.25 else mask


@pytest.mark.parametrize("make", [DropsMaskIfFirstIsFull, DropsMaskAboveEight, DropsMaskAtTimes])
def test_dropped_mask_is_refused(make: Make):
    with pytest.raises(UserError, match="norm reads padding at blocks.0"):
        examine_padded(make)


def test_parameter_that_is_computed_is_refused_when_it_is_built():
    class NonLeaf(RMS):
        def __init__(self, num_features: int) -> None:
            super().__init__(num_features)
            self.register_buffer("scale", 2 * self.weight)

    with pytest.raises(UserError, match="scale is no leaf"):
        foreign_factory(NonLeaf, target="mine", eps=EPS)(8)


# ---------------------------------------------------------------- faults that are warned of


class ReversedGradient(RMS):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - 2 * (out - out.detach())


class SeedsTorch(RMS):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().forward(x)


class SeedsPython(RMS):
    def forward(self, x: Tensor) -> Tensor:
        random.seed(0)
        return super().forward(x)


class FreezesItself(RMS):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.weight.requires_grad_(False)
        return out


WARNED: dict[type[nn.Module], str] = {
    ReversedGradient: "differs from the slope",
    SeedsTorch: "seeds the global random generator of torch",
    SeedsPython: "seeds the global random generator of Python",
    FreezesItself: "norm1.norm.weight, .* is not trained",
}


@pytest.mark.parametrize("make", WARNED, ids=lambda make: make.__name__)
def test_fault_is_warned_of(make: type[nn.Module], caplog: pytest.LogCaptureFixture):
    examine_images(make)
    assert re.search(WARNED[make], caplog.text)


def test_sound_norm_is_neither_refused_nor_warned_of(caplog: pytest.LogCaptureFixture):
    assert examine_images(RMS).stacking_obstacle is None
    examine_padded(Masked)
    assert not re.search("|".join(WARNED.values()), caplog.text)


# ---------------------------------------------------------------- seeds of a stack


class ExchangesSeeds(torch.autograd.Function):
    """x; under vmap seed r gets the values of seed r + 2, which two seeds do not show."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        del info
        return x.movedim(in_dims[0], 0).roll(2, dims=0), 0


class WrongVmapRule(RMS):
    def forward(self, x: Tensor) -> Tensor:
        out = ExchangesSeeds.apply(x)
        assert isinstance(out, Tensor)
        return super().forward(out)


class HookOnGradient(RMS):
    """A hook on a gradient moves a buffer."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("level", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_buffer("level").clone() * self.weight
        if self.training and weight.requires_grad:
            weight.register_hook(
                lambda g: self.get_buffer("level").lerp_(1 + g.detach().abs(), 0.1)
            )
        return rms(x) * as_vector(weight, x)


@pytest.mark.parametrize("make", [WrongVmapRule, HookOnGradient])
def test_seeds_that_would_mix_train_alone(make: Make):
    assert examine_images(make).stacking_obstacle is not None


# ---------------------------------------------------------------- unusual, and right


class MaskedTokens(RMS):
    """(B, T, C) only: batch moments of each channel over the real tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if x.ndim != 3 or x.shape[-1] != len(self.weight):
            raise ValueError("takes (B, T, C)")
        real = torch.ones_like(x[..., :1]) if mask is None else mask.unsqueeze(-1).to(x.dtype)
        size = (x * real).square().sum((0, 1)) / real.sum()
        return x * torch.rsqrt(size + EPS) * self.weight


class MaskedSequences(MaskedTokens):
    """(N, C, T) only."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.transpose(1, 2), mask).transpose(1, 2)


@pytest.mark.parametrize("make", [MaskedTokens, MaskedSequences])
def test_norm_of_texts_alone_gets_the_mask(make: Make):
    assert examine_padded(make).mixes_samples


class BatchAtTimes(RMS):
    """Batch moments with probability 1/4."""

    def forward(self, x: Tensor) -> Tensor:
        dims = pooled(x) if self.training and float(torch.rand(())) < 0.25 else [1]
        return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + EPS)


class MadeInForward(RMS):
    """Its buffer takes its shape in the first training forward."""

    largest: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            size = x.detach().abs().amax(pooled(x))
            self.largest = torch.maximum(self.largest, size) if self.largest.numel() else size
        return super().forward(x)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        self.largest = torch.zeros_like(state_dict[f"{prefix}largest"])
        super()._load_from_state_dict(state_dict, prefix, *arguments)


@pytest.mark.parametrize("make", [BatchAtTimes, MadeInForward])
def test_unusual_norm_is_accepted_and_the_model_not_blamed(
    make: Make, caplog: pytest.LogCaptureFixture
):
    assert examine_images(foreign_factory(make, target="mine", eps=EPS)).mixes_samples
    assert "outside" not in caplog.text
