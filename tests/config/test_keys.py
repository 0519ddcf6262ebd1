"""The table of keys agrees with conf/config.yaml, and with what changes the id of a cell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import normexp
from normexp.training.config.choices import parse_overrides
from normexp.training.config.compose import compose_cell, compose_config
from normexp.training.config.groups import GROUPS, option_defaults, shipped_config
from normexp.training.config.help import config_lines
from normexp.training.config.keys import KEYS, in_identity
from normexp.training.config.spec import CellSpec
from normexp.training.config.validate import OPTIONS, check_keys, check_value

PACKAGE = Path(normexp.__file__).parent
GROUPED = ("norm.", "model.", "data.", "optim.", "trainer.", "logger.")  # a choice's YAML has these

GROUPS_OF_KEYS = {*GROUPS, "tune"}
LEAVES = [key for key in KEYS if key not in GROUPS_OF_KEYS and not key.endswith("._target_")]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_every_key_has_a_line_in_the_config_and_one_in_the_table():
    in_config = {key for key in leaves(shipped_config()) if not key.startswith(GROUPED)}
    in_table = {key for key in LEAVES if not key.startswith(GROUPED)}
    assert not in_config - in_table
    assert not in_table - in_config


def test_every_default_holds_its_rule():
    config = compose_config(["logger=wandb"])
    check_keys(config, KEYS)
    for entry, rules in OPTIONS.items():
        defaults = option_defaults(entry)
        assert defaults.keys() == rules.keys()
        for key in (key for key in rules if defaults[key] != "???"):
            check_value(key, defaults[key], rules[key])


def test_every_comment_names_the_unit_of_the_table():
    comments = {line.partition("=")[0]: text for line, text in config_lines()}
    assert set(comments) == {key for key in LEAVES if "." not in key}
    for key, comment in comments.items():
        assert KEYS[key].unit in comment, f"{key}: {KEYS[key].unit} in its comment"


SOURCES = [file.read_text() for file in PACKAGE.rglob("*.py") if file.parent.name != "config"]


def test_something_reads_every_key():
    for key in (key for key in LEAVES if "." not in key):
        read = re.compile(rf"""["']{key}["']|\b\w+\.{key}\b|\b{key}: """)
        assert any(key in source and read.search(source) for source in SOURCES), key


# --- identity -----------------------------------------------------------------------------------


def id_of_words(*words: str) -> str:
    return CellSpec(*compose_cell(parse_overrides(words))).id


# Another valid value of each key, and the words that let it matter: those that make another
# training, and those that do not.
CHANGES = {
    "batch_size": "16",
    "micro_batch_size": "8",
    "norm_batch_size": "8",
    "epochs": "16",
    "steps": "7",
    "samples": "640",
    "lr": "0.2",
    "lr_rule": "linear batch_size=16",
    "base_batch_size": "16 lr_rule=linear",
    "max_grad_norm": "1",
    "class_weights": "[1,2]",
    "data.limit_train": "64",
    "data.crop": "6",
    "data.order": "sorted",
    "eps": "1e-3",
    "act": "gelu",
    "conv": "weight_standardized",
    "residual_scale": "0",
    "layer_scale": "0.1",
    "placement": "post",
    "qk_norm": "true",
    "v_norm": "true",
    "matmul_precision": "highest",
    "drop_last": "false",
    "norm.at": "{norm1:none}",
    "norm.running_from": "sequence norm_batch_size=4",
    "norm.view": "+sequence",
    "norm.track_running_stats": "+false",
    "norm.layout": "+first",
    "norm.half_life": "100 norm.momentum=null",
    "model.replace": "[BatchNorm2d] model=torchvision model.name=resnet18",
    "model.weights": "elsewhere model=torchvision model.name=resnet18",
    "data.path": "elsewhere data=text_file",
    "data.root": "elsewhere data=image_folder",
    "optim.momentum": "0.5",
    "optim.nesterov": "false",
    "optim.weight_decay": "0",
    "optim.decay_norm": "true",
    "optim.decay_bias": "false",
    "optim.fused": "false",
    "trainer.precision": "64-true",
    "norm.act": "+gelu",
    "norm.conv": "+weight_standardized",
    "norm.residual_scale": "+0",
    "norm.layer_scale": "+0.1",
    "norm.placement": "+post",
    "norm.qk_norm": "+true",
    "norm.v_norm": "+true",
}
KEEPS = {
    "optim.default_lr": "0.5 lr=0.1",
    "seed": "3",
    "replicas": "2",
    "study": "other",
    "tags": "[a]",
    "notes": "first",
    "dry_run": "true",
    "workers": "2",
    "fail_fast": "true",
    "runs_dir": "elsewhere",
    "data_dir": "elsewhere",
    "val_every_epochs": "2",
    "log_every": "3",
    "chunk": "1",
    "stack": "false",
    "compile": "true",
    "save_weights": "false",
    "evaluate_with": "[running,batch]",
    "precise_samples": "9",
    "evaluate_batch_sizes": "[2] evaluate_with=[batch]",
    "evaluate_at": "[whole,6,tiles6]",
    "evaluate_every_epoch": "true",
    "allow_leak": "true",
    "tune.points": "2",
    "tune.seeds": "2",
    "tune.first_seed": "9",
    "tune.metric": "val/loss",
    "norm.synchronized": "+true",
    "norm.mixes_samples": "+true",
    "data.data_dir": "elsewhere data=cifar10",
    "trainer.accelerator": "cpu",
    "trainer.devices": "1",
    "trainer.num_nodes": "1",
    "trainer.strategy": "ddp",
}


@pytest.mark.parametrize("key", LEAVES)
def test_a_key_changes_the_id_if_it_changes_the_training(key: str):
    assert (key in CHANGES) != (key in KEEPS), f"add another value of {key} to one of them"
    assert in_identity(key) == (key in CHANGES)
    value, *context = (CHANGES | KEEPS)[key].split()
    setting = f"+{key}={value[1:]}" if value.startswith("+") else f"{key}={value}"
    start = [word for word in context if word.startswith(("data=", "model="))]
    before = id_of_words(*start)
    assert (id_of_words(*context, setting) != before) == (key in CHANGES)
