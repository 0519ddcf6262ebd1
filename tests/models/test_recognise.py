"""Norms of other people's networks are recognised by what they compute; the rest is left."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_cases import replaced
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import FrozenBatchNorm2d

import normexp
from normexp.errors import UserError
from normexp.models.formula import values_of
from normexp.models.recognise import LeftAlone, recognise
from normexp.models.surgery import check_formulas
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

C = 6
TOKENS, MAPS, ROWS = torch.randn(4, 5, C), torch.randn(4, C, 3, 5), torch.randn(8, C)


class Own(nn.Module):
    """A norm of someone's own; its formula is given."""

    def __init__(self, function: Callable[[Own, Tensor], Tensor], *shape: int, **more: Any) -> None:
        super().__init__()
        self.p = nn.Parameter(0.5 + torch.rand(shape or (C,)))
        self.function = function
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def over(x: Tensor, *dims: int) -> Tensor:
    var, mean = torch.var_mean(x, dim=dims, correction=0, keepdim=True)
    return (x - mean) * (var + 1e-3).rsqrt()


def rms(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


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


class Rescaled(nn.BatchNorm2d):
    """A gain of 2 beside its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class InFloat32(nn.GroupNorm):
    """Computes in float32 whatever its input, with its weights as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


def silent() -> Rescaled:
    """Its gain starts at 0, and its averages do not show."""
    norm = Rescaled(C, momentum=0.3)
    nn.init.zeros_(norm.weight)
    nn.init.uniform_(norm.get_buffer("running_mean"))
    return norm


# A module, an input, and the shipped norm that it is.
SAME: dict[str, tuple[nn.Module, Tensor, str]] = {
    "gain from zero": (Own(lambda m, x: (1 + m.p) * rms(x)), TOKENS, "rms"),
    "log gain": (Own(lambda m, x: m.p.exp() * rms(x)), TOKENS, "rms"),
    "length one": (Own(lambda m, x: 20 * functional.normalize(x, dim=-1) * m.p), TOKENS, "rms"),
    "one gain": (Own(lambda m, x: m.p * functional.normalize(x, dim=-1), 1), TOKENS, "rms"),
    "unbiased": (Own(lambda m, x: m.p * (x - x.mean(-1, True)) / x.std(-1, keepdim=True)), ROWS,
                 "layer"),
    "gain of a map": (Own(lambda m, x: m.p * over(x, 1), 1, C, 1, 1), MAPS, "layer2d"),
    "all of a sample": (Own(lambda m, x: m.p * over(x, 1, 2, 3), 1, C, 1, 1), MAPS, "layer"),
    "constant": (Own(lambda _, x: functional.normalize(x, dim=-1)), TOKENS, "rms"),
    "fixed shape": (Own(lambda _, x: functional.layer_norm(x, (C,))), TOKENS, "layer"),
    "moved axes": (TimeMajorNorm(C, eps=1e-3, momentum=0.2), TOKENS, "batch"),
    "statistics as parameters": (DecayNorm(), MAPS, "batch"),
    "frozen": (frozen(), MAPS, "frozen"),
    "gain at zero": (silent(), MAPS, "batch"),
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
    if name == "gain at zero":
        means = [one.running_mean for one in (module, other[0].norm)]
        torch.testing.assert_close(*means, rtol=0, atol=1e-6)
    for training in (False, True):
        outputs = [one.train(training)(x) for one in (copy.deepcopy(network), other)]
        torch.testing.assert_close(*outputs, rtol=0, atol=2e-5)
    (found,) = recognise(network, (x,)).norms.values()
    if norm == "batch":
        assert found.settings["momentum"] == {"moved axes": 0.2}.get(name, 0.3)


class Film(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor, style: Tensor | str) -> Tensor:
        style = torch.ones(len(x), 1) if isinstance(style, str) else style
        return over(x, 0, 2, 3) * self.gain.view(-1, 1, 1) * style[..., None, None]


class Calling(nn.Module):
    """Calls its norm with further arguments."""

    def __init__(self, norm: nn.Module, *args: Any, **keywords: Any) -> None:
        super().__init__()
        self.inner, self.args, self.keywords = norm, args, keywords

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, *self.args, **self.keywords)


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
        "rms norm, channels last, and does something besides",
    ),
    "other scale": (Own(lambda m, x: m.p * over(x, 1).sigmoid(), C, 1, 1), MAPS, "no affine map"),
    "second input": (Calling(Film(), torch.rand(4, 1)), MAPS, "a second input"),
    "mode": (Calling(Film(), style="norm"), MAPS, "a second input"),
    "other evaluation": (Switching(C), MAPS, "something besides in evaluation"),
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
    found = recognise(nn.Sequential(network), (x,))
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
    found = recognise(nn.Sequential(module), (MAPS,))
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
    found = recognise(nn.Sequential(WithAuxiliary(C)), (MAPS,))
    assert not found.norms and found.left_alone["0"].resembles_norm
    kept = normexp.replace_norms(nn.Sequential(WithAuxiliary(C)), "as_built", MAPS)
    assert [name for name, _ in named_sites(kept)] == ["0"]


def test_a_class_of_norms_is_named_where_its_call_differs() -> None:
    network = nn.Sequential(AddNorm(), Calling(AddNorm(), TOKENS))
    found = recognise(network, (TOKENS,))
    assert found.norms.keys() == {"0"} and found.left_alone["1.inner"].resembles_norm


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_norm_inside_torchscript_is_left() -> None:
    network = nn.Sequential(torch.jit.script(nn.Sequential(nn.BatchNorm2d(C))), nn.BatchNorm2d(C))
    found = recognise(network, (MAPS,))
    assert found.norms.keys() == {"1"}
    left = found.left_alone["0.0"]
    assert (left.class_name, left.reason) == ("BatchNorm2d", "it is TorchScript")


class Standardized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return over(weight, 1, 2, 3)


def test_a_parametrized_weight_is_no_norm() -> None:
    conv = nn.Conv2d(C, C, 3)
    nn.utils.parametrize.register_parametrization(conv, "weight", Standardized())
    found = recognise(nn.Sequential(conv, nn.BatchNorm2d(C)), (MAPS,))
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
    assert recognise(Dropping(), (TOKENS,)).norms.keys() == {"layer"}


def test_a_norm_of_torch_with_another_forward_is_tried_like_others() -> None:
    network = nn.Sequential(nn.LayerNorm(C), nn.LayerNorm(C))
    network[0].forward = torch.tanh
    found = recognise(network, (TOKENS,))
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
    ((path, norm),) = recognise(network, (TOKENS,)).norms.items()
    assert not values_of(network.get_submodule(path), norm)["bias"].any()


def test_a_mask_must_be_true_where_a_value_is_real() -> None:
    mask = torch.arange(5) < torch.tensor([[5], [3], [4], [2]])
    network = Calling(MaskedNorm(), mask=mask)
    other = normexp.replace_norms(network, "batch", TOKENS)
    torch.testing.assert_close(other(TOKENS), network(TOKENS), rtol=0, atol=1e-5)
    (left,) = recognise(Calling(MaskedNorm(is_inverted=True), ~mask), (TOKENS,)).left_alone.values()
    assert left.resembles_norm


# --- As built, and what a network does with its norms ---------------------------------------------


class Fused(nn.Module):
    """Reads the weight of its norm in evaluation, as a fused kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        nn.init.uniform_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.norm(x)
        return functional.layer_norm(x, (C,), self.norm.weight, self.norm.bias, self.norm.eps)


def test_a_network_reads_the_norm_of_a_site_only_as_built() -> None:
    network = Fused()
    kept = normexp.replace_norms(network, "as_built", TOKENS).eval()
    assert torch.equal(kept(TOKENS), network.eval()(TOKENS))
    with pytest.raises(UserError, match="the weight of a replaced norm is read.*norm=as_built"):
        normexp.replace_norms(network, "rms", TOKENS)
    assert not hasattr(normexp.replace_norms(network, "rms").norm, "weight")
    network.norm = Own(
        lambda m, x: m.weight * rms(x), weight=nn.Parameter(torch.ones(C)), bias=None
    )
    network.norm.eps = 1e-5
    with pytest.raises(UserError, match="the weight of a replaced norm is read"):
        normexp.replace_norms(network, "rms", TOKENS)


@pytest.mark.parametrize("args", [(torch.rand(4, 1),), ("mode",)])
def test_norms_as_built_get_all_their_arguments_in_parts(args: tuple[Any, ...]) -> None:
    """So they do if the formula is not known."""
    network = Calling(Film(), *args)
    whole, split = (
        normexp.replace_norms(network, "as_built", MAPS, norm_batch_size=size) for size in (None, 2)
    )
    assert torch.equal(whole(MAPS), network(MAPS))
    styles = [args] * 2 if args == ("mode",) else [(part,) for part in args[0].split(2)]
    parts = [network.inner(x, *style) for x, style in zip(MAPS.split(2), styles, strict=True)]
    torch.testing.assert_close(split(MAPS), torch.cat(parts))


class Remembering(nn.Module):
    """Undoes its norm by statistics that the norm keeps."""

    def __init__(self) -> None:
        super().__init__()

        def normalize(module: Own, x: Tensor) -> Tensor:
            module.size = x.detach().abs().mean()
            return module.p * rms(x)

        self.norm = Own(normalize)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.norm.size


def test_a_network_that_its_formulas_do_not_reproduce_is_refused() -> None:
    network = Remembering()
    found = recognise(network, (TOKENS,))
    assert found.norms
    kept = normexp.replace_norms(network, "as_built", TOKENS)
    assert torch.equal(kept(TOKENS), network(TOKENS))
    with pytest.raises(UserError, match="no attribute 'size'"):
        check_formulas(network, found, (TOKENS,), {})
    doubling = nn.Sequential(Own(lambda m, x: m.p * rms(x)))
    found = recognise(doubling, (TOKENS,))
    doubling[0].function = lambda m, x: 2 * m.p * over(x, 1)
    with pytest.raises(UserError, match="other outputs in evaluation.*norm=as_built"):
        check_formulas(doubling, found, (TOKENS,), {})


# --- For a loop of one's own ----------------------------------------------------------------------


class Detector(nn.Module):
    """Takes lists of images and of targets; returns losses in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C), nn.ReLU(inplace=True))

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        scores = [self.body(image[None]).mean(dim=(2, 3)) for image in images]
        if targets is None:
            return [{"scores": one} for one in scores]
        return {
            "loss": sum(
                (one - t["at"]).square().mean() for one, t in zip(scores, targets, strict=True)
            )
        }


def test_any_network_trains_with_other_norms_in_a_loop_of_its_own(caplog) -> None:
    detector = Detector()
    before = copy.deepcopy(detector.state_dict())
    images = [torch.rand(3, 9, 9), torch.rand(3, 7, 11)]
    targets = [{"at": torch.zeros(C)}] * 2
    network = normexp.replace_norms(detector, "group", (images, targets), num_groups=2, eps=1e-2)
    assert caplog.messages == ["norm=group: 1 site in place of 1 BatchNorm2d: body.1"]
    norm = network.body[1].norm
    assert (type(norm).__name__, norm.num_groups, norm.eps) == ("GroupNorm", 2, 1e-2)
    network(images, targets)["loss"].backward()
    assert norm.weight.grad is not None and len(network.eval()(images)) == 2
    torch.testing.assert_close(detector.state_dict(), before, rtol=0, atol=0)


def test_a_mapping_names_the_arguments_and_the_device_and_mode_are_kept() -> None:
    network = nn.Sequential(nn.LayerNorm(C)).double().eval()
    other = normexp.replace_norms(network, "rms", {"input": TOKENS.double()})
    assert other(TOKENS.double()).dtype == torch.double and not other.training
    assert not any(module.training for module in other.modules())


@pytest.mark.parametrize(
    ("norm", "x", "knobs", "message"),
    [
        ("group", MAPS, {"num_groups": 4}, "num_groups=4 does not divide"),
        ("group", MAPS, {"groups": 4}, "norm.groups: unknown key"),
        ("grop", MAPS, {}, "norm=grop.*group"),
        ("instance", ROWS, {}, "norm at 0: .*instance norm pools positions"),
        ("group", TOKENS, {}, "a forward of the model Sequential fails"),
        ("as_built", MAPS, {"eps": 1e-3}, "eps has no effect"),
        ("as_built", MAPS, {"norm_batch_size": 0}, "norm_batch_size=0"),
        (nn.GroupNorm, MAPS, {}, "norm=.*GroupNorm.*: must be a string"),
        ("batch", MAPS, {"half_life": 100}, "half_life needs a training by normexp"),
        ("batch", MAPS, {"at": {"0": "group"}}, "at needs a training by normexp"),
    ],
)
def test_what_does_not_fit_is_refused(
    norm: Any, x: Tensor, knobs: dict[str, Any], message: str
) -> None:
    network = nn.Sequential(nn.BatchNorm1d(C) if x.ndim == 2 else nn.BatchNorm2d(C))
    with pytest.raises(UserError, match=message):
        normexp.replace_norms(network, norm, x, **knobs)


@pytest.mark.parametrize("model", [nn.Linear, nn.Linear(2, 2).state_dict()])
def test_only_a_module_has_norms(model: Any) -> None:
    with pytest.raises(UserError, match="must be an nn.Module"):
        normexp.replace_norms(model, "group", MAPS)


def test_what_a_norm_needs_around_it_and_the_network_lacks_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else norm=nf would be no norm at all under the name of another."""
    network = nn.Sequential(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C))
    normexp.replace_norms(network, "nf", MAPS)
    assert "act=scaled_relu, conv=scaled_weight_standardized" in caplog.text
    caplog.clear()
    normexp.replace_norms(network, "layer", MAPS)
    assert "in place of the norm's" not in caplog.text


class Functional(nn.Sequential):
    """Normalizes by a function behind the norm that it holds."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.group_norm(super().forward(x), 2)


def test_a_network_that_normalizes_by_a_function_too_is_said(caplog) -> None:
    network = Functional(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C))
    for model in (network, torch.compile(network, backend="eager")):
        normexp.replace_norms(model, "layer", MAPS)
        assert caplog.messages[1:] == ["norm=layer: left alone: 1 Functional (it calls group_norm)"]
        caplog.clear()


def test_a_batch_norm_without_averages_stays_without_them() -> None:
    own = Own(lambda m, x: over(x, 0, 2, 3) * m.p, C, 1, 1)
    for norm in (own, nn.BatchNorm2d(C, track_running_stats=False)):
        network = nn.Sequential(nn.Conv2d(C, C, 1), norm).eval()
        other = normexp.replace_norms(network, "batch", MAPS)
        torch.testing.assert_close(other(MAPS), network(MAPS), rtol=0, atol=2e-5)


def test_a_knob_wins_over_the_old_norm_also_at_its_shipped_value() -> None:
    old = nn.BatchNorm2d(C, eps=1e-2, momentum=0.5, affine=False, track_running_stats=False)
    knobs = {"eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}
    network = normexp.replace_norms(nn.Sequential(old), "batch", MAPS, **knobs)
    norm: Any = network[0].norm  # type: ignore[index]
    assert knobs == {name: getattr(norm, name) for name in knobs}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_padded_transformer_of_torch_evaluates_with_other_norms() -> None:
    """Its fast path for nested tensors reads the weight of the first layer's norm."""
    layer = nn.TransformerEncoderLayer(C, 2, 8, dropout=0, batch_first=True)
    network = nn.TransformerEncoder(layer, 1)
    padded = torch.arange(5) >= torch.tensor([[5], [3], [2], [4]])
    inputs = {"src": TOKENS, "src_key_padding_mask": padded}
    other = normexp.replace_norms(network, "layer", inputs).eval()
    with torch.no_grad():
        expected, output = network.eval()(**inputs), other(**inputs)
    torch.testing.assert_close(output[~padded], expected[~padded], rtol=0, atol=1e-5)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("norm", "knobs", "is_said"),
    [("instance", {}, True), ("batch", {"norm_batch_size": 2}, True), ("batch", {}, False)],
)
def test_a_site_whose_first_axis_is_not_that_of_samples_is_said(
    norm: str, knobs: dict[str, Any], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    normexp.replace_norms(TimeFirst(), norm, TOKENS, **knobs)
    said = "at norm the first axis, taken for samples, is not that of the inputs"
    assert (said in caplog.text) is is_said


def test_a_norm_alone_is_no_network() -> None:
    with pytest.raises(UserError, match="no norm that is recognised"):
        normexp.replace_norms(nn.LayerNorm(C), "rms", TOKENS)


def test_without_inputs_only_norms_of_torch_are_replaced(caplog) -> None:
    class RowNorm(nn.LayerNorm):
        pass

    network = nn.Sequential(nn.LayerNorm(C), RowNorm(C))
    other = normexp.replace_norms(network, "rms")
    assert type(other[1]) is RowNorm
    assert re.search(r"left alone: 1 RowNorm \(without inputs", caplog.messages[1])
    assert isinstance(recognise(network, None).left_alone["1"], LeftAlone)


def test_a_site_takes_the_place_of_a_module_that_is_used_twice() -> None:
    shared = Own(lambda m, x: m.p * rms(x))
    network = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    replaced(network, NormFactory(lambda n, **_: nn.RMSNorm(n)), TOKENS)
    assert network[0] is network[1][1] and network[0] is not shared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_in_half_precision_may_hold_its_norms_in_float32(dtype: torch.dtype) -> None:
    class Wide(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.float()).type_as(input)

    network = nn.Sequential(nn.Linear(C, C).to(dtype), Wide(C), nn.Linear(C, 3).to(dtype))
    x = TOKENS.to(dtype)
    other = normexp.replace_norms(network, "layer", x)
    torch.testing.assert_close(other(x), network(x), rtol=0, atol=0.05)


@pytest.mark.parametrize("size", [None, 2])
def test_norms_can_be_replaced_again(size: int | None) -> None:
    """The second call decides on the sites too."""
    network = nn.Sequential(nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), nn.Flatten(2))
    nn.init.uniform_(network[1].get_parameter("weight"))
    once = normexp.replace_norms(network, "batch", MAPS, norm_batch_size=size)
    twice = normexp.replace_norms(once, "batch", MAPS)
    assert [name for name, _ in named_sites(twice)] == ["1"]
    for training in (False, True):
        outputs = [one.train(training)(MAPS) for one in (copy.deepcopy(network), twice)]
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="left alone: 1 Site .without inputs"):
        normexp.replace_norms(once, "batch")


def test_a_site_that_stays_keeps_its_norm_batch_size() -> None:
    """EvalNorm is no norm that is recognised."""
    network = nn.Sequential(nn.BatchNorm2d(C), nn.Conv2d(C, C, 1))
    once = normexp.replace_norms(network, "eval_norm", MAPS, norm_batch_size=2)
    twice = normexp.replace_norms(nn.Sequential(once, nn.BatchNorm2d(C)), "layer", MAPS)
    assert [site.norm_batch_size for _, site in named_sites(twice)] == [2, None]


class Freezing(nn.Sequential):
    """Trains with its norms in evaluation mode."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def test_frozen_norms_stay_so_or_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    network = Freezing(nn.BatchNorm2d(C), nn.Conv2d(C, C, 1), nn.BatchNorm2d(C)).train()
    network[0].requires_grad_(False)
    other = normexp.replace_norms(network, "group1", MAPS)
    trained = {name for name, p in other.named_parameters() if p.requires_grad}
    assert trained == {"1.weight", "1.bias", "2.norm.weight", "2.norm.bias"}
    assert "parameters stay frozen at 0" in caplog.text
    assert "trains with 0, 2 in evaluation mode" in caplog.text
    caplog.clear()
    normexp.replace_norms(network, "none", MAPS)
    assert "frozen at" not in caplog.text  # it has no parameters
    caplog.clear()
    normexp.replace_norms(network, "as_built", MAPS)
    assert "evaluation mode" not in caplog.text and "frozen" not in caplog.text


def test_a_norm_that_has_just_been_trained_is_recognised():
    network = nn.Sequential(nn.Linear(C, C), RememberingNorm())
    network(TOKENS)
    assert recognise(network, (TOKENS,)).norms["1"].formula.name == "rms"
