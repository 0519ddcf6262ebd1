"""A data set is loaded once for the cells of a process, and never kept beyond its command."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from normexp.cells import cell as kept_data
from normexp.cells.cell import keeping_data, load_data
from normexp.data.dataset import Data


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def build(cfg: DictConfig) -> object:
        names.append(cfg.data.name)
        return object.__new__(Data)

    monkeypatch.setattr(kept_data, "build_data", build)
    return names


def config(name: str) -> DictConfig:
    return OmegaConf.create({"data": {"name": name, "dir": "${folder}"}, "folder": "here"})


def test_same_config_is_the_same_object_while_two_are_kept(loaded: list[str]):
    with keeping_data():
        first, second = load_data(config("a")), load_data(config("b"))
        assert load_data(config("a")) is first
        assert load_data(config("b")) is second
        load_data(config("c"))  # `a` has waited longest
        assert load_data(config("b")) is second
        assert load_data(config("a")) is not first
    assert loaded == ["a", "b", "c", "a"]


def test_what_the_config_refers_to_counts(loaded: list[str]):
    there = OmegaConf.merge(config("a"), {"folder": "there"})
    assert isinstance(there, DictConfig)
    with keeping_data():
        assert load_data(config("a")) is not load_data(there)
    assert loaded == ["a", "a"]


def test_nothing_is_kept_outside(loaded: list[str]):
    with keeping_data():
        with keeping_data():
            load_data(config("a"))
        load_data(config("a"))  # of the inner block
    load_data(config("a"))
    with keeping_data():
        load_data(config("a"))
    assert loaded == ["a"] * 3
