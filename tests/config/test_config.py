"""Composing and validating one cell: values, the user's own YAMLs, and mistakes in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from normexp.config.compose import compose_cell, compose_config
from normexp.config.rules import validate
from normexp.errors import UserError

REFUSED = {
    # Composing.
    "model=convent": "model=convent: no such model; did you mean convnet",
    "optim=xyz": "optim=xyz: no such optim (choices: adamw, custom, sgd",
    "norm=xyz": "norm=xyz: no such norm (normexp.train --help lists all",
    "logger=[wandb,neptune]": "logger=neptune: no such logger",
    "btch_size=3": "btch_size: unknown key; did you mean batch_size",
    "weight_decay=0.1": "did you mean optim.weight_decay?",
    "norm.foo=1": "norm.foo: unknown key (norm=batch has",
    "lr.x=3": "lr has no keys below it",
    "hydra.foo=3": "hydra.foo: unknown key",
    "batch_size": "'batch_size' is not key=value",
    "=3": "'=3' is not key=value",
    "data_dir=a=b": "quote it, as in 'data_dir=\"a=b\"'",
    "study=a b ü": "study=a b ü: must be a folder name of letters",
    "seed=1,2": "seed=1,2 names several values: add -m",
    "model=null": "model=null: model takes one name",
    "optim=[sgd,adamw]": "optim takes one name (choices: adamw, custom, sgd)",
    "~model": "~model: a key cannot be removed; give it a value",
    "+optim=sgd": "+optim=sgd: optim is always there",
    "+batch_size=3": "+batch_size=3: the key exists, write it without the +",
    "norm._target_=my.Norm": "try norm=custom norm._target_=...",
    "batch_size=abc": "batch_size=abc: must be a whole number, as its default 32",
    "batch_size=2.5": "batch_size=2.5: must be a whole number",
    "optim.momentum=abc": "optim.momentum=abc: must be a number",
    "dry_run=1": "dry_run=1: must be true or false",
    "lr=${optim.defualt_lr}": "lr: Interpolation key 'optim.defualt_lr'",
    "hydra.searchpath=[a]": "name each folder with --config-dir",
    "hydra/launcher=foo": "hydra/launcher=foo: no such launcher",
    # Keys that nothing reads.
    "+foo=1": "foo: unknown key; --help lists",
    "+btch_size=4": "btch_size: unknown key; did you mean batch_size?",
    "+scheduler=step": "scheduler: unknown key; set optim.schedule=...",
    "schedule.peak=0.2": "schedule: this training has none; choose one, as schedule=custom",
    "callback.patience=3": "callback: this training has none; choose one, as callback=custom",
    "weights=w.pt": "weights: unknown key; did you mean model.weights?",
    "precision=bf16": "precision: unknown key; set trainer.precision=...",
    "clip=1": "clip: unknown key; set max_grad_norm=...",
    "debug=true": "debug: unknown key; set experiment=debug",
    "+logger.x=1": "logger.x: unknown key (logger has csv)",
    "logger=wandb +logger.wandb.tags=[a]": "logger.wandb.tags: unknown key; set tags=[...]",
    "+tune.x=1": "tune.x: unknown key (tune has",
    "+trainer.fast_dev_run=true": "trainer.fast_dev_run: unknown key; set steps=...",
    "++trainer.gradient_clip_val=1": "unknown key; set max_grad_norm=...",
    "+trainer.callbacks=[]": "trainer.callbacks: unknown key; set callback=",
    "hydra.verbose=true": "hydra.verbose: nothing reads this key of Hydra",
    "optim._target_=torch.optim.Adam": "try optim=custom optim._target_=...",
    "optim=custom optim._target_=torch.optim.Adam": "optimizer has no default, set lr=...",
    # Validating.
    "epochs=0": "epochs=0: must be a whole number above 0",
    "batch_size=null": "batch_size=null: must be a whole number above 0 (samples)",
    "norm_batch_size=1.5": "norm_batch_size=1.5: must be a whole number above 0 or null",
    "micro_batch_size=true": "micro_batch_size=true: must be a whole number above 0 or null",
    "micro_batch_size=12": "try micro_batch_size=8 or micro_batch_size=16",
    "norm_batch_size=64": "norm_batch_size=64 does not divide batch_size=32",
    "lr=nan": "lr=nan: must be a number above 0",
    "eps=-1e-5": "eps=-1e-05: must be a number, 0 or more",
    "seed=-1": "seed=-1: must be a whole number, 0 or more",
    "lr_rule=cubic": "lr_rule=cubic: must be one of none, linear, sqrt",
    "stack=1": "stack=1: must be one of auto, true, false",
    "study=../up": "study=../up: must be a folder name",
    f"study={'n' * 201}": "of at most 200 bytes",
    "optim.schedule=step": "optim.schedule=step: must be one of constant, cosine, linear, wsd",
    "optim.warmup=1.0": "optim.warmup=1.0: must be a number from 0 to below 1",
    "trainer.accelerator=tpu": "trainer.accelerator=tpu: must be one of auto, cpu, gpu, cuda",
    "replicas=100000000": "replicas=100000000: must be a whole number from 1 to 1000000",
    "trainer.precision=16": "trainer.precision=16: must be one of 32-true, bf16-mixed, 64-true",
    "trainer.devices=2": "trainer.devices=2: several devices need trainer=ddp",
    "+norm.placement=mid": "norm.placement=mid: must be one of pre, post",
    "norm=custom": "norm._target_ is missing",
    "logger=wandb logger.wandb.mode=offlin": "logger.wandb.mode=offlin: must be one of auto",
    "optim=adamw optim.betas=3": "optim.betas=3: must be a list",
}


@pytest.mark.parametrize(("line", "part"), REFUSED.items(), ids=REFUSED.keys())
def test_a_mistake_is_one_line_with_its_key(line: str, part: str):
    words = [line] if line.startswith("study=") else line.split()
    with pytest.raises(UserError) as caught:
        validate(compose_config(words))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_defaults_are_those_of_the_design():
    config = compose_config([])
    assert config.batch_size == 32
    assert config.micro_batch_size is None and config.norm_batch_size is None
    assert config.seed == 0 and config.replicas == 4 and config.study == "default"
    assert config.lr == config.optim.default_lr
    assert "hydra" not in config


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("eps=0 max_grad_norm=1 stack=true", (0, 1, True)),
        ("optim=adamw batch_size=6 norm_batch_size=3", (1e-5, None, "auto")),
    ],
)
def test_values_at_the_edge_are_accepted(line: str, values: tuple[object, ...]):
    config = compose_config(line.split())
    validate(config)
    assert (config.eps, config.max_grad_norm, config.stack) == values


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
    with pytest.raises(UserError, match=r"sgd\.yaml: normexp has optim=sgd itself"):
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


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("data/mine.yaml", "# @package _global_\nval_fraction: 0.2\n", "data is missing: put"),
        ("experiment/mine.yaml", "# @package _global_\nepoch: 3\n", "epoch: unknown key; did you"),
        ("experiment/mine.yaml", "epochs: 3\n", "experiment=mine: nothing reads its keys; let its"),
        ("trainer/mine.yaml", "defaults: [auto]\nmax_steps: 3\n", "trainer.max_steps: unknown key"),
        ("optim/mine.yaml", "_target_: my.Sgd\ndefault_lr: 1\n", "optim.weight_decay is missing"),
    ],
)
def test_keys_of_a_users_file_that_nothing_reads_are_refused(
    tmp_path: Path, name: str, text: str, message: str
):
    folder = own_yaml(tmp_path, name, text)
    with pytest.raises(UserError, match=re.escape(message)):
        validate(compose_config([f"{name.partition('/')[0]}=mine"], [folder]))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("norm=custom norm._target_=my_pkg.MyNorm", "MyNorm"),
        ("data=custom data._target_=my_pkg.load_stripes", "stripes"),
        ("model=custom model._target_=my_pkg.nets.Tiny", "Tiny"),
        ("optim=custom optim._target_=my_pkg.Lion lr=0.1", "Lion"),
        ("norm=custom norm._target_=my_pkg.batch", "my_pkg.batch"),
    ],
)
def test_a_users_own_part_has_its_own_name(word: str, name: str):
    group = word.partition("=")[0]
    assert compose_cell(word.split())[1][group] == name
