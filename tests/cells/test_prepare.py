"""Preparing a cell: its slots, and the data that the cells of a process share."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from normexp.cells import draft
from normexp.cells.cell import Cell, prepare_cell
from normexp.config.compose import compose_cell, compose_config
from normexp.config.rules import validate
from normexp.errors import UserError


@cache
def prepare(*words: str) -> Cell:
    names = {"norm": "batch", "model": "convnet", "data": "digits", "optim": "sgd"}
    for word in words:
        key, _, value = word.partition("=")
        if key in names:
            names[key] = value
    config = compose_config(words)
    validate(config)
    return prepare_cell(config, names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model=vit", "act=relu"],
            "act=relu: model=vit has no activation after a norm; try model=convnet or "
            "model=small_resnet",
        ),
        (["model=vit", "conv=plain"], "conv=plain: model=vit has no convolution"),
        (["residual_scale=0"], "residual_scale=0: model=convnet has no residual branch; try"),
        (["placement=post"], "placement=post: model=convnet has no transformer block; try"),
        (
            ["model=small_resnet", "qk_norm=false"],
            "qk_norm=false: model=small_resnet has no attention; try model=vit, gpt or",
        ),
        (
            ["model=vit", "norm=none", "placement=sandwich"],
            "placement=sandwich: norm=none has no norm to place; try placement=null, or norm=rms",
        ),
        (
            ["model=vit", "placement=hybrid", "qk_norm=true"],
            "qk_norm=true: placement=hybrid normalizes queries, keys and values already; leave",
        ),
        (["act=swish"], "act=swish: must be one of relu, gelu, silu, tlu"),
        (["qk_norm=1"], "qk_norm=1: must be true or false or null"),
        (["residual_scale=inf"], "residual_scale=inf: must be a number or null"),
        (["data.limit_train=31"], "data.limit_train=31 is less than one batch_size=32; try"),
        (["data.limit_train=9999"], "data.limit_train=9999: the training split of data=digits has"),
        (["ema=1"], "ema=1: must be a number between 0 and 1 or null"),
        (["norm=ws", "norm.conv=ws"], "norm.conv=ws: must be one of plain, weight_standardized"),
    ],
)
def test_value_is_refused_in_one_line(words: list[str], message: str):
    with pytest.raises(UserError) as caught:
        prepare(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MODULE = """
import torch
from torch import nn
from normexp.data import Data
from normexp.data.images import load_digits

class Net(nn.Module):
    def __init__(self, norm, num_outputs, *, fault=""):
        super().__init__()
        if fault == "raises":
            raise KeyError("depth")
        self.fault = fault
        self.norm = nn.Identity() if fault == "ignores" else norm(1)
        self.head = nn.Linear(64, num_outputs + (fault == "outputs"))

    def forward(self, x):
        if self.fault == "forward":
            raise RuntimeError("boom")
        y = self.norm(x)
        y = self.head((x if self.fault == "drops" else y).flatten(1))
        return (y, y) if self.fault == "tuple" else y

def nothing(norm):
    return None

def load_own(fault=""):
    if fault == "raises":
        raise OSError("the disk is gone")
    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None)
    if fault == "classes":
        data.num_outputs = 5
    return (data, data) if fault == "tuple" else data
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model._target_=own.Net model.fault=raises", r"own.Net fails: KeyError: 'depth' \(own.py"),
        ("model._target_=own.Net model.fault=forward", r"model Net fails: boom \(own.py, line 18"),
        ("model._target_=own.Net model.fault=outputs", r"own.Net returns \(2, 11\) .* \(2, 10\)"),
        ("model._target_=own.Net model.fault=tuple", "own.Net returns a tuple"),
        ("model._target_=own.Net model.depth=3", "model.depth: own.Net has no such argument"),
        ("model._target_=own.Net model.fault=ignores", "no norm site, so `norm` has no effect"),
        ("model._target_=own.Net model.fault=drops", "norm at norm has no effect"),
        ("model._target_=own.nothing", "own.nothing returned a NoneType, not a torch.nn"),
        ("data._target_=own.load_own data.fault=raises", "own.load_own fails: OSError: the disk"),
        ("data._target_=own.load_own data.fault=classes", "num_outputs=5 allows 0 to 4"),
        ("data._target_=own.load_own data.fault=tuple", "own.load_own returned a tuple"),
        ("data._target_=own.load_own data.folder=x", "data.folder: own.load_own has no such arg"),
        ("optim._target_=torch.optim.RMSprop optim.foo=1 lr=1", "optim.foo: torch.optim.RMSprop"),
        ("replicas=1000000", "replicas=1000000 .* GiB of memory, and this machine has .* try repl"),
        ("evaluate_batch_sizes=[2]", "evaluate_batch_sizes=.2. is of batch statistics: add batch"),
    ],
)
def test_what_cannot_train_is_refused_in_one_line_and_nothing_else(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    (tmp_path / "own.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    group = words.partition("._target_")[0]
    custom = [f"{group}=custom"] if "_target_" in words else []
    config, choices = compose_cell([*custom, *words.split()])
    validate(config)
    with caplog.at_level(logging.INFO, "normexp"), pytest.raises(UserError) as caught:
        prepare_cell(config, choices)
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value) and not caplog.records


def test_slot_of_a_norm_that_the_model_has_no_place_for_is_noted(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.INFO, "normexp"):
        cell = prepare("norm=nf", "model=convnet")
    note = "the norm's residual_scale=0.0 has no effect: model=convnet has no residual branch"
    assert [record.getMessage() for record in caplog.records].count(note) == 1
    assert "residual_scale" not in cell.record
    assert cell.record["act"] == "scaled_relu"


@pytest.mark.parametrize(
    "words",
    [
        ["norm=group", "norm_batch_size=4"],  # a size that has no effect
        ["norm=batch", "micro_batch_size=32", "norm_batch_size=32"],  # the sizes by default
        ["norm=none", "act=relu", "conv=plain"],  # the slots by default
    ],
)
def test_lines_that_mean_one_cell_leave_one_record(words: list[str]):
    cell, same = prepare(words[0]), prepare(*words)
    assert (cell.id, cell.record) == (same.id, same.record)


def test_a_slot_is_one_training_whoever_says_it():
    by_norm, by_key = prepare("norm=ws"), prepare("norm=none", "conv=weight_standardized")
    assert by_norm.record["identity"] == by_key.record["identity"]
    assert by_norm.record["conv"] == by_key.record["conv"] == "weight_standardized"
    assert by_norm.record["identity"] != prepare("norm=none").record["identity"]
    plain = prepare("norm=ws", "conv=plain")
    assert plain.record["identity"] == prepare("norm=none").record["identity"]


@pytest.mark.slow
def test_a_default_of_a_norm_that_has_no_place_is_no_other_training():
    cells = [prepare("model=vit", f"norm={norm}") for norm in ("ws", "none")]
    assert cells[0].record["identity"] == cells[1].record["identity"]


@pytest.mark.slow
def test_number_of_a_residual_scale_counts_by_value():
    whole, real = (prepare("model=vit", "norm=none", f"residual_scale={v}") for v in ("0", "0.0"))
    assert whole.id == real.id != prepare("model=vit", "norm=none").id


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the data sets that are built, in order."""
    names: list[str] = []

    def build(cfg: DictConfig) -> object:
        names.append(cfg.data.name)
        return object()

    monkeypatch.setattr(draft, "build_data", build)
    draft.forget_data()
    yield names
    draft.forget_data()


def load(name: str, folder: str = "here", digest: str | None = None) -> object:
    data = {"_target_": "normexp.data.mine", "name": name, "dir": "${folder}"}
    return draft.load_data(OmegaConf.create({"data": data, "folder": folder}), digest)


def test_two_data_sets_stay_in_memory_until_they_are_forgotten(loaded: list[str]):
    first, second = load("a"), load("b")
    assert (load("a"), load("b")) == (first, second)
    load("c")  # `a` has waited longest
    assert load("b") is second and load("a") is not first
    draft.forget_data()
    assert load("b") is not second
    assert loaded == ["a", "b", "c", "a", "b"]


def test_other_values_and_files_are_other_data(loaded: list[str]):
    assert len({load("a"), load("a", folder="there")}) == 2
    assert len({load("a", digest="1"), load("a", digest="2")}) == 2
    assert len(loaded) == 4
