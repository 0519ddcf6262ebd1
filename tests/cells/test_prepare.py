"""Preparing a cell: what is refused, what is noted, and the data that cells share."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from train_cases import NO_RECORDS

from normexp.cli import parse_command
from normexp.errors import UserError
from normexp.norms.site import named_sites
from normexp.training.cells import cell as cell_module
from normexp.training.cells.cell import Cell, Prepared, prepare_cell
from normexp.training.config.choices import parse_overrides
from normexp.training.config.command import compose_cells
from normexp.training.config.compose import compose_cell
from normexp.training.config.groups import shipped_defaults
from normexp.training.config.spec import CellSpec
from normexp.training.config.validate import read_settings

OWN = """
import threading
import pytorch_lightning as pl
import torch
from torch import nn
from normexp.data import Data
from normexp.training.data.images import load_digits

class Net(nn.Module):
    def __init__(self, norm, num_outputs, *, fault=""):
        super().__init__()
        if fault == "raises":
            raise KeyError("depth")
        self.fault = fault
        self.norm = nn.Identity() if fault == "ignores" else norm(1)
        self.head = nn.Linear(64, num_outputs + (fault == "outputs"))
        self.requires_grad_(fault != "frozen")
        if fault == "no_copy":
            self.own = threading.Lock()
        if fault == "computed":
            self.own = self.head.weight * 2

    def forward(self, x):
        if self.fault == "forward":
            raise RuntimeError("boom")
        y = self.norm(x)
        if self.fault == "computed":
            return y.flatten(1) @ self.own.T
        y = self.head((x if self.fault == "drops" else y).flatten(1))
        if self.fault == "tuple" or (self.fault == "auxiliary" and self.training):
            return y, y
        return y

class Scores(nn.Sequential):
    def __init__(self):
        super().__init__(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        return {"logits": super().forward(x), "x": x}

def nothing(norm):
    return None

def load_own(fault=""):
    if fault == "raises":
        raise OSError("the disk is gone")
    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None)
    if fault == "classes":
        data.num_outputs = 5
    return (data, data) if fault == "tuple" else data

def ramp(step, total_steps, low=0.1):
    return low + step / total_steps

def worse(step, total_steps):
    return {}["shape"]

class Step(torch.optim.SGD):
    def step(self, closure):
        raise AssertionError

class Made(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        raise RuntimeError("no device")
"""


@cache
def prepare(*words: str) -> Cell:
    """Composes the cell of these words; a target in `own` chooses `custom` in its group."""
    custom = [f"{word.partition('.')[0]}=custom" for word in words if "._target_=" in word]
    config, choices = compose_cell(parse_overrides([NO_RECORDS, *custom, *words]))
    read_settings(config)
    return prepare_cell(CellSpec(config, choices))


TEXT = "data=manual model.width=16 model.depth=1"
DDP = "trainer=ddp trainer.accelerator=cpu"
PLATEAU = "schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"
REFUSED = {
    "norm.at={norm9:none}": r"no such site; the sites are norm1, norm2, norm3$",
    "norm.at={norm1:qqqqq}": r"norm\.at=\{...:qqqqq\}: no such norm; .*--help lists all",
    "norm.at={norm1:rmss}": "no such norm; did you mean rms",
    "data.augmentation=3": "^data.augmentation=3: must be null, or a group of keys",
    "norm.at={norm1:none} model=torchvision model.name=resnet18": "does not build its norms from",
    "norm=instance model=custom model._target_=torch.nn.Identity": "argument `norm`",
    "norm=taper norm.running_from=sequence norm_batch_size=4": "this norm counts optimizer steps",
    "model=gpt": "does not fit data=digits",
    "model=text_encoder": "does not fit data=digits; try data=langid",
    "data=langid model=convnet": "does not fit data=langid",
    "norm=as_built model=torchvision model.name=resnet18 eps=1e-3": "eps has no effect on norm=as",
    "norm._target_=normexp.norms.sample.Grp": "norm._target_=normexp.norms.sample.Grp: ",
    "norm._target_=torch.nn.GroupNorm": "num_groups",
    "model=vit act=relu": r"act=relu: model=vit has no activation after a norm; try model=convnet",
    "data.limit_train=31": "data.limit_train=31 is less than one batch_size=32; try",
    f"{TEXT} norm=batch evaluate_with=[batch]": r"try evaluate_with=\[running,precise\]",
    (
        "data=langid model.width=16 model.depth=1 norm=batch_per_position evaluate_with=[batch] "
        "evaluate_batch_sizes=[1]"
    ): ("evaluate_batch_sizes=1 leaves one value per statistic at blocks.0.attn_norm"),
    f"{DDP} trainer.devices=3": "batch_size=32 cannot be shared evenly by 3 devices; try 2",
    "model._target_=own.Net model.fault=raises": r"own.Net fails: KeyError: 'depth' \(own.py, line",
    "model._target_=own.Net model.fault=forward": r"Net on 4 samples fails: .*boom \(own.py, line",
    "model._target_=own.Net model.fault=frozen": "own.Net has no parameter to train",
    "model._target_=own.Net model.fault=outputs": r"own.Net returns \(2, 11\) .* \(2, 10\)",
    "model._target_=own.Net model.fault=tuple": "own.Net returns a tuple .*return the scores",
    "model._target_=own.Net model.fault=auxiliary": "returns a tuple in training .* scores alone",
    "model._target_=own.Net model.fault=no_copy": r"^Net\.own cannot be copied \(.*lock",
    "model._target_=own.Net model.fault=computed": r"uses 1 tensors .* no parameters",
    "model._target_=own.Net model.fault=ignores": "no norm site, so `norm` has no effect",
    "model._target_=own.Net model.fault=drops": "norm at norm has no effect",
    "model._target_=own.nothing": "own.nothing returned a NoneType, not a torch.nn",
    "data._target_=own.load_own data.fault=raises": "own.load_own fails: OSError: the disk",
    "data._target_=own.load_own data.fault=classes": "num_outputs=5 allows 0 to 4",
    "optim._target_=own.Step lr=1": "closure",
    "optim=adamw optim.betas=0.9": "AdamW optim.betas=0.9 optim.eps=1e-08: TypeError",
    "optim._target_=own.Made lr=1": r"optim\._target_=own\.Made: .*no device \(own\.py, line \d+\)",
    "schedule._target_=own.worse": r"own\.worse fails: KeyError: 'shape' \(own\.py, line \d+",
    "schedule._target_=own.ramp schedule.warmup=0": "^schedule.warmup: own.ramp has no such arg",
    f"{PLATEAU} schedule.monitor=loss": "^schedule.monitor=loss is not a .* val/loss, val/accuracy",
    "callback._target_=own.Step": r"^own\.Step needs params; set callback\.params=",
    "logger=custom logger.custom._target_=own.Gone": "own has no Gone",
    "norm=group norm.half_life=100": "^norm.half_life=100: .*GroupNorm has no momentum; drop",
}


def test_scores_of_a_foreign_network_are_taken_from_a_dict(own_module):
    own_module("own", OWN)
    network = prepare("norm=group", "norm.num_groups=1", "model._target_=own.Scores").build(0)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(("line", "message"), REFUSED.items(), ids=REFUSED.keys())
def test_what_cannot_train_is_refused_in_one_line_and_nothing_else_is_said(
    line, message, own_module: Callable[[str, str], Path], caplog
):
    own_module("own", OWN)
    with caplog.at_level(logging.INFO, "normexp"), pytest.raises(UserError) as caught:
        prepare(*line.split())
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)
    assert not [each for each in caplog.records if each.name.startswith("normexp.training.cells")]


def test_an_evaluation_that_depends_on_the_batch_is_said_with_its_size():
    words = "norm._target_=torch.nn.BatchNorm2d", "norm.track_running_stats=false"
    (line,) = [
        line for line in prepare(*words, "batch_size=16").messages if "other samples" in line
    ]
    assert "at norm1, norm2, norm3: metrics are of shuffled batches of 16" in line
    assert not [line for line in prepare("norm=batch").messages if "other samples" in line]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("norm=layer norm_batch_size=4", "norm=layer does not mix samples, so norm_batch_size has"),
        ("norm=layer norm_batch_size=null", ""),
        (
            "norm=layer norm.running_from=group",
            "norm=layer does not mix samples, so norm.running_from has",
        ),
        (
            "norm=batch norm.running_from=group",
            "each step is a single group, so norm.running_from has",
        ),
        (
            "trainer=ddp trainer.accelerator=cpu",
            "2 processes: norm=batch takes its statistics over 16",
        ),
        ("trainer=ddp trainer.accelerator=cpu norm_batch_size=16", ""),
        ("trainer=ddp trainer.accelerator=cpu norm=sync", ""),
    ],
)
def test_a_size_that_is_not_as_typed_is_said(line: str, said: str):
    (spec,) = compose_cells(parse_command([NO_RECORDS, *line.split()]))
    messages = prepare_cell(spec).messages
    keys = ("norm_batch_size", "running_from", "processes")
    found = [text for text in messages if any(key in text for key in keys)]
    assert len(found) == bool(said) and all(text.startswith(said) for text in found)


def test_a_seed_has_its_own_initial_weights_the_same_for_every_norm():
    builds = [prepare(f"norm={name}").build for name in ("batch", "group")]
    (first, other), (again, _) = (
        [next(build(seed).parameters()) for seed in (0, 1)] for build in builds
    )
    assert first.equal(again) and not first.equal(other)


def test_a_slot_of_a_norm_that_its_model_lacks_is_said():
    (line,) = [line for line in prepare("model=vit", "norm=group_ws").messages if "conv=" in line]
    said = "conv=weight_standardized of the norm has no effect: model=vit has no convolution"
    assert line.startswith(said)
    assert not [line for line in prepare("norm=group_ws").messages if "conv=" in line]


def test_sites_named_by_a_glob_have_another_norm_split_like_the_others():
    words = ["norm=batch", "norm.at={norm?:ghost,norm3:layer}", "norm_batch_size=8"]
    cell = prepare(*words, "norm.running_from=group")
    sites = dict(named_sites(cell.build(0)))
    classes = {name: type(site.norm).__name__ for name, site in sites.items()}
    ghost, layer = "GhostBatchNorm", "LayerNorm"
    assert classes == {"norm1": ghost, "norm2": ghost, "norm3": layer}
    assert {(site.norm_batch_size, site.running_from) for site in sites.values()} == {(8, "group")}
    assert cell.defines["norm"]["at"] == "{norm?:ghost,norm3:layer}"
    first, other = (next(one.build(0).parameters()) for one in (cell, prepare("norm=batch")))
    assert first.equal(other)


@pytest.mark.parametrize(
    "words",
    [
        ["norm=group", "norm_batch_size=4"],  # a size that has no effect
        ["norm=group", "norm.running_from=group", "norm_batch_size=4"],
        ["norm=batch", "norm.running_from=sequence"],  # each step is a single group
        ["norm=batch", "micro_batch_size=32", "norm_batch_size=32"],  # the sizes by default
    ],
)
def test_lines_that_mean_one_cell_leave_one_record(words: list[str]):
    cell, same = prepare(words[0]), prepare(*words)
    assert (cell.spec.id, cell.defines) == (same.spec.id, same.defines)
    assert cell.derived == same.derived


DECLARES = """
from torch import nn

class Own(nn.Module):
    def __init__(self, num_features):
        super().__init__()

    def forward(self, x):
        return x / (x.abs().mean(1, keepdim=True) + 1e-5)

class Lies(Own):
    mixes_samples = False

    def forward(self, x):
        return x / (x.abs().mean(0, keepdim=True) + 1e-5)
"""


def test_a_norm_that_pools_nothing_keeps_padding_and_is_told_what_to_declare(own_module):
    own_module("declares", DECLARES)
    words = ["data=langid", "model.depth=1", "model.width=8", "norm_batch_size=4", NO_RECORDS]
    (spec,) = compose_cells(parse_command(["norm=declares.Own", *words]))
    cell = prepare_cell(spec)
    assert all(site.keeps_padding for _, site in named_sites(cell.build(0)))
    assert cell.traits.stacking_obstacle is None
    way = "to train it once for all sizes, write `mixes_samples = False` in the class body itself"
    assert f"norm_batch_size has no effect; {way}" in " ".join(cell.messages)


def test_a_false_declaration_is_refused(own_module: Callable[[str, str], Path]):
    own_module("declares", DECLARES)
    (spec,) = compose_cells(parse_command(["norm=declares.Lies", NO_RECORDS]))
    with pytest.raises(UserError, match="declared: samples are mixed at norm1"):
        prepare_cell(spec)


def test_a_record_has_what_its_id_hashes_and_what_follows_from_it():
    words = "batch_size=64 norm_batch_size=4 lr=0.1 lr_rule=linear drop_last=false steps=42"
    cell = prepare("norm=batch", "norm.half_life=64", "norm.momentum=null", *words.split())
    assert cell.defines == {**cell.spec.identity, "digests": {"data": cell.data.digest}}
    assert cell.derived == {
        **{"batch_size": 64, "micro_batch_size": 64, "norm_batch_size": 4, "devices": 1},
        **{"steps": 42, "epochs": 2.0, "lr": 0.2, "norm.momentum": 0.5},
    }
    group = prepare("norm=group", "norm_batch_size=4")  # which samples share has no effect
    assert group.derived["norm_batch_size"] == group.derived["batch_size"] == 32
    assert group.measured.traits["mixes_samples"] is False


@pytest.mark.parametrize(
    ("words", "pays"),
    [
        ("", True),
        ("batch_size=16", False),  # a stack of these would pay
        ("norm_batch_size=2", False),  # too little at a time
        pytest.param("norm_batch_size=16", True, marks=pytest.mark.slow),
        ("stack=true", False),
        pytest.param("norm=group", False, marks=pytest.mark.slow),
        pytest.param("trainer.precision=64-true", False, marks=pytest.mark.slow),
        pytest.param("model=vit batch_size=512", False, marks=pytest.mark.slow),
    ],
)
def test_channels_lie_last_on_a_cpu_where_batch_norm_has_much_to_normalize(words: str, pays: bool):
    line = ["norm=batch", "model=small_resnet", "batch_size=64", "trainer=cpu", *words.split()]
    cell = prepare(*{word.partition("=")[0]: word for word in line}.values())
    assert cell.recipe.channels_last is pays
    assert cell.derived.get("channels_last", False) is pays


def test_a_norm_whose_momentum_must_be_a_number_takes_a_half_life_too():
    words = ["norm=batch_per_position", "data=langid", "norm.half_life=32", "norm.momentum=null"]
    assert prepare(*words, "batch_size=32").recipe.norm_momentum == 0.5


def test_averages_that_move_group_by_group_have_the_half_life_of_a_group():
    words = ["norm=batch", "norm.half_life=4", "norm.momentum=null", "norm_batch_size=4"]
    assert prepare(*words, "norm.running_from=sequence").recipe.norm_momentum == 0.5
    assert prepare(*words).recipe.norm_momentum == 1 - 2**-8  # once for 32 samples


def test_cells_share_their_data_sets_of_which_the_last_two_are_kept():
    prepared, values = Prepared(), shipped_defaults("data", "digits") or {}
    first, other = prepared.data(values), prepared.data({**values, "split_seed": 1})
    assert prepared.data(dict(values)) is first is not other
    prepared.data({**values, "split_seed": 2})
    assert prepared.data(values) is first
    assert prepared.data({**values, "split_seed": 1}) is not other


def test_cells_that_differ_in_rate_seed_or_budget_are_probed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    examined, traits, prepared = [], prepare("norm=layer").traits, Prepared()
    monkeypatch.setattr(cell_module, "examine", lambda *_, **__: examined.append(1) or traits)
    monkeypatch.setattr(prepared, "_traits", {})  # not those of other tests

    def probes(*words: str) -> int:
        (spec,) = compose_cells(parse_command([*words, f"runs_dir={tmp_path}"]))
        before = len(examined)
        prepare_cell(spec, prepared)
        return len(examined) - before

    assert probes() == 1
    for words in (["lr=0.3"], ["seed=5"], ["epochs=2"], ["optim=adamw"]):
        assert probes(*words) == 0, words
    for words in (["norm_batch_size=4"], ["eps=1e-3"], ["allow_leak=true"], ["norm=group"]):
        assert probes(*words) == 1, words
    ramp = ["norm=batch_renorm"]
    assert [probes(*ramp), probes(*ramp, "epochs=2"), probes(*ramp, "lr=1")] == [1, 1, 0]
