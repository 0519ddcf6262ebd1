"""Every shipped norm: its card, and what it mixes in a network, as its formula says."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
from checks_cases import encoder, gpt, padded_data, shipped, text_data

from normexp.batching.sizes import Sizes
from normexp.build import norm_maker
from normexp.checks.card import Card, measure_card
from normexp.checks.preflight import check_padding, examine
from normexp.config.compose import compose_config
from normexp.config.help import group_choices
from normexp.norms.factory import NormFactory
from normexp.norms.renorm import BatchRenorm
from normexp.norms.site import View
from normexp.norms.slots import resolve


class Mixed(NamedTuple):
    """Expected of a norm over tokens; first in training, then in evaluation."""

    samples: tuple[bool, bool] = (False, False)
    future: tuple[bool, bool] = (False, False)


SEPARATE = Mixed()
IN_TRAINING = (True, False)
ALWAYS = (True, True)

TABLE: dict[tuple[str, View], Mixed] = {
    ("batch", "token"): Mixed(samples=IN_TRAINING, future=IN_TRAINING),
    ("batch", "sequence"): Mixed(samples=IN_TRAINING, future=IN_TRAINING),
    ("batch_per_position", "sequence"): Mixed(samples=IN_TRAINING),
    ("layer", "token"): SEPARATE,
    ("layer", "sequence"): Mixed(future=ALWAYS),
    ("layer2d", "token"): SEPARATE,
    ("layer2d", "sequence"): SEPARATE,
    ("instance", "sequence"): Mixed(future=ALWAYS),
    ("causal_instance", "sequence"): SEPARATE,
    ("group", "token"): SEPARATE,
    ("group", "sequence"): Mixed(future=ALWAYS),
    ("causal_group", "token"): SEPARATE,
    ("causal_group", "sequence"): SEPARATE,
    ("rms", "token"): SEPARATE,
    ("rms", "sequence"): SEPARATE,
    ("group1", "token"): SEPARATE,
    ("group1", "sequence"): Mixed(future=ALWAYS),
    ("position", "token"): SEPARATE,
    ("position", "sequence"): SEPARATE,
    ("scale", "token"): SEPARATE,
    ("scale", "sequence"): SEPARATE,
    ("simple_rms", "token"): SEPARATE,
    ("simple_rms", "sequence"): SEPARATE,
    ("crms", "token"): SEPARATE,
    ("crms", "sequence"): SEPARATE,
    ("frn", "sequence"): Mixed(future=ALWAYS),
    ("evonorm_b0", "token"): Mixed(samples=IN_TRAINING, future=IN_TRAINING),
    ("evonorm_b0", "sequence"): Mixed(samples=IN_TRAINING, future=ALWAYS),
    ("evonorm_s0", "token"): SEPARATE,
    ("evonorm_s0", "sequence"): Mixed(future=ALWAYS),
    ("dyt", "token"): SEPARATE,
    ("dyt", "sequence"): SEPARATE,
    ("derf", "token"): SEPARATE,
    ("derf", "sequence"): SEPARATE,
    **dict.fromkeys(
        [
            *((n, "token") for n in ("batch_renorm", "sync", "power", "l1_batch")),
            *((n, "token") for n in ("moving_average_batch", "eval_norm", "switchable")),
            *(
                (n, "token")
                for n in (
                    "deviations/bn_unbiased",
                    "deviations/bn_eps_outside",
                    "deviations/bn_biased_ema",
                )
            ),
            *((n, "token") for n in ("deviations/bn_naive_var", "deviations/no_eps")),
            *((n, "sequence") for n in ("ghost", "batch_renorm", "power", "moving_average_batch")),
        ],
        Mixed(samples=IN_TRAINING, future=IN_TRAINING),
    ),
    ("frozen", "token"): SEPARATE,
    ("deviations/bn_per_position", "sequence"): Mixed(samples=IN_TRAINING),
    ("batch_instance", "sequence"): Mixed(samples=IN_TRAINING, future=ALWAYS),
    ("eval_norm", "sequence"): Mixed(samples=IN_TRAINING, future=ALWAYS),
    ("switchable", "sequence"): Mixed(samples=IN_TRAINING, future=ALWAYS),
    ("deviations/ln_unbiased", "token"): SEPARATE,
    ("deviations/ln_unbiased", "sequence"): Mixed(future=ALWAYS),
    ("deviations/ln_no_eps", "token"): SEPARATE,
    ("deviations/ln_time", "sequence"): Mixed(future=ALWAYS),
    ("deviations/ln_hw", "sequence"): Mixed(future=ALWAYS),
    ("none", "token"): SEPARATE,
    ("none", "sequence"): SEPARATE,
    ("skipinit", "token"): SEPARATE,
    ("skipinit", "sequence"): SEPARATE,
    ("ws", "token"): SEPARATE,
    ("nf", "token"): SEPARATE,
    ("group_ws", "token"): SEPARATE,
    ("group_ws", "sequence"): Mixed(future=ALWAYS),
}
FAST = ("batch", "batch_per_position", "layer", "instance", "group", "causal_group", "frn", "ghost")
SHIPPED = [name for name in group_choices("norm") if name != "custom"]
CASES = pytest.mark.parametrize(
    ("name", "view"),
    [
        pytest.param(*case, id="-".join(case), marks=() if case[0] in FAST else pytest.mark.slow)
        for case in TABLE
    ],
)


def test_table_has_every_shipped_norm():
    assert {name for name, _ in TABLE} == set(SHIPPED)


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
    check_padding(encoder(shipped(name, data, view)), data)


def test_extreme_renorm_mixes_samples():
    """Its outputs in training are those of running averages; its gradient is not."""
    bounds = {"r_max": 1000, "d_max": 1000, "warmup": 0, "r_ramp_end": 0, "d_ramp_end": 0}
    network = gpt(NormFactory(partial(BatchRenorm, **bounds)))
    assert examine(network, text_data(), Sizes(8), drop_last=True).mixes_samples


def card_of(name: str, *, contract_only: bool = False) -> Card:
    config = compose_config([f"norm={name}"])
    make, reserved = norm_maker(config)
    return measure_card(
        make,
        name=name,
        target=config.norm["_target_"],
        eps=config.eps,
        slots=resolve({}, reserved),
        contract_only=contract_only,
    )


# Deviations that are shipped to be seen, and backwards that are an approximation by definition.
BREAKS = {
    "deviations/bn_naive_var": {"exact at mean 1e3", "exact at mean 1e4"},
    "deviations/bn_biased_ema": {"running averages"},
    "deviations/no_eps": {"finite on constants", "finite at scale 1e-12"},
    "deviations/ln_no_eps": {"finite on constants"},
    "moving_average_batch": {"gradient in training"},
    "power": {"gradient in training"},
}


@pytest.mark.parametrize("name", ["causal_group", "dyt", "power", "group"])
def test_sampled_norm_breaks_the_lines_that_its_formula_breaks(name: str):
    failures = card_of(name, contract_only=True).failures
    assert {line.name for line in failures} == BREAKS.get(name, set()), failures


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_card_of_a_shipped_norm_has_no_false_line(name: str):
    card = card_of(name)
    assert {line.name for line in card.failures} == BREAKS.get(name, set()), card.failures
    lines = {line.name: line for line in card.lines}
    expected = [TABLE[case] for case in TABLE if case[0] == name]
    for mode, place in (("in training", 0), ("in evaluation", 1)):
        says = {key: line.value in ("yes", mode) for key, line in lines.items()}
        assert says["mixes samples"] == expected[0].samples[place]
        assert says["pools positions"] or not says["leaks the future"]
        assert says["ignores input scale"] or not says["ignores channel scales"]
        assert not says["reads padding"]


def test_norms_that_break_lines_are_shipped():
    assert set(BREAKS) <= set(SHIPPED)
