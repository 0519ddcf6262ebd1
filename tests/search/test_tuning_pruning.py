"""Trials that are ended early: the median rule, and what such a trial leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import optuna
import pytest

from normexp.cells.run import run_cell
from normexp.cli import parse_command
from normexp.reporting.metric import describe_metric
from normexp.search.objective import Objective
from normexp.search.points import plan_searches
from normexp.search.pruning import median_thresholds, read_by_epoch
from normexp.search.search import Trial

ACCURACY = Objective(describe_metric("val/accuracy"))
NUM_EPOCHS = 4


def test_thresholds_prune_as_optunas_median_pruner_does():
    rng = np.random.default_rng(0)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=5)
    )
    complete: list[Trial] = []
    decisions = []
    for number in range(30):
        values = rng.random(NUM_EPOCHS)
        thresholds = median_thresholds(complete)
        trial = study.ask()
        pruned = False
        for epoch, value in enumerate(values[:-1]):
            trial.report(value, epoch)
            pruned = trial.should_prune()
            best = max(values[: epoch + 1])
            assert (epoch in thresholds and best < thresholds[epoch]) is pruned
            if pruned:
                break
        decisions.append(pruned)
        if pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            trial.report(values[-1], NUM_EPOCHS - 1)
            study.tell(trial, values[-1])
            complete.append(Trial(number, {}, "complete", values[-1], dict(enumerate(values))))
    assert not any(decisions[:5]) and 5 < sum(decisions) < 25


def test_few_trials_and_the_last_epoch_end_nothing():
    trials = [Trial(i, {}, "complete", 0.5, {0: 0.1 * i, 1: 0.5}) for i in range(5)]
    assert median_thresholds(trials[:4]) == {}
    assert median_thresholds(trials) == {0: 0.2}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [[], ["trainer=ddp", "trainer.accelerator=cpu"]])
def test_ended_trial_has_its_epochs_and_no_result(devices: list[str], tmp_path: Path):
    words = ["lr=choice(0.001,0.1)", "epochs=3", "tune.seeds=2", f"runs_dir={tmp_path}"]
    (plan,) = plan_searches(parse_command([*words, *devices]))
    thresholds = {0: 0.0, 1: 0.7}  # lr = 0.001 is below 0.5 then, lr = 0.1 above 0.8
    outcomes = [
        run_cell(plan.search_cell({"lr": lr}, "val/accuracy", thresholds))
        for lr in ("0.001", "0.1")
    ]
    assert [len(outcome.results) for outcome in outcomes] == [0, 2]
    directories = [outcome.directory for outcome in outcomes]
    assert directories[0] is not None and directories[1] is not None
    ended, whole = (
        read_by_epoch(path, plan.search_seeds, ACCURACY) for path in directories if path
    )
    assert list(ended) == [0, 1] and list(whole) == [0, 1, 2]
    assert whole[2] == ACCURACY.of_results(outcomes[1].results)
    assert ended[1] < 0.7 < whole[1]
