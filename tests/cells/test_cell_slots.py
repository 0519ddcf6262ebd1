"""Slots on the command line: what is refused, what is noted, and which cells are one."""

from __future__ import annotations

import logging
from functools import cache

import pytest

from normexp.cells.cell import Cell, prepare_cell
from normexp.config.compose import compose_config
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
            "act=relu: model=vit has no activation behind a norm; try model=convnet or "
            "model=small_resnet",
        ),
        (["model=vit", "conv=plain"], "conv=plain: model=vit has no convolution"),
        (["residual_scale=0"], "residual_scale=0: model=convnet has no residual branch; try"),
        (["placement=post"], "placement=post: model=convnet has no transformer block; try"),
        (
            ["model=small_resnet", "qk_norm=false"],
            "qk_norm=false: model=small_resnet has no attention; try model=vit, gpt or",
        ),
        (["act=swish"], "act=swish: must be one of relu, gelu, silu, tlu, scaled_relu, identity"),
        (["qk_norm=1"], "qk_norm=1: must be true or false or null"),
        (["residual_scale=inf"], "residual_scale=inf: must be a number or null"),
        (["norm=ws", "norm.conv=ws"], "norm.conv=ws: must be one of plain, weight_standardized"),
    ],
)
def test_slot_is_refused_in_one_line(words: list[str], message: str):
    with pytest.raises(UserError) as caught:
        prepare(*words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_slot_of_a_norm_that_the_model_has_no_place_for_is_noted(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.INFO, "normexp"):
        cell = prepare("norm=nf", "model=convnet")
    note = "the norm's residual_scale=0.0 is left out: model=convnet has no residual branch"
    assert [record.getMessage() for record in caplog.records].count(note) == 1
    assert "residual_scale" not in cell.record
    assert cell.record["act"] == "scaled_relu"


def test_spelling_a_default_out_is_the_same_cell():
    unsaid, said = prepare("norm=none"), prepare("norm=none", "act=relu", "conv=plain")
    assert unsaid.id == said.id
    assert not {"act", "conv"} & (set(said.identity) | set(said.record))


def test_a_slot_is_one_training_whoever_says_it():
    by_norm, by_key = prepare("norm=ws"), prepare("norm=none", "conv=weight_standardized")
    assert by_norm.id == by_key.id
    assert by_norm.record["conv"] == by_key.record["conv"] == "weight_standardized"
    assert by_norm.id != prepare("norm=none").id
    assert prepare("norm=ws", "conv=plain").id == prepare("norm=none").id


@pytest.mark.slow
def test_a_default_of_a_norm_that_has_no_place_is_no_other_training():
    assert prepare("model=vit", "norm=ws").id == prepare("model=vit", "norm=none").id


@pytest.mark.slow
def test_number_of_a_residual_scale_counts_by_value():
    whole, real = (prepare("model=vit", "norm=none", f"residual_scale={v}") for v in ("0", "0.0"))
    assert whole.id == real.id != prepare("model=vit", "norm=none").id
