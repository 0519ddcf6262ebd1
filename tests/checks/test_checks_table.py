"""What every shipped norm mixes, measured: other samples, the future, padding."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from checks_cases import encoder, gpt, padded_data, shipped, text_data

from normexp.checks.causality import find_leak
from normexp.checks.padding import model_reads_padding, padded_batch, site_reads_padding
from normexp.checks.probing import mixes_samples, probe_batch
from normexp.checks.reach import measure_reach
from normexp.checks.sites import probe_sites
from normexp.config.help import group_choices
from normexp.norms.site import View


class Mixed(NamedTuple):
    """Expected of a norm over tokens; first in training, then in evaluation."""

    samples: tuple[bool, bool] = (False, False)
    future: tuple[bool, bool] = (False, False)
    padding: tuple[bool, bool] = (False, False)


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
CASES = pytest.mark.parametrize(
    ("name", "view"),
    [
        pytest.param(*case, id="-".join(case), marks=() if case[0] in FAST else pytest.mark.slow)
        for case in TABLE
    ],
)
MODES = (True, False)


def test_table_has_every_shipped_norm():
    assert {name for name, _ in TABLE} == set(group_choices("norm")) - {"custom"}


@CASES
def test_samples_and_future_that_a_norm_mixes(name: str, view: View):
    data = text_data()
    network = gpt(shipped(name, data, view))
    batch = probe_batch(data, 4)
    sites = probe_sites(network, batch)
    assert [site.name for site in sites] == [
        "blocks.0.attn_norm",
        "blocks.0.mlp_norm",
        "final_norm",
    ]
    for site in sites:
        reach = tuple(measure_reach(site, training=mode).other_samples for mode in MODES)
        assert reach == TABLE[name, view].samples
    whole = tuple(mixes_samples(network, batch, training=mode) for mode in MODES)
    assert whole == TABLE[name, view].samples
    leaks = [find_leak(network, sites, batch, data.num_outputs, training=mode) for mode in MODES]
    assert tuple(leak is not None for leak in leaks) == TABLE[name, view].future


@CASES
def test_no_shipped_norm_reads_padding(name: str, view: View):
    data = padded_data()
    network = encoder(shipped(name, data, view))
    batch = padded_batch(data, 4)
    assert batch is not None and not batch["mask"].all(dim=1).any()
    sites = probe_sites(network, batch)
    for site in sites:
        reads = tuple(site_reads_padding(site, training=mode) for mode in MODES)
        assert reads == TABLE[name, view].padding
    whole = (model_reads_padding(network, batch, data.num_outputs, training=m) for m in MODES)
    assert tuple(whole) == TABLE[name, view].padding
