"""Each file of conf/data names a function and gives it the arguments it takes, no more."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from normexp.data import Data, validate

CONF = Path(__file__).parents[2] / "conf" / "data"
SHIPPED = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "custom")


@pytest.mark.parametrize("name", SHIPPED)
def test_data_conf_gives_the_arguments_of_its_function(name: str):
    section = OmegaConf.load(CONF / f"{name}.yaml").data
    module, _, function = section["_target_"].rpartition(".")
    load = getattr(importlib.import_module(module), function)
    assert function == f"load_{name}"
    assert set(section) - {"_target_"} == set(inspect.signature(load).parameters)


@pytest.mark.parametrize("name", SHIPPED)
def test_data_conf_is_global_and_opens_with_a_comment(name: str):
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_" and lines[1].startswith("# ")


@pytest.mark.parametrize("name", ["digits", "langid", "manual"])
def test_embedded_data_load_from_their_conf(name: str):
    section = OmegaConf.load(CONF / f"{name}.yaml").data
    data = instantiate(section, _convert_="all")
    assert isinstance(data, Data) and data.name == name
    assert validate(data) is data


def test_augmentation_is_switched_by_its_keys():
    section = OmegaConf.load(CONF / "digits.yaml").data
    section.augmentation.crop_padding = 1
    data = instantiate(section, _convert_="all")
    assert data.augmentation.crop_padding == 1 and data.augmentation.is_on
