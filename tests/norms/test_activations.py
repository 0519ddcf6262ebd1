from __future__ import annotations

import math

import pytest
import torch
from timm.layers.filter_response_norm import FilterResponseNormTlu2d

from normexp.norms.filter_response import FilterResponseNorm
from normexp.norms.parts import ACTIVATIONS, TLU, ScaledReLU


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 2)])
def test_tlu_is_the_larger_of_the_input_and_its_channels_threshold(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tlu, x = TLU(3), torch.randn(shape)
    with torch.no_grad():
        tlu.tau.copy_(torch.tensor([-0.5, 0.0, 0.7]))
    y = tlu(x)
    for channel, threshold in enumerate((-0.5, 0.0, 0.7)):
        expected = x[:, channel].clamp(min=threshold)
        assert torch.equal(y[:, channel], expected)


def test_tlu_of_bf16_is_the_float32_result_rounded() -> None:
    tlu, x = TLU(2), torch.tensor([[0.01, 30.25]], dtype=torch.bfloat16)
    with torch.no_grad():
        tlu.tau.fill_(-5.0)  # in bf16, 0.01 + 5 - 5 is 0
    assert torch.equal(tlu(x), x)


def test_tlu_passes_nan_on() -> None:
    assert TLU(1)(torch.tensor([[float("nan")]])).isnan().all()


def test_tlu_starts_as_relu_and_learns_where_it_clips() -> None:
    x = torch.tensor([[-1.0, 2.0], [-3.0, 4.0]])
    tlu = TLU(2)
    y = tlu(x)
    assert torch.equal(y, x.relu())
    y.sum().backward()
    assert tlu.tau.grad is not None
    assert tlu.tau.grad.tolist() == [2.0, 0.0]


def test_frn_and_tlu_are_timms_layer() -> None:
    torch.manual_seed(0)
    theirs = FilterResponseNormTlu2d(3, eps=1e-5)
    norm, tlu = FilterResponseNorm(3, eps=1e-5), TLU(3)
    with torch.no_grad():
        for mine, other in [
            (norm.weight, theirs.weight),
            (norm.bias, theirs.bias),
            (tlu.tau, theirs.tau),
        ]:
            assert mine is not None
            mine.copy_(torch.randn(3))
            other.copy_(mine)
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(tlu(norm(x)), theirs(x), rtol=0, atol=1e-5)


def test_scaled_relu_gives_standard_normal_inputs_variance_one() -> None:
    torch.manual_seed(0)
    assert ScaledReLU()(torch.randn(1_000_000)).var().item() == pytest.approx(1, abs=0.01)
    exact = math.sqrt(2 / (1 - 1 / math.pi))  # the variance of relu(x) is (1 - 1 / pi) / 2
    assert pytest.approx(exact, rel=1e-3) == ScaledReLU.GAIN


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_keeps_shape_and_dtype(name) -> None:
    x = torch.randn(2, 3, 4, 4, dtype=torch.bfloat16)
    y = ACTIVATIONS[name](3)(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
