"""Norms by config: knobs, what a new one costs, what is refused; norms from the wild."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import get_object
from norm_cases import (
    EPS,
    KNOBS,
    KNOBS_OF,
    NEED_POSITIONS,
    PER_POSITION,
    RUNNING,
    SHAPES,
    SHIPPED,
    C,
    make,
    maker,
    random_tensor,
)
from torch import Tensor, nn
from torch.testing import assert_close
from train_cases import spec_of
from wild_norms import LlamaRMSNorm

from normexp import norms
from normexp.errors import UserError
from normexp.norms.adapt import adapt, find_layout, foreign_factory
from normexp.norms.batch import BatchNorm, GhostBatchNorm
from normexp.norms.build import build_norm, norm_target
from normexp.norms.factory import NormFactory
from normexp.norms.sample import GroupNorm, InstanceNorm
from normexp.norms.zoo.batch import BatchRenorm
from normexp.norms.zoo.power import MovingAverageBatchNorm, PowerNorm
from normexp.norms.zoo.rms import TaperNorm
from normexp.training.cells.cell import make_builder
from normexp.training.config.compose import compose_config
from normexp.training.data.build import build_data
from normexp.training.recipe import recipe_of

TEXTS: Any = SimpleNamespace(input_shape=(16,))  # all that `build_norm` asks of data


@pytest.mark.parametrize("name", ["group", "batch_per_position", "frn", "deviations/ln_no_eps"])
def test_a_file_builds_its_norm_with_the_eps_of_the_config(name):
    config = compose_config([f"norm={name}", "eps=0.25"])
    factory = build_norm(config, num_positions=TEXTS.input_shape[-1])
    norm = factory(2 * C).norm
    assert norm.eps == (0.0 if "no_eps" in name else 0.25)
    if name == "frn":
        assert factory.slots.act == "tlu" and factory.view == "sequence"


OWN_NORM = """
from torch import nn

class Fades(nn.Identity):
    def __init__(self, num_features, num_training_steps):
        super().__init__()
        self.length = num_training_steps
"""


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (["norm=batch_renorm", "steps=50"], "r_steps", 40),
        (["norm=batch_renorm", "steps=50", "+norm.num_training_steps=1000"], "r_steps", 800),
        (["norm=power", "steps=15"], "warmup_steps", 2),
        (["norm=moving_average_batch", "epochs=2", "norm.warmup=0.5"], "warmup_steps", 40),
        (["norm=custom", "norm._target_=fades.Fades", "steps=70"], "length", 70),
    ],
)
def test_a_norm_receives_the_number_of_steps_of_its_training(words, key, expected, own_module):
    own_module("fades", OWN_NORM)
    spec = spec_of(*words)
    data = build_data(spec.config["data"])
    network = make_builder(spec, recipe_of(spec, data), data)(0)
    norms = [m for m in network.modules() if hasattr(m, key)]
    assert [getattr(norm, key) for norm in norms] == [expected] * 3


def test_outside_a_training_a_norm_counts_on_a_thousand_steps():
    target, _ = norm_target(compose_config(["norm=power"])["norm"])
    assert target.call(C).warmup_steps == 100


@pytest.mark.parametrize("name", SHIPPED)
def test_every_norm_but_the_mistakes_can_be_imported_from_normexp_norms(name):
    cls = get_object(KNOBS_OF[name]["_target_"])
    is_public = cls.__module__ != "normexp.norms.zoo.deviations"
    assert (cls.__name__ in dir(norms)) == is_public
    assert getattr(norms, cls.__name__, None) is (cls if is_public else None)


RENORM = {"r_max": 3, "d_max": 5, "warmup": 0, "r_ramp_end": 0, "d_ramp_end": 0}
RENORM["num_training_steps"] = 10
# A class, its other knobs, one that it refuses, and what the message says beside it.
REFUSED_KNOBS: list[tuple[type[nn.Module], dict[str, Any], dict[str, Any], str]] = [
    *((BatchNorm, {}, {"momentum": value}, "try norm") for value in (0.0, -0.1, 1.5)),
    (PowerNorm, KNOBS["power"], {"momentum": None}, "try norm"),
    (MovingAverageBatchNorm, KNOBS["moving_average_batch"], {"memory": 0}, "try norm"),
    (GhostBatchNorm, {}, {"ghost_size": 0}, "try norm"),
    *((BatchRenorm, RENORM, {key: -1}, "try norm") for key in ("r_max", "d_max")),
    *((BatchRenorm, RENORM, {"warmup": value}, "try norm") for value in (0.5, 5)),
    (BatchRenorm, RENORM, {"d_ramp_end": 1.5}, "try norm"),
    *((TaperNorm, KNOBS["taper"], {"warmup": value}, "try norm") for value in (0, 0.7)),
    (TaperNorm, KNOBS["taper"], {"taper_end": 1.5}, "try norm"),
    (GroupNorm, {}, {"num_groups": 5}, "try norm.num_groups=4, or"),
    (GroupNorm, {}, {"num_groups": 0}, "try norm.num_groups=1"),
    (GroupNorm, {"num_groups": 2}, {"groups_policy": "gcd"}, "strict.*nearest"),
    *((cls, {}, {"momentum": "high"}, "must be a number") for cls in (BatchNorm, InstanceNorm)),
]


@pytest.mark.parametrize(("cls", "others", "knob", "message"), REFUSED_KNOBS)
def test_knobs_that_make_no_norm_are_refused_with_ones_that_do(cls, others, knob, message):
    ((key, value),) = knob.items()
    said = "null" if value is None else value
    with pytest.raises(UserError, match=f"{key}={said}.*{message}"):
        cls(C, **{**others, **knob})


@pytest.mark.parametrize(
    ("num_features", "num_groups", "expected"),
    [(48, 32, 24), (48, 16, 16), (16, 32, 8), (12, 5, 4), (1, 8, 1)],
)
def test_nearest_policy_takes_and_logs_the_nearest_divisor(
    caplog, num_features, num_groups, expected
):
    with caplog.at_level(logging.INFO):
        norm = GroupNorm(num_features, num_groups=num_groups, groups_policy="nearest")
    assert norm.num_groups == expected
    assert len(caplog.messages) == (num_groups != expected)


ONE_PER_GROUP = {"num_groups": C}
ONE_VALUE = [name for name in RUNNING if name not in (*PER_POSITION, "taper")]
# A norm, knobs of its own, an input, and the message.
REFUSED_INPUTS: list[tuple[str, dict[str, int], tuple[int, ...], str]] = [
    *((name, {}, (1, C, 1) if name in NEED_POSITIONS else (1, C), "try") for name in ONE_VALUE),
    *((name, {}, shape, "try norm") for name in NEED_POSITIONS for shape in ((4, C), (4, C, 1))),
    *((name, ONE_PER_GROUP, (4, C, 1, 1), "try") for name in ("group", "evonorm_s0")),
    ("causal_group", ONE_PER_GROUP, (4, C, 1), "try"),
    *((f"causal_{name}", {}, (4, C, 3, 3), "try norm=group") for name in ("group", "instance")),
    ("batch_per_position", {}, (4, C, 7), "num_positions=7.*qk_norm=false"),
    *(("batch_per_position", {}, shape, "norm.view=seq") for shape in ((4, C), (4, C, 2, 2))),
    ("batch_per_position", {}, (1, C, 5), "one sample.*try a larger batch_size"),
]


@pytest.mark.parametrize(("name", "knobs", "shape", "message"), REFUSED_INPUTS)
def test_inputs_that_a_norm_cannot_take_are_refused(name, knobs, shape, message):
    norm, x = maker(name, **knobs)(C).double(), torch.zeros(shape, dtype=torch.double)
    with pytest.raises(UserError, match=message) as refused:
        norm(x)
    if "per_position" not in name:
        assert f"({', '.join(map(str, shape))})" in str(refused.value)
    assert not norm.state_dict().get("num_batches_tracked")


@pytest.mark.parametrize("name", [*ONE_VALUE, *PER_POSITION, "causal_instance"])
def test_one_value_per_statistic_is_taken_in_evaluation(name):
    if name != "batch_instance":  # which pools positions in evaluation too
        assert make(name).eval()(torch.zeros(1, C, 1).double()).isfinite().all()


def test_a_mask_does_not_hide_real_positions_that_have_no_statistics():
    with pytest.raises(UserError, match="num_positions=5.*num_positions=7"):
        make("batch_per_position")(torch.zeros(4, C, 7).double(), torch.ones(4, 7).bool())


def norm_of(forward: Callable[[Any, Tensor], Any]) -> type[nn.Module]:
    """A class without arguments whose forward is this function."""
    return type("TheirNorm", (nn.Module,), {"forward": forward})


@pytest.mark.parametrize(
    "make",
    [
        lambda size=2.5, channels=3: nn.LayerNorm(channels),  # noqa: ARG005
        lambda k: nn.LayerNorm(k),
        lambda k, /: nn.LayerNorm(k),
        lambda *k: nn.LayerNorm(*k),
    ],
)
def test_features_go_to_the_argument_named_for_them_or_to_the_only_required_one(make):
    assert adapt(make, target="t", eps=EPS)(C).normalized_shape == (C,)


def test_eps_has_one_value_unless_the_user_sets_it():
    assert build(LlamaRMSNorm).norm.variance_epsilon == EPS
    assert build(LlamaRMSNorm, variance_epsilon=0.5).norm.variance_epsilon == 0.5


class BareRMSNorm(nn.Module):
    """No features asked, no parameters: only what it pools tells its layout."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=self.axis, keepdim=True) + EPS).sqrt()


class RowNorm(nn.Module):
    """Batch statistics of rows (N, C); with positions its running mean takes another shape."""

    running_mean: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=0)
        self.running_mean = 0.9 * self.running_mean + 0.1 * mean.detach()
        return x - mean


def build(make, **knobs) -> nn.Module:
    return foreign_factory(partial(make, **knobs), target="their.Norm", eps=EPS)(C).double()


def last(reference: nn.Module, x: Tensor) -> Tensor:
    return reference.double()(x.movedim(1, -1)).movedim(-1, 1)


def joined(reference: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The reference over (N, C, P), P positions."""
    return reference(x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)).view(x.shape)


ALL_DIMS, WITH_POSITIONS = (2, 3, 4, 5), (3, 4, 5)
RMS = partial(last, nn.RMSNorm(C, eps=EPS))
INSTANCE = partial(joined, nn.InstanceNorm1d(C, eps=EPS))
# A norm, the same over (N, C, *), and for which numbers of dimensions.
LAYOUTS = [
    (nn.LayerNorm, partial(last, nn.LayerNorm(C, eps=EPS)), ALL_DIMS),
    *((make, RMS, ALL_DIMS) for make in (nn.RMSNorm, LlamaRMSNorm, BareRMSNorm)),
    *(
        (make, partial(joined, nn.BatchNorm1d(C, eps=EPS).double()), ALL_DIMS)
        for make in (nn.BatchNorm1d, nn.BatchNorm2d)
    ),
    # torch takes (N, C, T) for one image without a batch axis, and only warns.
    (nn.InstanceNorm2d, INSTANCE, WITH_POSITIONS),
    (partial(nn.InstanceNorm2d, affine=True), INSTANCE, WITH_POSITIONS),
    (partial(nn.GroupNorm, num_groups=4), nn.GroupNorm(4, C, eps=EPS).double(), ALL_DIMS),
    (RowNorm, partial(joined, lambda x: x - x.mean(dim=(0, 2), keepdim=True)), ALL_DIMS),
]


@pytest.mark.parametrize(("make", "reference", "dims"), LAYOUTS)
def test_a_norm_of_any_layout_takes_channels_first_and_any_number_of_positions(
    make, reference, dims
):
    for num_dims in dims:
        x = random_tensor(*SHAPES[num_dims])
        assert_close(build(make)(x), reference(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [nn.Tanh, nn.Identity, partial(BareRMSNorm, axis=1)])
def test_without_a_sign_of_the_layout_channels_come_first(make):
    layout = find_layout(adapt(make, target="their.Norm", eps=None), C, target="their.Norm")
    assert not layout.channels_last and layout.num_dims == ALL_DIMS


def test_a_foreign_batch_norm_serves_token_sites_with_padding():
    site = NormFactory(lambda n: foreign_factory(nn.BatchNorm2d, target="t", eps=EPS)(n).double())
    x, mask = random_tensor(4, 5, C), torch.arange(5) < torch.tensor([[5], [2], [3], [1]])
    expected = nn.BatchNorm1d(C, eps=EPS).double()(x[mask])
    assert_close(site.tokens(C)(x, mask)[mask], expected, rtol=0, atol=1e-12)


def test_the_layout_is_noted_once_and_the_random_state_is_kept(caplog):
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO):
        factory = foreign_factory(nn.LayerNorm, target="t", eps=1e-5)
        for num_features in (8, 16):
            factory(num_features)
    assert caplog.messages == ["norm._target_=t takes channels last, 2-D, 3-D, 4-D, 5-D inputs"]
    assert torch.equal(torch.get_rng_state(), state)


class AlongTheWrongAxis(nn.Module):
    """Its gain lacks a view: on maps it is broadcast along the width."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(dim=1, keepdim=True) + 1e-5) * self.gain


def test_a_norm_that_treats_positions_unlike_may_have_its_channels_last():
    layout = {"layout": "last"}
    x = random_tensor(*SHAPES[4]).float()
    out = foreign_factory(AlongTheWrongAxis, target="their.Norm", eps=EPS, **layout)(C)(x)
    expected = x.movedim(1, -1)
    assert_close(out, (expected / (expected.abs().mean(1, True) + 1e-5)).movedim(-1, 1))


class Late(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(torch.ones(x.shape[1], *[1] * (x.ndim - 2)))
        return x * self.gain


def failing(_, x: Tensor) -> Tensor:
    raise RuntimeError(f"no {x.ndim}-D today")


def broken_key(num_features: int) -> nn.Module:  # noqa: ARG001
    raise KeyError("gain")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            norm_of(lambda _, x: x[:, ::2]),
            r"does not fit on an input of shape \(4, 8\): .*\(4, 4\)",
        ),
        (
            norm_of(failing),
            r"\(4, 8\): RuntimeError: no 2-D today \(test_norm_conf.py, line \d+\); norm.layout",
        ),
        (partial(nn.LayerNorm, normalized_shape=4), r"does not fit .*norm\.layout=first or"),
        (broken_key, "cannot be built for 8 features: KeyError: 'gain'"),
        (nn.GroupNorm, "needs the argument num_groups; set norm.num_groups="),
        (nn.functional.relu, ""),
        (lambda n: n, "made a int"),
        (norm_of(lambda _, x: (x, x)), r"returns a tuple, must return one tensor$"),
        (
            norm_of(lambda _, x: x.double() / 2),
            r"returns torch.float64 for torch.float32; let it end",
        ),
        (
            AlongTheWrongAxis,
            r"has gain of shape \(8,\) along the last axis of its input, while its statistics take "
            r"axis 1 .*view it as \(-1, 1, 1\)",
        ),
        (Late, "creates or reshapes parameters .* in its forward; make them in __init__"),
        (nn.LazyBatchNorm2d, "uninitialized"),
        (lambda n: torch.jit.script(nn.BatchNorm2d(n)), "is TorchScript; name the class"),
    ],
)
def test_what_keeps_no_norm_contract_is_refused_with_the_reason(make, reason):
    with pytest.raises(UserError, match=rf"norm\._target_=their\.Norm .*{reason}"):
        build(make)


class WeighedNorm(nn.Module):
    """Its forward asks for a mask."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_features))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # channels last
        share = (mask.to(x.dtype) / mask.sum())[..., None]
        dims = tuple(range(x.ndim - 1))
        mean = (share * x).sum(dims)
        return (x - mean) * ((share * (x - mean).square()).sum(dims) + EPS).rsqrt() * self.gain


def test_a_norm_that_asks_for_a_mask_gets_one_that_is_true_everywhere():
    x = random_tensor(2, C, 3, 3)
    assert_close(build(WeighedNorm)(x), nn.BatchNorm2d(C, eps=EPS).double()(x), rtol=0, atol=1e-12)


def test_a_forward_that_asks_for_more_is_refused_in_a_line():
    make = type("TheirNorm", (nn.Module,), {"forward": lambda _, x, style: x * style})
    with pytest.raises(UserError, match="^norm._target_=their.Norm: its forward needs style besid"):
        build(make)


def test_the_layout_that_is_said_is_the_only_one_tried():
    def layout(say: str) -> nn.Module:
        make = foreign_factory(BareRMSNorm, target="t", eps=EPS, layout=say)
        return make(C).double()

    x = random_tensor(2, C, 3, 3)
    assert_close(layout("last")(x), RMS(x), rtol=0, atol=1e-12)
    assert_close(layout("first")(x), x / (x.square().mean(-1, keepdim=True) + EPS).sqrt())
    with pytest.raises(UserError, match=r"norm\.layout=both"):
        layout("both")


@pytest.mark.parametrize("name", ["LayerNorm2d", "BatchNormAct2d", "FilterResponseNormTlu2d"])
def test_a_norm_of_timm_learns_at_a_site(name: str):
    make = get_object(f"timm.layers.{name}")
    site = NormFactory(foreign_factory(make, target=name, eps=EPS))(C)
    site(random_tensor(4, C, 3, 3, dtype=torch.float)).square().sum().backward()
    assert list(site.parameters())
    assert all(p.grad is not None for p in site.parameters())
