"""`python -m normexp.check` as a user runs it, in-process: formats, exit codes, mistakes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from normexp.check import main
from normexp.cli import parse_command
from normexp.training.config.command import compose_norms

CONTRACT = "part=contract"
MODULE = """
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self, num_features: int, knob: float = 1.0) -> None:
        super().__init__()
        self.knob = knob
        self.weight = nn.Parameter(torch.ones(num_features))

    def forward(self, x):
        weight = self.weight.view(-1, *[1] * (x.ndim - 2))
        return (weight * torch.tanh(self.knob * x)).to(x.dtype)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class Needs(nn.Module):
    def __init__(self, num_features, depth):
        super().__init__()


def nothing(num_features):
    return None
"""


@pytest.fixture
def mine(own_module: Callable[[str, str], Path]) -> str:
    """The name of a user's module."""
    return own_module("norms_of_a_user", MODULE).stem


def custom(target: str) -> list[str]:
    return ["norm=custom", f"norm._target_={target}"]


def test_one_card_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["norm=group", "norm.num_groups=4", CONTRACT, "format=json"]) == 0
    body = json.loads(capsys.readouterr().out)
    (card,) = body["cards"]
    assert body["schema"] == 2
    assert card["name"] == "group num_groups=4"
    assert card["target"] == "normexp.norms.sample.GroupNorm"
    assert card["passes"] is True and card["num_features"] == 64
    assert {line["section"] for line in card["lines"]} == {"contract"}
    assert {line["status"] for line in card["lines"]} <= {"pass", "value", "skipped"}


@pytest.mark.parametrize("words", [["norm=none,dyt"], ["-m", "norm=none,dyt"]])
def test_several_norms_are_named_in_two_ways(words: list[str]):
    assert [*compose_norms(parse_command(words))] == ["none", "dyt"]


def test_values_of_a_knob_are_cards_of_their_own():
    asked = compose_norms(parse_command(["norm=group", "norm.num_groups=4,8", "eps=1e-3"]))
    assert [*asked] == ["group num_groups=4 eps=1e-3", "group num_groups=8 eps=1e-3"]


def test_a_false_declaration_breaks_the_contract(own_module, capsys: pytest.CaptureFixture[str]):
    own = "from torch import nn\nclass Own(nn.BatchNorm1d):\n    mixes_samples = False"
    own_module("declares", own)
    assert main(["norm=declares.Own", CONTRACT]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "declares mixes_samples = False, and other samples move the output" in said


def test_heading_has_the_inputs_that_are_taken(capsys: pytest.CaptureFixture[str]):
    assert main(["norm=instance", CONTRACT]) == 0
    heading = " ".join(capsys.readouterr().out.split())
    assert "64 channels; takes channels first, 3-D, 4-D, 5-D inputs" in heading


def test_a_norm_that_sees_whole_texts_says_that_it_reads_the_future(capsys):
    assert main(["norm=instance,causal_instance,group", CONTRACT]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "instance: the contract holds; it reads later tokens, so causal models such as" in out
    assert out.count("it reads later tokens") == 1 and out.count("the contract holds") == 3


def test_custom_norm_takes_its_knobs(mine: str, capsys: pytest.CaptureFixture[str]):
    assert main([*custom(f"{mine}.Mine"), "norm.knob=0.5", CONTRACT]) == 0
    out = capsys.readouterr().out
    assert f"Mine knob=0.5 ({mine}.Mine), 64 channels" in out
    assert "the contract holds" in out


def test_contract_that_fails_is_exit_code_1_with_its_line(mine: str, capsys):
    assert main([*custom(f"{mine}.Noisy"), CONTRACT, "format=json"]) == 1
    (card,) = json.loads(capsys.readouterr().out)["cards"]
    found = {line["name"]: line for line in card["lines"]}
    assert found["deterministic in evaluation"]["status"] == "fail"
    assert card["target"] == f"{mine}.Noisy" and card["passes"] is False


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_package.Norm", "there is no module no_such_package; install it, or set"),
        ("{mine}.Missing", "{mine} has no Missing"),
        ("{mine}.nothing", "made a NoneType, not an nn.Module"),
        ("{mine}.Needs", "needs the argument depth; set norm.depth=..."),
    ],
)
def test_target_that_makes_no_norm_is_exit_code_2(target, message, mine: str, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as without pytest, which takes logs
    target, message = target.format(mine=mine), message.format(mine=mine)
    assert main([*custom(target), CONTRACT]) == 2
    error = capsys.readouterr().err
    assert target in error and message in error
    assert len(error.splitlines()) == 1
