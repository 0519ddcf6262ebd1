"""What a search proposes and stores: resumed, it goes on as if nothing had happened."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import optuna
import pytest

from normexp.cells.run import run_task
from normexp.cli import parse_command
from normexp.errors import UserError
from normexp.reporting.metric import describe_metric
from normexp.search.objective import Objective
from normexp.search.points import SearchPlan, plan_searches
from normexp.search.pruning import median_thresholds, read_by_epoch
from normexp.search.search import Search, Trial
from normexp.search.storage import open_storage

ACCURACY = Objective(describe_metric("val/accuracy"))
LR = "lr=tag(log,interval(1e-3,1))"
SPACE = (LR, "optim.momentum=interval(0,0.99)")
TRIALS = 12  # more than the sampler draws at random


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@lru_cache
def plan_of(*words: str) -> SearchPlan:
    (plan,) = plan_searches(parse_command(list(words)))
    return plan


def search_of(storage: optuna.storages.BaseStorage, *words: str) -> Search:
    return Search(plan_of(*words), "a name", ACCURACY, storage)


def score(trial: Trial) -> float:
    """An accuracy with its peak at lr = 0.1, momentum = 0.5."""
    momentum = float(trial.point.get("optim.momentum", 0.5))
    return 0.9 - (math.log10(float(trial.point["lr"])) + 1) ** 2 / 9 - (momentum - 0.5) ** 2


def run(search: Search, most: int = 1000) -> None:
    """Tells up to `most` trials."""
    for _ in range(most):
        proposed = search.propose()
        if not proposed:
            return
        for trial in proposed:
            search.tell(trial, score(trial), {}, pruned=False)


def points(search: Search) -> list[dict[str, str]]:
    return [trial.point for trial in search.ended()]


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, str]]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = search_of(optuna.storages.InMemoryStorage(), *SPACE, f"tune.trials={TRIALS}")
    run(search)
    return points(search)


@pytest.mark.parametrize("told", [0, 3, 8])
def test_search_killed_in_a_trial_goes_on_as_an_undisturbed_one(
    tmp_path: Path, undisturbed: list[dict[str, str]], told: int
):
    assert resumed(None, tmp_path, told) == undisturbed


def resumed(setting: str | None, folder: Path, told: int) -> list[dict[str, str]]:
    """The points of a search that ends in a trial after `told` others, and is opened again."""
    words = (*SPACE, f"tune.trials={TRIALS}")
    with open_storage(setting, folder) as storage:
        search = search_of(storage, *words)
        run(search, most=told)
        (running,) = search.propose()  # and here it is killed
    with open_storage(setting, folder) as storage:
        search = search_of(storage, *words)
        (first,) = search.propose()
        assert (first.number, first.point) == (running.number, running.point)
        run(search)
        assert search.propose() == []
        return points(search)


def test_larger_number_of_trials_adds_the_difference(undisturbed: list[dict[str, str]]):
    storage = optuna.storages.InMemoryStorage()
    for trials in (5, 5, TRIALS):
        search = search_of(storage, *SPACE, f"tune.trials={trials}")
        run(search)
        assert points(search) == undisturbed[:trials]
    assert len({tuple(point.items()) for point in undisturbed}) == TRIALS


def test_every_point_of_few_choices_is_tried_once():
    words = ("lr=choice(0.01,0.1,1.0)", "optim.momentum=choice(0.0,0.9)")
    storage = optuna.storages.InMemoryStorage()
    search = search_of(storage, *words)
    first = search.propose()
    assert [t.point for t in first] == list(search.plan.space.points())
    for trial in first[:2]:
        search.tell(trial, 0.5, {}, pruned=False)
    again = search_of(storage, *words)
    left = again.propose()
    assert [t.number for t in left] == [t.number for t in first[2:]]
    for trial in left:
        again.tell(trial, 0.5, {}, pruned=False)
    assert again.propose() == [] and len(again.ended()) == again.target == 6


def test_failed_trial_is_tried_again_by_the_next_command_and_counts_once():
    storage = optuna.storages.InMemoryStorage()
    words = (LR, "tune.trials=3")
    search = search_of(storage, *words)
    (failed,) = search.propose()
    search.tell(failed, None, {}, pruned=False)
    run(search)
    assert [t.state for t in search.ended()] == ["fail", "complete", "complete"]
    again = search_of(storage, *words)
    (retry,) = again.propose()
    assert retry.point == failed.point
    again.tell(retry, None, {}, pruned=False)  # still fails, and is left for the next command
    assert again.propose() == []
    run(search_of(storage, *words))
    assert [t.state for t in again.ended()] == ["complete"] * 3


def test_best_is_the_first_of_equals_and_never_the_worst_value():
    search = search_of(optuna.storages.InMemoryStorage(), "lr=choice(0.1,0.2,0.3,0.4)")
    trials = search.propose()
    search.tell(trials[0], 0.0, {}, pruned=False)
    assert search.best() is None
    for trial, value in zip(trials[1:], (0.5, 0.7, 0.7), strict=True):
        search.tell(trial, value, {}, pruned=False)
    best = search.best()
    assert best is not None and best.point == {"lr": "0.3"}


def test_lower_loss_is_better_and_divergence_is_infinite(tmp_path: Path):
    plan = plan_of("lr=choice(0.1,0.2,0.3)")
    loss = Objective(describe_metric("val/loss"))
    with open_storage(None, tmp_path) as storage:
        search = Search(plan, "a name", loss, storage)
        for trial, value in zip(search.propose(), (loss.worst, 0.4, 0.5), strict=True):
            search.tell(trial, value, {}, pruned=False)
    with open_storage(None, tmp_path) as storage:
        search = Search(plan, "a name", loss, storage)
        best = search.best()
        assert best is not None and best.point == {"lr": "0.2"}
        assert search.trials()[0].value == math.inf


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
    specs = [plan.search_cell({"lr": lr}, "val/accuracy", thresholds) for lr in ("0.001", "0.1")]
    outcomes = [outcome for spec in specs for outcome in run_task([spec])]
    assert [len(outcome.results) for outcome in outcomes] == [0, 2]
    directories = [outcome.directory for outcome in outcomes]
    assert directories[0] is not None and directories[1] is not None
    ended, whole = (
        read_by_epoch(path, plan.search_seeds, ACCURACY) for path in directories if path
    )
    assert list(ended) == [0, 1] and list(whole) == [0, 1, 2]
    assert whole[2] == ACCURACY.of_results(outcomes[1].results)
    assert ended[1] < 0.7 < whole[1]


def names_in(folder: Path, setting: str | None = None) -> list[str]:
    with open_storage(setting, folder) as storage:
        return optuna.get_all_study_names(storage)


def fill(folder: Path) -> Path:
    with open_storage(None, folder) as storage:
        optuna.create_study(storage=storage, study_name="kept")
    return folder / "optuna.journal"


def test_second_process_is_told_who_searches(tmp_path: Path):
    with open_storage(None, tmp_path), pytest.raises(UserError, match="process"):
        names_in(tmp_path)
    assert names_in(tmp_path) == []  # and the lock is gone


def test_line_that_a_killed_process_tore_is_cut_off(tmp_path: Path):
    journal = fill(tmp_path)
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"wor')
    assert names_in(tmp_path) == ["kept"]
    assert journal.read_bytes() == whole


@pytest.mark.parametrize("content", ["hello\n", '{"op_code":77,"worker_id":"a"}\n', "notes"])
def test_foreign_file_is_refused_and_left_as_it_is(tmp_path: Path, content: str):
    journal = tmp_path / "optuna.journal"
    journal.write_text(content)
    with pytest.raises(UserError, match="optuna.journal"):
        names_in(tmp_path)
    assert journal.read_text() == content


def test_server_is_not_offered(tmp_path: Path):
    with pytest.raises(UserError, match="postgresql"):
        names_in(tmp_path, "postgresql://host/db")
