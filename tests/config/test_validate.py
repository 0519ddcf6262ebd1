"""Values that no training could use are refused with the key and a remedy."""

from __future__ import annotations

import pytest

from normexp.config.compose import compose_config
from normexp.config.rules import validate
from normexp.errors import UserError

REFUSED = {
    "epochs=0": "epochs=0: must be a whole number above 0",
    "batch_size=-4": "batch_size=-4: must be a whole number above 0",
    "batch_size=null": "batch_size=null: must be a whole number above 0",
    "micro_batch_size=0": "micro_batch_size=0: must be a whole number above 0 or null",
    "norm_batch_size=1.5": "norm_batch_size=1.5: must be a whole number above 0 or null",
    "micro_batch_size=12": "does not divide batch_size=32; try micro_batch_size=8 or "
    "micro_batch_size=16",
    "norm_batch_size=64": "norm_batch_size=64 does not divide batch_size=32",
    "lr=0": "lr=0: must be a number above 0",
    "lr=nan": "lr=nan: must be a number above 0",
    "lr=inf": "lr=inf: must be a number above 0",
    "eps=-1e-5": "eps=-1e-05: must be a number, 0 or more",
    "max_grad_norm=0": "max_grad_norm=0: must be a number above 0 or null",
    "seed=-1": "seed=-1: must be a whole number, 0 or more",
    "replicas=0": "replicas=0: must be a whole number above 0",
    "lr_rule=cubic": "lr_rule=cubic: must be one of none, linear, sqrt",
    "stack=1": "stack=1: must be one of auto, true, false",
    "study=../up": "study=../up: must be a folder name",
    f"study={'n' * 201}": "of at most 200 bytes",
    "study=[a,b]": "must be a folder name",
    "optim.schedule=step": "optim.schedule=step: must be one of constant, cosine, one_cycle",
    "optim.warmup=1.0": "optim.warmup=1.0: must be a number from 0 to below 1",
    "trainer.precision=16": "trainer.precision=16: must be one of 32-true, bf16-mixed, 64-true",
    "~epochs": "epochs is missing: it must be a whole number above 0",
    "norm=custom": "norm._target_ is missing: name a class or function",
    "model=custom": "model._target_ is missing",
}


@pytest.mark.parametrize(("override", "part"), REFUSED.items(), ids=REFUSED.keys())
def test_value_is_refused_with_its_key_and_remedy(override: str, part: str):
    with pytest.raises(UserError) as caught:
        validate(compose_config([override]))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mode_of_a_tracker_is_refused_before_it_is_asked():
    words = ["logger=wandb", "logger.wandb.mode=offlin"]
    with pytest.raises(UserError, match="mode=offlin: must be one of auto, online, offline, disa"):
        validate(compose_config(words))


def test_sizes_divide_the_one_above_and_null_reads_as_it():
    validate(compose_config(["batch_size=32", "micro_batch_size=8", "norm_batch_size=4"]))
    validate(compose_config(["batch_size=6", "norm_batch_size=3"]))
    with pytest.raises(UserError, match="norm_batch_size=16 does not divide micro_batch_size=8"):
        validate(compose_config(["batch_size=32", "micro_batch_size=8", "norm_batch_size=16"]))


@pytest.mark.parametrize("override", ["eps=0", "max_grad_norm=1", "optim=adamw", "stack=true"])
def test_accepted_values_pass(override: str):
    validate(compose_config([override]))
