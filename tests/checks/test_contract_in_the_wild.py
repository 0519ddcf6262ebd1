"""What sound norms from the wild do, and what must not be held against them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normexp.checks import assert_contract
from normexp.checks.contract import measure_contract
from normexp.checks.subject import open_subject


def along(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (x.ndim - 2))


class Noisy(nn.Module):
    """Draws its first weight, and noise in training."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(num_features) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = along(self.weight, x).to(x.dtype)
        return x * scale * (1 + 0.1 * torch.randn_like(x)) if self.training else x * scale


class NoisyAlways(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.rand_like(x))


class InSingle(nn.Module):
    """RMS norm of language models: channels last, float32 inside whatever it is given."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, backward: bool = True) -> None:
        super().__init__()
        self.eps, self.backward = eps, backward
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        single = x.float()
        size = (single.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return self.weight.to(x.dtype) * (single / (size if self.backward else size.detach())).to(
            x.dtype
        )


def failures(norm: type[nn.Module] | nn.Module) -> dict[str, str]:
    subject = open_subject(norm, name="mine", target="mine", eps=1e-5, num_features=8)
    return {line.name: line.detail for line in measure_contract(subject) if line.status == "fail"}


def test_norm_that_draws_in_training_keeps_the_contract():
    before = torch.get_rng_state()
    assert_contract(Noisy)
    assert torch.equal(before, torch.get_rng_state())


def test_norm_that_draws_in_evaluation_fails_by_one_line():
    assert failures(NoisyAlways).keys() == {"deterministic in evaluation"}


def test_float32_inside_is_no_wrong_gradient_and_hides_none():
    subject = open_subject(InSingle, name="mine", target="mine", eps=1e-5)
    lines = {line.name: line for line in measure_contract(subject)}
    assert [line.name for line in lines.values() if line.status == "fail"] == []
    assert lines["gradient in training"].detail.startswith("to 1 % alone")
    wrong = failures(lambda hidden_size: InSingle(hidden_size, backward=False))  # type: ignore
    assert wrong.keys() == {"gradient in training", "gradient in evaluation"}


def test_missing_kernel_is_skipped():
    class NoHalf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.bfloat16:
                raise NotImplementedError("kernel not implemented for 'BFloat16'")
            return torch.tanh(x)

    subject = open_subject(NoHalf, name="mine", target="mine", num_features=8)
    lines = {line.name: line for line in measure_contract(subject)}
    assert lines["dtype kept"].detail == "this device lacks bfloat16"
    assert lines["statistics wide in bfloat16"].status == "skipped"


@pytest.mark.slow
def test_lazy_norm_swallows_no_argument_that_could_not_be_looked_at():
    found = failures(nn.LazyBatchNorm2d)
    assert "parameters made at once" in found and "no argument swallowed" not in found


def test_arguments_that_take_any_name_are_a_failure():
    class AnyName(nn.Module):
        def __init__(self, num_features: int, **_: object) -> None:
            del num_features
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    assert failures(AnyName).keys() == {"no argument swallowed"}


def test_input_beside_x_is_named():
    class Conditional(nn.Module):
        def forward(self, x: Tensor, style: Tensor) -> Tensor:
            return x * style

    with pytest.raises(AssertionError, match="every input is refused: .* argument: 'style'"):
        assert_contract(Conditional, 8)
