"""Norms of other people's networks are recognised by what they compute; the rest is left."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from foreign_norms import MAPS, ROWS, TOKENS, C, Calling, Film, Own, bare, over, rms
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import FrozenBatchNorm2d

import normexp
from normexp.any_network.anew import keep_reproduced
from normexp.any_network.formula import values_of_norm
from normexp.any_network.recognise import recognise
from normexp.any_network.trial import Inputs
from normexp.norms.site import named_sites


class RememberingNorm(nn.Module):
    """Keeps the mean of its last input, which after a forward with gradients has a graph."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.mean()
        return rms(x)


class TimeMajorNorm(nn.BatchNorm1d):
    """A subclass that moves its axes: the channels are last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class DecayNorm(nn.Module):
    """Batch norm with statistics as parameters, whose momentum is the weight of the past."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(0.5 + torch.rand(1, C, 1, 1))
        self.mean = nn.Parameter(torch.randn(1, C, 1, 1), requires_grad=False)
        self.var = nn.Parameter(0.5 + torch.rand(1, C, 1, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
            for old, new in ((self.mean, mean), (self.var, var)):
                old.data.lerp_(new.detach(), 0.3)
        return (x - mean) * (var + 1e-3).rsqrt() * self.scale


def frozen() -> FrozenBatchNorm2d:
    norm = FrozenBatchNorm2d(C, eps=1e-3)
    for buffer in norm.buffers():
        buffer.uniform_(0.5, 2)
    return norm


class InFloat32(nn.GroupNorm):
    """Computes in float32 whatever its input, with its weights as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


# A module, an input, and the shipped norm that it is.
SAME: dict[str, tuple[nn.Module, Tensor, str]] = {
    "gain from zero": (Own(lambda m, x: (1 + m.p) * rms(x)), TOKENS, "rms"),
    "gain of a map": (Own(lambda m, x: m.p * over(x, 1), 1, C, 1, 1), MAPS, "layer2d"),
    "all of a sample": (Own(lambda m, x: m.p * over(x, 1, 2, 3), 1, C, 1, 1), MAPS, "layer"),
    "fixed shape": (bare(lambda _, x: functional.layer_norm(x, (C,))), TOKENS, "layer"),
    "moved axes": (TimeMajorNorm(C, eps=1e-3, momentum=0.2), TOKENS, "batch"),
    "statistics as parameters": (DecayNorm(), MAPS, "batch"),
    "frozen": (frozen(), MAPS, "frozen"),
    "in float32": (InFloat32(1, C, eps=1e-3), MAPS, "group1"),
    "with a tail": (
        Own(lambda m, x: m.act(m.p * over(x, 1)), 1, C, 1, 1, act=nn.SiLU(inplace=True)),
        MAPS,
        "layer2d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_norm_that_a_module_is_reproduces_it(name: str) -> None:
    module, x, norm = SAME[name]
    network = nn.Sequential(module)
    other = normexp.replace_norms(network, norm, x)
    for training in (False, True):
        outputs = [one.train(training)(x) for one in (copy.deepcopy(network), other)]
        torch.testing.assert_close(*outputs, rtol=0, atol=2e-5)
    (found,) = recognise(network, Inputs.of(x)).norms.values()
    if norm == "batch":
        assert found.settings["momentum"] == {"moved axes": 0.2}.get(name, 0.3)


class Rescaled(nn.BatchNorm2d):
    """A gain of 2 beside its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Switching(nn.BatchNorm2d):
    """Evaluates by another formula."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else over(x, 1)


class OfOneSample(nn.Module):
    """Calls its norm with one sample, without an axis for samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.norm(row) for row in x])


def hooked() -> nn.Module:
    norm = nn.BatchNorm2d(C)
    norm.register_forward_hook(lambda *_: None)
    return norm


def stopping_gradients() -> nn.Module:
    norm = nn.BatchNorm2d(C)
    norm.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 0,))
    return norm


class Embedding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1)


class Bottleneck(nn.Module):
    """Normalizes by a function of torch, and returns another shape."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.instance_norm(x).mean(dim=(2, 3))


def unused(_: Tensor) -> nn.Module:
    network = nn.Sequential(nn.Identity())
    network[0].spare = nn.LayerNorm(C)
    return network


# A network, an input, and why its norm is left.
LEFT: dict[str, tuple[nn.Module, Tensor, str]] = {
    "activation inside": (Own(lambda m, x: (m.p * rms(x)).tanh()), TOKENS, "nearest, rms norm"),
    "activation before": (
        Own(lambda m, x: m.p * rms(m.act(x)), act=nn.ReLU()),
        TOKENS,
        "another output in training",
    ),
    "other scale": (Own(lambda m, x: m.p * over(x, 1).sigmoid(), C, 1, 1), MAPS, "no affine map"),
    "second input": (Calling(Film(), torch.rand(4, 1)), MAPS, "a second input"),
    "mode": (Calling(Film(), style="norm"), MAPS, "a second input"),
    "other evaluation": (Switching(C), MAPS, "put in anew"),
    "log gain": (Own(lambda m, x: m.p.exp() * rms(x)), TOKENS, "another output in training"),
    "one gain": (Own(lambda m, x: m.p * rms(x), 1), TOKENS, "trains other parameters: p"),
    "gain of 2": (Rescaled(C), MAPS, "another weight"),
    "deviation of positions": (
        Own(lambda m, x: m.p * (x - x.mean((2, 3), True)) / x.std((2, 3), keepdim=True), C, 1, 1),
        MAPS,
        "another output in training",
    ),
    "channels unknown": (Own(lambda _, x: over(x, -1)), TOKENS, "its channels are not known"),
    "never called": (unused(MAPS), MAPS, "never called"),
    "one sample": (OfOneSample(), ROWS, "does not map a batch"),
    "a hook": (hooked(), MAPS, "it has a hook"),
    "a hook of the backward": (stopping_gradients(), MAPS, "it has a hook"),
    "another dtype": (
        nn.Sequential(nn.Identity(), Own(lambda m, x: m.p * rms(x.float()))),
        TOKENS.bfloat16(),
        "it returns torch.float32 for torch.bfloat16",
    ),
    "a function": (Bottleneck(), MAPS, "it calls instance_norm"),
    "a fixed length": (
        Embedding(),
        TOKENS,
        "no gain that could be trained",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_computes_more_is_left_with_the_reason(name: str) -> None:
    network, x, reason = LEFT[name]
    network, inputs = nn.Sequential(network), Inputs.of(x)
    found, _ = keep_reproduced(network, recognise(network, inputs), inputs)
    assert not found.norms
    said = [one.reason for one in found.left_alone.values() if one.resembles_norm]
    assert len(said) == 1 and reason in said[0]


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(C, C, 1),
        nn.Tanh(),
        Own(lambda m, x: m.p * x, C, 1, 1),
        Own(lambda _, x: x.sigmoid()),
        Own(lambda _, x: torch.zeros_like(x)),
        nn.Softmax(1),
    ],
)
def test_other_modules_are_not_named(module: nn.Module) -> None:
    found = recognise(nn.Sequential(module), Inputs.of(MAPS))
    assert not found.norms and not any(one.resembles_norm for one in found.left_alone.values())


class AddNorm(nn.Module):
    """Returns the sum too if it adds something."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        x = x if other is None else x + other
        out = rms(x) * self.gain
        return out if other is None else (out, x)


class WithAuxiliary(nn.BatchNorm2d):
    """Another norm for the second half of a training batch."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.other = nn.BatchNorm2d(num_features)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        first, second = x.chunk(2)
        return torch.cat([super().forward(first), self.other(second)])


def test_a_norm_of_torch_is_one_with_the_norms_that_it_holds() -> None:
    found = recognise(nn.Sequential(WithAuxiliary(C)), Inputs.of(MAPS))
    assert not found.norms and found.left_alone["0"].resembles_norm
    kept = normexp.replace_norms(nn.Sequential(WithAuxiliary(C)), "as_built", MAPS)
    assert [name for name, _ in named_sites(kept)] == ["0"]


def test_a_class_of_norms_is_named_where_its_call_differs() -> None:
    network = nn.Sequential(AddNorm(), Calling(AddNorm(), TOKENS))
    found = recognise(network, Inputs.of(TOKENS))
    assert found.norms.keys() == {"0"} and found.left_alone["1.inner"].resembles_norm


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_norm_inside_torchscript_is_left() -> None:
    network = nn.Sequential(torch.jit.script(nn.Sequential(nn.BatchNorm2d(C))), nn.BatchNorm2d(C))
    found = recognise(network, Inputs.of(MAPS))
    assert found.norms.keys() == {"1"}
    left = found.left_alone["0.0"]
    assert (left.class_name, left.reason) == ("BatchNorm2d", "it is TorchScript")


class Standardized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return over(weight, 1, 2, 3)


def test_a_parametrized_weight_is_no_norm() -> None:
    conv = nn.Conv2d(C, C, 3)
    nn.utils.parametrize.register_parametrization(conv, "weight", Standardized())
    found = recognise(nn.Sequential(conv, nn.BatchNorm2d(C)), Inputs.of(MAPS))
    assert found.norms.keys() == {"1"} and not found.left_alone.keys() & {
        "0.parametrizations.weight.0"
    }


class Dropping(nn.Module):
    """Leaves its layer out at random, here in every training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else self.layer(x)


def test_a_layer_that_training_drops_has_norms_too() -> None:
    assert recognise(Dropping(), Inputs.of(TOKENS)).norms.keys() == {"layer"}


def test_a_norm_of_torch_with_another_forward_is_tried_like_others() -> None:
    network = nn.Sequential(nn.LayerNorm(C), nn.LayerNorm(C))
    network[0].forward = torch.tanh
    found = recognise(network, Inputs.of(TOKENS))
    assert found.norms.keys() == {"1"} and "no affine map" in found.left_alone["0"].reason


class MaskedNorm(nn.Module):
    def __init__(self, *, is_inverted: bool = False) -> None:
        super().__init__()
        self.gain, self.is_inverted = nn.Parameter(0.5 + torch.rand(C)), is_inverted

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        real = (~mask if self.is_inverted else mask)[..., None]
        count = real.sum((0, 1))
        mean = (x * real).sum((0, 1)) / count
        var = ((x - mean).square() * real).sum((0, 1)) / count
        return (x - mean) * (var + 1e-5).rsqrt() * self.gain * real


def test_a_row_of_zeros_stays_one_where_a_norm_has_no_shift() -> None:
    """The embedding of padding is zero; norms after norms would enlarge what rounding adds."""
    network = nn.Sequential(Own(lambda m, x: (m.p * rms(x.float())).type_as(x)))
    ((path, norm),) = recognise(network, Inputs.of(TOKENS)).norms.items()
    assert not values_of_norm(network.get_submodule(path), norm)["bias"].any()


def test_a_mask_must_be_true_where_a_value_is_real() -> None:
    mask = torch.arange(5) < torch.tensor([[5], [3], [4], [2]])
    network = Calling(MaskedNorm(), mask=mask)
    other = normexp.replace_norms(network, "batch", TOKENS)
    torch.testing.assert_close(other(TOKENS), network(TOKENS), rtol=0, atol=1e-5)
    inverted = Calling(MaskedNorm(is_inverted=True), ~mask)
    (left,) = recognise(inverted, Inputs.of(TOKENS)).left_alone.values()
    assert left.resembles_norm


class Failing(nn.Module):
    def forward(self, _: Tensor) -> Tensor:
        raise ValueError


class Forgiving(nn.Module):
    """Normalizes by a function where its part has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Failing()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except ValueError:
            return x.exp() + functional.layer_norm(x, x.shape[1:])


def test_a_function_is_that_of_the_module_that_calls_it() -> None:
    network = nn.Sequential(Forgiving(), nn.BatchNorm1d(C))
    assert recognise(network, Inputs.of(ROWS)).left_alone["0"].reason == "it calls layer_norm"


def test_a_norm_that_has_just_been_trained_is_recognised():
    network = nn.Sequential(nn.Linear(C, C), RememberingNorm())
    network(TOKENS)
    assert recognise(network, Inputs.of(TOKENS)).norms["1"].formula.name == "rms"
