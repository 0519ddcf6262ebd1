"""`replace_norms`: any network gets other norms, for a loop of one's own."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from foreign_norms import MAPS, ROWS, TOKENS, C, Own, over, rms
from surgery_cases import replaced
from torch import Tensor, nn
from torch.nn import functional

import normexp
from normexp.any_network.recognise import LeftAlone, recognise
from normexp.errors import UserError
from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites


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
    assert caplog.messages == ['norm="group": replaced 1 BatchNorm2d: body.1']
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


def test_a_class_is_a_norm_and_its_weights_go_home_by_their_names() -> None:
    network = nn.Sequential(nn.BatchNorm2d(C), nn.Conv2d(C, C, 1))
    of_a_class = normexp.replace_norms(network, nn.InstanceNorm2d, MAPS)
    assert any(isinstance(module, nn.InstanceNorm2d) for module in of_a_class.modules())
    grouped = normexp.replace_norms(network, "group", MAPS, num_groups=2)
    at_home = nn.Sequential(nn.GroupNorm(2, C), nn.Conv2d(C, C, 1))
    at_home.load_state_dict(normexp.state_as_built(grouped))
    torch.testing.assert_close(at_home(MAPS), grouped(MAPS))


def norm_in_a_function() -> Any:
    class Own(nn.Module): ...

    return Own


@pytest.mark.parametrize(
    ("norm", "x", "knobs", "message"),
    [
        ("group", MAPS, {"num_groups": 4}, "num_groups=4 does not divide .*; try num_groups="),
        (
            "group",
            MAPS,
            {"groups": 4},
            '^groups: unknown key of norm="group"; did you mean num_groups',
        ),
        ("grop", MAPS, {}, 'norm="grop".*group'),
        ("instance", ROWS, {}, "norm at 0: .*instance norm pools positions"),
        ("group", TOKENS, {}, "a forward of the model Sequential fails"),
        ("as_built", MAPS, {"eps": 1e-3}, "eps has no effect"),
        ("as_built", MAPS, {"norm_batch_size": 0}, "norm_batch_size=0"),
        (7, MAPS, {}, "norm=7: must be a string"),
        (
            nn.GroupNorm,
            MAPS,
            {},
            r"GroupNorm\" needs the argument num_groups; set num_groups=\.\.\.",
        ),
        (norm_in_a_function(), MAPS, {}, "norm_in_a_function.<locals>.Own is defined inside a"),
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
    assert 'act="scaled_relu", conv="scaled_weight_standardized"' in caplog.text
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
        left_alone = 'norm="layer": left alone: 1 Functional (it calls group_norm)'
        assert caplog.messages[1:] == [left_alone]
        caplog.clear()


def test_a_batch_norm_without_averages_stays_without_them() -> None:
    own = Own(lambda m, x: over(x, 0, 2, 3) * m.p, C, 1, 1)
    for norm in (own, nn.BatchNorm2d(C, track_running_stats=False)):
        network = nn.Sequential(nn.Conv2d(C, C, 1), norm).eval()
        other = normexp.replace_norms(network, "batch", MAPS)
        torch.testing.assert_close(other(MAPS), network(MAPS), rtol=0, atol=2e-5)


def test_averages_that_were_switched_off_later_are_held() -> None:
    network = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C))
    network[1].track_running_stats = False
    other = normexp.replace_norms(network, "batch", ROWS)
    for one in (network, other):
        one.train()(3 * ROWS + 1)
    torch.testing.assert_close(other.eval()(ROWS), network.eval()(ROWS), rtol=0, atol=1e-5)


def test_a_norm_that_keeps_no_averages_gets_none_from_a_batch_norm() -> None:
    network = nn.Sequential(nn.BatchNorm2d(C))
    other = normexp.replace_norms(network, "torch.nn.InstanceNorm2d", MAPS)
    (norm,) = (module for module in other.modules() if isinstance(module, nn.InstanceNorm2d))
    assert not norm.track_running_stats


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
    said = "at norm samples are counted in inputs of shape (T, N, ...)"
    assert (said in caplog.text) is is_said


def test_a_number_beside_the_samples_is_no_axis_of_samples(caplog) -> None:
    class Scaled(nn.Sequential):
        def forward(self, scale: Tensor, x: Tensor) -> Tensor:
            return scale * super().forward(x)

    network = Scaled(nn.BatchNorm2d(C))
    normexp.replace_norms(network, "batch", (torch.tensor(2.0), MAPS), norm_batch_size=2)
    assert len(caplog.messages) == 1


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


def test_a_site_that_stays_still_finds_its_samples_after_a_call_without_inputs() -> None:
    once = normexp.replace_norms(TimeFirst(), "batch", TOKENS, norm_batch_size=2)
    twice = normexp.replace_norms(nn.ModuleList([once, nn.LayerNorm(C)]), "rms")
    torch.testing.assert_close(twice[0](TOKENS), once(TOKENS), rtol=0, atol=0)


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
