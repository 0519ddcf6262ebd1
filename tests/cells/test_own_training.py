"""Own schedules, callbacks and optimizers through the entry: ids, seeds apart, ends, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from normexp.cells.cell import prepare_cell
from normexp.config.compose import compose_cell
from normexp.config.rules import validate
from normexp.errors import UserError
from normexp.records.result import Result, read_result
from normexp.train import main

MODULE = "own_training_of_a_test"
SOURCE = """
import pytorch_lightning as pl
import torch

def ramp(step, total_steps, low=0.1):
    return low + step / total_steps

def worse(step, total_steps):
    return {}["shape"]

class Fails(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise KeyError("trees")

class Step(torch.optim.SGD):
    def step(self, closure):
        raise AssertionError

class Made(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        raise RuntimeError("no device")
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / f"{MODULE}.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    sys.modules.pop(MODULE, None)


def id_of(*words: str) -> str:
    return prepare_cell(*compose_cell(words)).id


@pytest.mark.slow
def test_schedule_and_callback_are_part_of_the_id_with_their_source(source: Path):
    early = ["callback=early_stopping"]
    lines = [
        [],
        early,
        [*early, "callback.patience=5"],
        ["schedule=custom", f"schedule._target_={MODULE}.ramp"],
        ["schedule=custom", f"schedule._target_={MODULE}.ramp", "schedule.low=0.2"],
        ["callback=custom", f"callback._target_={MODULE}.Fails"],
        ["callback=custom", f"callback.a._target_={MODULE}.Fails"],
    ]
    before = [id_of(*line) for line in lines]
    assert len(set(before)) == len(lines)
    source.write_text(SOURCE + "# edited\n")
    del sys.modules[MODULE]  # as in another process
    after = [id_of(*line) for line in lines]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True] * 3 + [False] * 4


def test_a_default_that_is_typed_has_the_id_of_one_that_is_not():
    words = ["optim=custom", "optim._target_=torch.optim.SGD", "lr=0.1"]
    assert id_of(*words) == id_of(*words, "optim.decay_bias=true")
    assert id_of(*words) != id_of(*words, "optim.decay_bias=false")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"optim=custom optim._target_={MODULE}.Step lr=1", "closure"),
        (
            f"optim=custom optim._target_={MODULE}.Made lr=1",
            rf"optim\._target_={MODULE}\.Made: no device \({MODULE}\.py, line 21\)",
        ),
        (
            f"schedule=custom schedule._target_={MODULE}.worse",
            rf"schedule\._target_={MODULE}\.worse fails: KeyError: 'shape' \({MODULE}\.py, line 9",
        ),
        (
            f"schedule=custom schedule._target_={MODULE}.ramp schedule.lo=2",
            "schedule.lo: .* did you mean low",
        ),
        (
            f"schedule=custom schedule._target_={MODULE}.ramp optim.warmup=0",
            "^optim.warmup=0: nothing reads this key",
        ),
        (
            "schedule=custom schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau "
            "schedule.monitor=loss",
            "^schedule.monitor=loss is not a metric .* val/loss, val/accuracy",
        ),
        (f"callback=custom callback._target_={MODULE}.Step", "^callback.params is missing"),
        ("callback=custom", "^callback._target_ is missing"),
        ("callback=early_stopping callback.monitor=loss", "monitor=loss is not a metric"),
        ("callback=early_stopping callback.patience=-1", "^callback.patience=-1: must be a whole"),
        (
            "schedule=custom schedule._target_=torch.optim.lr_scheduler.StepLR",
            "^schedule.step_size is missing: .*StepLR needs it; set schedule.step_size=...",
        ),
        ("schedule=wsd", "optim.schedule="),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(source: Path, line: str, message: str):
    assert source.is_file()
    with pytest.raises(UserError, match=message) as caught:
        cfg, choices = compose_cell(line.split())
        validate(cfg)
        prepare_cell(cfg, choices)
    assert "\n" not in str(caught.value)


PLATEAU = "schedule=custom schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "differs"),
    [
        ("callback=early_stopping", True),
        (PLATEAU, True),
        ("schedule=custom schedule._target_=torch.optim.lr_scheduler.ConstantLR", False),
        ("optim.schedule=cosine", False),
    ],
)
def test_epochs_between_validations_are_part_of_the_id_where_something_sees_them(
    line: str, differs: bool
):
    each, third = (id_of(*line.split(), *more) for more in ([], ["val_every_epochs=3"]))
    assert (each != third) == differs


def results_in(folder: Path) -> list[Result]:
    return [read_result(file) for file in sorted(folder.glob("default/*/seed-*/result.json"))]


QUICK = ["replicas=2", "model.width=4", "trainer=cpu", "data.limit_train=64"]


def test_seeds_that_early_stopping_ends_train_apart_and_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["callback=early_stopping", "+callback.stopping_threshold=99", "epochs=5", "ema=0.9"]
    assert main([*QUICK, *words, f"runs_dir={tmp_path}"]) == 0
    results = results_in(tmp_path)
    assert len(results) == 2
    for result in results:
        assert (result.status, result.steps, result.config["num_steps"]) == ("finished", 2, 10)
        assert "EarlyStopping" in (result.stopped or "") and "val/loss" in (result.stopped or "")
        assert result.timing["stack_size"] == 1
        assert result.config["callback"] == "early_stopping"
        assert "test/accuracy@ema" in result.metrics
    shown = capsys.readouterr()
    assert shown.err.count("trains by itself") == 1
    assert "seed 1 ended at step 2" in shown.out
    assert main([*QUICK, *words, f"runs_dir={tmp_path}"]) == 0
    assert "already recorded" in capsys.readouterr().out


def test_callback_that_raises_fails_the_run_with_the_line(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
):
    assert source.is_file()
    words = ["callback=custom", f"callback._target_={MODULE}.Fails", "steps=2", "replicas=1"]
    assert main([*QUICK[1:], *words, f"runs_dir={tmp_path}/runs"]) == 1
    (result,) = results_in(tmp_path / "runs")
    assert result.error == f"KeyError: 'trees' ({MODULE}.py, line 13)"
    assert "KeyError: 'trees'" in capsys.readouterr().err


@pytest.mark.slow
def test_rates_that_a_scheduler_sets_do_not_depend_on_the_cells_beside(tmp_path: Path):
    target = "schedule._target_=torch.optim.lr_scheduler.OneCycleLR"
    words = ["schedule=custom", target, "schedule.max_lr=0.5", "steps=3", "stack=true", "workers=0"]
    assert main(["-m", "lr=0.5,0.05", *QUICK, *words, f"runs_dir={tmp_path}"]) == 0
    first, _, second, _ = results_in(tmp_path)
    assert first.metrics["val/loss"] == second.metrics["val/loss"]  # max_lr takes the place of lr
