"""Every shipped norm: its card, and what it mixes in a network, as its formula says."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from checks_cases import convnet, encoder, gpt, image_data, padded_data, shipped, text_data
from torch.nn import functional

from normexp.checks.card import measure_norm
from normexp.checks.network import BuiltNetwork
from normexp.checks.preflight import check_padding, examine
from normexp.config.compose import compose_config
from normexp.config.groups import group_choices
from normexp.config.shipped import shipped_defaults
from normexp.config.sizes import Sizes
from normexp.norms.build import build_norm
from normexp.norms.site import View


class Mixed(NamedTuple):
    """Expected properties of a norm on tokens, in training and in evaluation."""

    samples: tuple[bool, bool] = (False, False)
    future: tuple[bool, bool] = (False, False)


SEPARATE = Mixed()
IN_TRAINING = (True, False)
ALWAYS = (True, True)

TEXT, MIXED = Mixed(future=ALWAYS), Mixed(samples=IN_TRAINING, future=IN_TRAINING)
MIXED_TEXT = Mixed(samples=IN_TRAINING, future=ALWAYS)
# Norms with the same entry: of the view token, and of the view sequence.
BY_ENTRY: list[tuple[Mixed, str, str]] = [
    (
        SEPARATE,
        "layer layer2d group causal_group rms group1 position scale simple_rms crms evonorm_s0 dyt "
        "salu derf isru hard_tanh frozen pre_affine_rms gated_rms seednorm bhyt grn proxy_group "
        "deviations/ln_unbiased deviations/ln_no_eps none skipinit ws nf group_ws",
        "layer2d causal_instance causal_group rms position scale simple_rms crms dyt derf none "
        "skipinit gated_rms seednorm",
    ),
    (
        TEXT,
        "",
        "layer instance group group1 frn evonorm_s0 deviations/ln_unbiased deviations/ln_time "
        "deviations/ln_hw group_ws grn",
    ),
    (
        MIXED,
        "batch evonorm_b0 batch_renorm sync power l1_batch moving_average_batch eval_norm "
        "rep_batch progressive_rep_batch "
        "switchable batch_channel mode deviations/bn_unbiased deviations/bn_eps_outside "
        "deviations/bn_biased_ema "
        "deviations/bn_naive_var deviations/no_eps",
        "batch ghost batch_renorm power moving_average_batch",
    ),
    (MIXED_TEXT, "", "evonorm_b0 batch_instance batch_channel mode eval_norm switchable"),
    (Mixed(samples=IN_TRAINING), "taper", "batch_per_position deviations/bn_per_position"),
]
VIEWS: tuple[View, View] = ("token", "sequence")
TABLE: dict[tuple[str, View], Mixed] = {
    (name, view): mixed
    for mixed, *names in BY_ENTRY
    for view, words in zip(VIEWS, names, strict=True)
    for name in words.split()
}
FAST = ("batch", "batch_per_position", "layer", "instance", "causal_group")
SHIPPED = [name for name in group_choices("norm") if name not in ("custom", "as_built")]
CASES = pytest.mark.parametrize(
    ("name", "view"),
    [
        pytest.param(*case, id="-".join(case), marks=() if case[0] in FAST else pytest.mark.slow)
        for case in TABLE
    ],
)


def test_table_has_every_shipped_norm():
    assert {name for name, _ in TABLE} == set(SHIPPED)


def test_a_norm_is_declared_not_to_mix_samples_if_it_mixes_none_in_either_view():
    mixing = {name for (name, _), mixed in TABLE.items() if any(mixed.samples)}
    for name in SHIPPED:
        declared = (shipped_defaults("norm", name) or {}).get("mixes_samples")
        assert declared is (None if name in mixing else False)


@CASES
def test_samples_and_future_that_a_norm_mixes(name: str, view: View):
    data = text_data()
    traits = examine(
        gpt(shipped(name, data, view)), data, Sizes(8), drop_last=True, allow_leak=True
    )
    mixes = (traits.mixes_samples, traits.mixes_samples_in_evaluation)
    leaks = (traits.leaks_future_in_training, traits.leaks_future)
    assert (mixes, leaks) == TABLE[name, view]


@CASES
def test_no_shipped_norm_reads_padding(name: str, view: View):
    data = padded_data()
    network = encoder(shipped(name, data, view))
    check_padding(BuiltNetwork(network, data, Sizes(8), drop_last=True))


# Deviations that are shipped to be seen, and backwards that are an approximation by definition.
BREAKS = {
    "deviations/no_eps": {"finite"},
    "deviations/ln_no_eps": {"finite"},
    "moving_average_batch": {"gradient"},
    "power": {"gradient"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SHIPPED]
)
def test_card_of_a_shipped_norm_has_no_false_line(name: str):
    card = measure_norm(name, compose_config([f"norm={name}"]))
    assert {line.name for line in card.failures} == BREAKS.get(name, set())
    lines = {line.name: line for line in card.lines}
    expected = [TABLE[case] for case in TABLE if case[0] == name]
    assert expected, f"add {name} to BY_ENTRY"
    for mode, place in (("in training", 0), ("in evaluation", 1)):
        says = {key: line.value in ("yes", mode) for key, line in lines.items()}
        assert says["mixes samples"] == expected[0].samples[place]
        assert says["pools positions"] or not says["reads the future"]
        assert not says["reads padding"]


@cache
def defaults() -> dict[str, Any]:
    return compose_config([])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_norm_learns_in_a_network(name: str):
    is_text = "per_position" in name or name.startswith("causal")
    data = padded_data() if is_text else image_data()
    own = shipped_defaults("norm", name)
    norm = build_norm({**defaults(), "norm": own}, num_positions=data.input_shape[-1])
    network, batch = (encoder if is_text else convnet)(norm), data.train.gather(torch.arange(6))
    scores = network(data.model_inputs(batch["inputs"]), *([batch["mask"]] if is_text else []))
    functional.cross_entropy(scores, batch["targets"]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
