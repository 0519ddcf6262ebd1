"""conf/norm: knobs that exist, what a new norm costs, and what is refused with what works."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import get_object
from norm_cases import (
    KNOBS,
    KNOBS_OF,
    NEED_POSITIONS,
    PER_POSITION,
    RUNNING,
    SHIPPED,
    C,
    make,
    maker,
)
from torch import nn
from train_cases import spec_of

from normexp import norms
from normexp.batching.sizes import Sizes
from normexp.build import build_data, build_norm, norm_target
from normexp.cells.cell import make_builder, make_recipe
from normexp.config.compose import compose_config
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm, GhostBatchNorm
from normexp.norms.group import GroupNorm
from normexp.norms.zoo.batch import BatchRenorm
from normexp.norms.zoo.power import MovingAverageBatchNorm, PowerNorm
from normexp.norms.zoo.rms import TaperNorm

TEXTS: Any = SimpleNamespace(input_shape=(16,))  # all that `build_norm` asks of data


@pytest.mark.parametrize("name", ["group", "batch_per_position", "frn", "deviations/ln_no_eps"])
def test_a_file_builds_its_norm_with_the_eps_of_the_config(name):
    config = compose_config([f"norm={name}", "eps=0.25"])
    factory = build_norm(config, Sizes(8), TEXTS)
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
    network = make_builder(spec, make_recipe(spec, data), data)(0)
    norms = [m for m in network.modules() if hasattr(m, key)]
    assert [getattr(norm, key) for norm in norms] == [expected] * 3


def test_outside_a_training_a_norm_counts_on_a_thousand_steps():
    target, _ = norm_target(compose_config(["norm=power"])["norm"])
    assert target.call(C).warmup_steps == 100


def test_public_names_are_the_classes_of_all_norms_but_the_mistakes():
    shipped = [name for name in SHIPPED if "/" not in name]
    targets = {KNOBS_OF[name]["_target_"] for name in shipped}
    classes = {get_object(target) for target in targets}
    assert classes <= {getattr(norms, name) for name in norms.MODULES}


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
