"""Which norms from the wild are refused, with the reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from foreign_cases import build
from norm_cases import C
from torch import Tensor, nn

from normexp.errors import UserError


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2]


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Late(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(x.shape[1], *[1] * (x.ndim - 2)))
        return x * self.gain


class Renewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.rho = nn.Parameter(self.rho.clamp(0, 1))
        return x * self.rho


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(f"no {x.ndim}-D today")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Half, r"does not fit: it changes the shape, \(4, 8\) to \(4, 4\)"),
        (Pair, "returns a tuple, not a tensor"),
        (Late, "makes its parameter gain in its first forward"),
        (Renewed, "makes its parameter rho in its first forward"),
        (nn.LazyBatchNorm2d, "makes its parameter weight in its first forward"),
        (Noisy, "is not deterministic"),
        (Failing, r"fails on an input of shape \(4, 8\): no 2-D today"),
    ],
)
def test_what_keeps_no_norm_contract_is_refused_with_the_reason(make, reason):
    with pytest.raises(UserError, match=rf"norm\._target_=their\.Norm .*{reason}"):
        build(make)


def test_dropout_in_training_is_no_reason_to_refuse():
    assert build(nn.Dropout).eval()(torch.ones(2, C)).sum() == 2 * C


class Kept(nn.Module):
    """A running mean square that is no buffer, and a last one that counts for nothing."""

    def __init__(self, counts: bool = True, start: Tensor | float | None = None) -> None:
        super().__init__()
        self.counts = counts
        self.square = torch.ones(C) if start is None else start

    def forward(self, x: Tensor) -> Tensor:
        square = x.detach().square().mean() * torch.ones(C)
        if self.training:
            self.square = 0.9 * self.square + 0.1 * square
        return x / (1 + (torch.as_tensor(self.square).mean() if self.counts else 0))


class Forgotten(Kept):
    """Its mean square is a buffer that no state_dict holds."""

    def __init__(self) -> None:
        super().__init__()
        del self.square
        self.register_buffer("square", torch.ones(C), persistent=False)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double() / 2


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def broken_key(num_features: int) -> nn.Module:  # noqa: ARG001
    raise KeyError("gain")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Kept, "keeps state that its state_dict lacks: square; evaluation depends"),
        (partial(Kept, start=0.0), "keeps state that its state_dict lacks: square; evaluation"),
        (Forgotten, "keeps state that its state_dict lacks: square; .* a persistent buffer"),
        (Doubled, r"returns torch.float64 for an input of torch.float32; .*\.to\(x\.dtype\)"),
        (Flat, r"does not fit: it changes the shape, \(4, 8, 5\) to \(4, 40\)"),
        (broken_key, "cannot be built for 8 features: KeyError 'gain'"),
    ],
)
def test_what_would_fail_far_from_its_cause_is_refused_at_once(make, reason):
    with pytest.raises(UserError, match=rf"norm\._target_=their\.Norm .*{reason}"):
        build(make)


def test_attribute_that_counts_for_nothing_is_no_reason_to_refuse():
    assert build(Kept, counts=False)(torch.ones(2, C)).sum() == 2 * C
