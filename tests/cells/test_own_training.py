"""Own schedules, callbacks and optimizers through the entry: ids, seeds apart, ends, errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from train_cases import prepare, results, spec_of

import normexp
from normexp.errors import UserError
from normexp.train import main

MODULE = "own_training_of_a_test"
SOURCE = """
import pytorch_lightning as pl
import torch

def ramp(step, total_steps, low=0.1):
    return low + step / total_steps

class Fails(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        raise KeyError("trees")

class Clips(torch.optim.SGD):
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()

class Scaled(torch.nn.Module):
    def __init__(self, num_features, keeps):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(num_features))
        self.keeps, self.seen = keeps, []

    def forward(self, x):
        scale = self.weight.exp()
        if self.keeps:
            self.scale = scale
            self.seen.append({"scale": scale})
        return x * scale.view(-1, *[1] * (x.ndim - 2))
"""
QUICK = ["model.width=4", "trainer=cpu", "data.limit_train=64", "workers=0"]
PLATEAU = "schedule=custom schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau"


@pytest.fixture
def source(own_module: Callable[[str, str], Path]) -> Path:
    return own_module(MODULE, SOURCE)


def id_of(*words: str) -> str:
    return prepare(*words).spec.id


@pytest.mark.slow
def test_schedule_and_callback_are_part_of_the_id_with_their_source(
    own_module: Callable[[str, str], Path],
):
    own_module(MODULE, SOURCE)
    early = ["callback=early_stopping"]
    lines = [
        [],
        early,
        [*early, "callback.patience=5"],
        ["schedule=custom", f"schedule._target_={MODULE}.ramp"],
        ["schedule=custom", f"schedule._target_={MODULE}.ramp", "schedule.low=0.2"],
        ["callback=custom", f"callback._target_={MODULE}.Fails"],
        ["callback=custom", f"callback.a._target_={MODULE}.Fails"],
        ["optim=custom", f"optim._target_={MODULE}.Clips", "lr=0.1"],
    ]
    before = [id_of(*line) for line in lines]
    assert len(set(before)) == len(lines)
    own_module(MODULE, SOURCE + "# edited\n")
    after = [id_of(*line) for line in lines]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True] * 3 + [False] * 5


def test_seeds_that_early_stopping_ends_train_apart_and_say_why(tmp_path: Path, capsys):
    words = [*QUICK, "callback=early_stopping", "+callback.stopping_threshold=99", "epochs=5"]
    words += ["replicas=2", f"runs_dir={tmp_path}"]
    assert main(words) == 0
    assert len(results(tmp_path)) == 2
    for result in results(tmp_path).values():
        measured, why = result.measured, result.measured.stopped or ""
        assert (result.status, measured.last_step, result.derived["steps"]) == ("finished", 2, 10)
        assert "EarlyStopping" in why and "val/loss" in why
        assert measured.timing["stack_size"] == 1
        assert result.settings["callback"] == "early_stopping"
    shown = capsys.readouterr()
    assert shown.err.count("trains by itself") == 1
    assert "seed 1 ended at step 2" in shown.out
    assert main(words) == 0
    assert "already recorded" in capsys.readouterr().out


def test_early_stopping_watches_a_metric_in_the_direction_in_which_it_improves():
    watching = [*QUICK, "callback=early_stopping", "callback.monitor=val/accuracy"]
    cell = prepare(*watching)
    (callback,) = cell.recipe.callbacks()
    assert isinstance(callback, EarlyStopping) and callback.mode == "max"
    assert cell.spec.id == spec_of(*watching, "callback.mode=max").id
    early = watching[:-1]
    assert spec_of(*early).id == spec_of(*early, "callback.mode=min").id != cell.spec.id


EARLY = "callback=custom callback._target_=pytorch_lightning.callbacks.EarlyStopping"


@pytest.mark.parametrize(
    ("words", "line"),
    {
        "callback=early_stopping callback.monitor=val_loss": (
            "callback.monitor=val_loss is not a metric of the validation; "
            "try val/loss, val/accuracy"
        ),
        "callback=early_stopping callback.monitor=null": "callback.monitor=null is not a metric",
        "callback=early_stopping callback.mode=max": (
            "callback.mode=max: val/loss is better if it is lower; try callback.mode=min"
        ),
        f"{EARLY} callback.monitor=val/accuracy": "try callback.mode=max",
        f"{PLATEAU} schedule.monitor=val/accuracy": (
            "schedule.mode=min: val/accuracy is better if it is higher; try schedule.mode=max"
        ),
        f"{PLATEAU} schedule.monitor=val/acc": "schedule.monitor=val/acc is not a metric",
    }.items(),
)
def test_a_metric_that_is_unknown_or_improves_the_other_way_is_refused(
    tmp_path: Path, capsys, words: str, line: str
):
    assert main([*QUICK, *words.split(), f"runs_dir={tmp_path}"]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert line in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("source")
def test_optimizer_that_looks_at_other_values_trains_each_seed_by_itself(tmp_path: Path):
    words = ["optim=custom", f"optim._target_={MODULE}.Clips", "lr=0.1", "stack=true", "steps=2"]
    assert main([*QUICK, *words, "replicas=2", f"runs_dir={tmp_path}"]) == 0
    assert [result.measured.timing["stack_size"] for result in results(tmp_path).values()] == [1, 1]


@pytest.mark.usefixtures("source")
def test_callback_that_raises_fails_the_run_with_the_line(tmp_path: Path, capsys):
    words = ["callback=custom", f"callback._target_={MODULE}.Fails", "steps=2", "replicas=1"]
    assert main([*QUICK, *words, f"runs_dir={tmp_path}"]) == 1
    (result,) = results(tmp_path).values()
    assert result.error == f"KeyError: 'trees' ({MODULE}.py, line 10)"
    assert "KeyError: 'trees'" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*num_workers")
def test_a_trainer_of_the_users_own_trains_the_module_like_the_entry(tmp_path: Path):
    words = ["norm=layer", "steps=12", "seed=3", *QUICK, f"runs_dir={tmp_path}"]
    (result,) = normexp.run([*words, "replicas=1", "study=s"])
    module = normexp.module(words)
    trainer = pl.Trainer(
        max_steps=12, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    assert trainer.global_step == 12 and "train/loss" in trainer.callback_metrics
    (metrics,) = trainer.test(module, verbose=False)
    assert metrics == pytest.approx({k: result.metrics[k] for k in metrics}, rel=1e-6)
    assert "test/accuracy" in metrics
    with pytest.raises(UserError, match="2 cells in one module; drop -m"):
        normexp.module(["-m", "norm=batch,group"])


@pytest.mark.usefixtures("source")
def test_tensors_of_a_graph_that_a_norm_keeps_change_nothing(tmp_path: Path):
    norm, kept = ["norm=custom", f"norm._target_={MODULE}.Scaled", "steps=8", *QUICK], []
    for keeps in ("true", "false"):
        words = [*norm, f"norm.keeps={keeps}", "replicas=1", f"runs_dir={tmp_path}"]
        (result,) = normexp.run(words)
        assert result.status == "finished"
        kept.append(result.metrics)
        run = tmp_path / "default" / result.cell_id / "seed-0"
        assert normexp.load(run)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert kept[0] == kept[1]
