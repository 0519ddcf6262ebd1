"""conf/norm: notes that the help reads, knobs that exist, and what a new norm costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hydra.utils import get_object
from norm_cases import KNOBS_OF, SHIPPED, C
from train_cases import spec_of

from normexp import norms
from normexp.batching.sizes import Sizes
from normexp.build import build_data, build_norm, norm_target
from normexp.cells.cell import make_builder, make_recipe
from normexp.config.compose import compose_config

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
    data = build_data(spec.values["data"])
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
