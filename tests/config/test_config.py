"""Composition: overrides, the user's own YAMLs, and Hydra's errors in the user's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from normexp.config.compose import compose_cell, compose_config
from normexp.errors import UserError

REFUSED = {
    "unknown_choice": (["model=convent"], "model=convent: no such model; did you mean convnet"),
    "unknown_choice_far": (["optim=xyz"], "optim=xyz: no such optim (choices: adamw, sgd)"),
    "unknown_of_many": (["norm=xyz"], "norm=xyz: no such norm (normexp.train --help lists all"),
    "unknown_logger": (["logger=[wandb,neptune]"], "logger=neptune: no such logger"),
    "unknown_key": (["btch_size=3"], "btch_size: unknown key; did you mean batch_size"),
    "unknown_knob": (["optim.momentun=0.5"], "did you mean optim.momentum?"),
    "knob_elsewhere": (["weight_decay=0.1"], "did you mean optim.weight_decay?"),
    "below_a_value": (["lr.x=3"], "lr has no keys below it"),
    "hydra_key": (["hydra.foo=3"], "hydra.foo: unknown key"),
    "no_value": (["batch_size"], "'batch_size' is not key=value"),
    "no_key": (["=3"], "'=3' is not key=value"),
    "two_equals": (["data_dir=a=b"], "quote it, as in 'data_dir=\"a=b\"'"),
    "no_name": (["study=a b ü"], "study=a b ü: must be a folder name of letters"),
    "lone_sweep": (["seed=1,2"], "seed=1,2 names several values: add -m to run each"),
    "lone_group_sweep": (["optim=sgd,adamw"], "add -m to run each"),
    "lone_range": (["seed=range(0,3)"], "add -m to run each"),
    "null_group": (["model=null"], "model=null: model takes one name"),
    "two_names": (["optim=[sgd,adamw]"], "optim takes one name (choices: adamw, sgd)"),
    "deleted_group": (["~model"], "~model: no training goes without a model"),
    "added_group": (["+optim=sgd"], "+optim=sgd: write it without the +"),
    "added_key": (["+batch_size=3"], "+batch_size=3: the key exists, write it without the +"),
    "text_for_int": (["batch_size=abc"], "batch_size=abc: not a whole number, as its default 32"),
    "half_for_int": (["batch_size=2.5"], "batch_size=2.5: not a whole number"),
    "bool_for_int": (["batch_size=true"], "batch_size=true: not a whole number"),
    "text_for_float": (["optim.momentum=abc"], "optim.momentum=abc: not a number"),
    "int_for_bool": (["dry_run=1"], "dry_run=1: not true or false"),
    "number_for_list": (["optim=adamw", "optim.betas=3"], "optim.betas=3: not a list"),
    "lost_reference": (["lr=${optim.defualt_lr}"], "lr: Interpolation key 'optim.defualt_lr'"),
    "searchpath": (["hydra.searchpath=[a]"], "name the folders by --config-dir"),
    "launcher": (["hydra/launcher=foo"], "hydra/launcher=foo: there is no such config"),
}


@pytest.mark.parametrize(("overrides", "part"), REFUSED.values(), ids=REFUSED.keys())
def test_mistake_is_one_short_line_with_the_remedy(overrides: list[str], part: str):
    with pytest.raises(UserError) as caught:
        compose_config(overrides)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_are_those_of_the_design():
    config = compose_config([])
    assert config.batch_size == 32
    assert config.micro_batch_size is None and config.norm_batch_size is None
    assert config.seed == 0 and config.replicas == 4 and config.study == "default"
    assert config.lr == config.optim.default_lr
    assert "hydra" not in config


def test_values_keep_their_types():
    config = compose_config(["lr=1", "micro_batch_size=8", "stack=false", "study=2026"])
    assert (config.lr, config.micro_batch_size, config.stack) == (1, 8, False)
    assert config.study == "2026"


def test_last_of_two_choices_wins():
    assert compose_config(["optim=adamw", "optim=sgd"]).optim._target_ == "torch.optim.SGD"


def test_cell_names_its_choices():
    _, choices = compose_cell(["optim=adamw", "trainer=cpu"])
    assert choices["optim"] == "adamw"
    assert choices["trainer"] == "cpu"
    assert "experiment" not in choices


def test_composing_one_cell_leaves_the_next_alone():
    config = compose_config(["optim=adamw"])
    config.optim.weight_decay = 99.0
    assert compose_config(["optim=adamw"]).optim.weight_decay == 0.1


def own_yaml(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return str(folder)


def test_users_own_norm_file_is_a_choice(tmp_path: Path):
    folder = own_yaml(tmp_path / "my conf", "norm/mine.yaml", "_target_: my.Norm\nknob: 2\n")
    config = compose_config(["norm=mine", "norm.knob=3"], [folder])
    assert dict(config.norm) == {"_target_": "my.Norm", "knob": 3}


def test_unknown_norm_offers_the_users_own(tmp_path: Path):
    folder = own_yaml(tmp_path, "norm/mine.yaml", "_target_: my.Norm\n")
    with pytest.raises(UserError, match=r"norm=mime: no such norm; did you mean mine"):
        compose_config(["norm=mime"], [folder])


def test_users_file_may_pick_a_model(tmp_path: Path):
    text = "# @package _global_\ndefaults: [override /optim: adamw]\ndata: {_target_: my.load}\n"
    folder = own_yaml(tmp_path, "data/mine.yaml", text)
    assert compose_config(["data=mine"], [folder]).optim._target_ == "torch.optim.AdamW"
    assert compose_config(["data=mine", "optim=sgd"], [folder]).optim._target_ == "torch.optim.SGD"


def test_users_file_with_a_shipped_name_is_refused(tmp_path: Path):
    folder = own_yaml(tmp_path, "optim/sgd.yaml", "momentum: 0.5\n")
    with pytest.raises(UserError, match=r"sgd\.yaml: normexp has a optim=sgd of its own"):
        compose_config([], [folder])


def test_missing_config_dir_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"--config-dir .*nowhere: no such folder"):
        compose_config([], [str(tmp_path / "nowhere")])


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path):
    folder = own_yaml(tmp_path, "norm/mine.yaml", "_target_: my.Norm\nknob: [1, 2\n")
    with pytest.raises(UserError, match=r"mine\.yaml, line 3: not valid YAML"):
        compose_config(["norm=mine"], [folder])


def test_users_file_that_names_an_unknown_model_is_refused(tmp_path: Path):
    text = "# @package _global_\ndefaults: [override /model: gtp]\ndata: {_target_: my.load}\n"
    folder = own_yaml(tmp_path, "data/mine.yaml", text)
    with pytest.raises(UserError, match="model=gtp: no such model"):
        compose_config(["data=mine"], [folder])
