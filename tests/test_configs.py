"""Every YAML of conf/ composes into a config that a training accepts."""

from __future__ import annotations

import re
from itertools import takewhile

import pytest

from normexp.cli import parse_command
from normexp.config.compose import compose_cell, compose_config
from normexp.config.grid import list_cells
from normexp.config.help import GROUPS, conf_dir, group_choices
from normexp.config.rules import validate
from normexp.search.points import plan_searches

SEARCHES = ["experiment=tuned_sensitivity"]  # for normexp.tune alone
CHOICES = [
    f"{group}={name}" for group in GROUPS for name in group_choices(group) if name != "custom"
]
# Norms are composed where their traits are measured, and where they train.
CHOICES = [c for c in CHOICES if c not in SEARCHES and not c.startswith("norm=")]
FILES = sorted(conf_dir().rglob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_choice_composes_and_validates(choice: str):
    group, _, name = choice.partition("=")
    cells = list_cells(parse_command([choice])) if group == "experiment" else [[choice]]
    for cell in (cells[0], cells[-1])[: len(cells)]:  # each takes a tenth of a second
        config, choices = compose_cell(cell)
        validate(config)
        assert choices[group] == name or group == "logger"  # several may be chosen


@pytest.mark.slow  # test_points.py composes its grid
@pytest.mark.parametrize("choice", SEARCHES)
def test_search_composes_and_validates(choice: str):
    plans = plan_searches(parse_command([choice]))
    assert len({plan.title for plan in plans}) == len(plans) > 1
    for plan in plans:
        validate(plan.base)


def test_every_file_belongs_to_a_group_and_begins_with_a_comment():
    for file in FILES:
        parts = file.relative_to(conf_dir()).parts
        assert parts == ("config.yaml",) or parts[0] in GROUPS, file
        text = file.read_text()
        assert text.startswith("#"), file
        if parts[0] == "norm":  # --help shows the first line and the family
            header = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
            assert re.match(r"# [^:(]+( \(arXiv:.+?\))?: .+", header[0]), file
            assert re.match(r"# family: \w+$", header[-1]), file


@pytest.mark.parametrize("name", group_choices("experiment"))
def test_recipe_runs_at_two_budgets_or_says_that_it_has_one(name: str):
    text = (conf_dir() / "experiment" / f"{name}.yaml").read_text()
    is_swept = re.search(r"^ {6}(epochs|samples|steps): \d+,\d+", text, flags=re.MULTILINE)
    header = " ".join(takewhile(lambda line: line.startswith("#"), text.splitlines()))
    assert is_swept or re.search(r"(this|one) budget", header, flags=re.IGNORECASE)
    assert re.search(r"float32 on a CPU", header, flags=re.IGNORECASE)


@pytest.mark.parametrize("group", ["norm", "model", "data"])
def test_custom_choice_takes_any_knob(group: str):
    config = compose_config([f"{group}=custom", f"{group}._target_=my.Thing", f"{group}.knob=2"])
    assert config[group]._target_ == "my.Thing"
    assert config[group].knob == 2
    validate(config)


def test_several_loggers_coexist():
    config = compose_config(["logger=[wandb,tensorboard]"])
    assert set(config.logger) == {"wandb", "tensorboard"}
    assert config.logger.wandb.project == "normexp"


def test_gpu_trainer_differs_from_auto_in_device_and_precision_only():
    auto, gpu = compose_config([]).trainer, compose_config(["trainer=gpu"]).trainer
    assert {key for key in auto if auto[key] != gpu[key]} == {"accelerator", "precision"}
