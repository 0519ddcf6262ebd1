"""What a line of normexp.tune asks for, and what it is refused for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from normexp.cli import parse_command
from normexp.config.grid import list_cells
from normexp.config.help import help_text
from normexp.config.place import environment_of
from normexp.errors import UserError
from normexp.search import points as tuning_plan
from normexp.search.points import SearchPlan, plan_searches

LR = "lr=tag(log,interval(1e-3,1))"


def plans_of(*words: str) -> list[SearchPlan]:
    return plan_searches(parse_command(list(words)))


def test_grid_is_one_search_for_each_of_its_points():
    plans = plans_of(LR, "norm=batch,group", "epochs=2")
    assert [plan.title for plan in plans] == ["norm=batch", "norm=group"]
    assert {plan.space.keys for plan in plans} == {("lr",)}


def test_search_and_report_differ_in_study_and_seeds_alone():
    (plan,) = plans_of(LR, "tune.seeds=2", "replicas=5", "study=mine")
    search = plan.search_cell({"lr": "0.02"}, "val/accuracy", {})
    report = plan.report_cell({"lr": "0.02"})
    assert search.cfg is not None and report.cfg is not None
    assert (search.cfg.study, search.seeds) == ("mine-search", [1000, 1001])
    assert (report.cfg.study, report.seeds) == ("mine", [0, 1, 2, 3, 4])
    assert search.digest == report.digest
    assert search.cfg.lr == 0.02


def test_command_repeats_the_report_and_quotes_for_the_shell():
    (plan,) = plans_of(LR, "tune.seeds=2", "+optim.betas=[1,2]", "norm=group", "study=mine")
    assert plan.command({"lr": "0.02"}) == (
        "python -m normexp.train '+optim.betas=[1,2]' norm=group study=mine lr=0.02"
    )


@pytest.mark.slow
def test_recipe_searches_a_rate_for_each_norm_and_size():
    plans = plans_of("experiment=tuned_sensitivity")
    assert len(plans) == 4 * 4
    assert {plan.base.batch_size for plan in plans} == {128}
    assert all(len(list(plan.space.points())) == 5 for plan in plans)


def test_training_of_a_recipe_to_be_searched_names_the_command():
    with pytest.raises(UserError, match="run python -m normexp.tune experiment=tuned_sensitivity"):
        list_cells(parse_command(["experiment=tuned_sensitivity"]))
    cells = list_cells(parse_command(["experiment=tuned_sensitivity", "lr=0.1"]))
    assert len(cells) == 16  # nothing is left to search


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "nothing to search"),
        (["lr=0.1,0.3"], "nothing to search"),
        ([LR, "tune.metric=test/accuracy"], "nothing is chosen on test"),
        ([LR, "tune.metric=train/loss"], "nothing is chosen on test"),
        ([LR, "tune.first_seed=2"], "overlap: a result must come from fresh seeds"),
        ([LR, "tune.first_seed=3", "replicas=4"], "try tune.first_seed=4"),
        ([LR, "tune.seeds=1"], "tune.seeds=1: must be a whole number above 1"),
        ([LR, "tune.trials=0"], "tune.trials=0"),
        ([LR, 'tune.storage="postgresql://host/db"'], "give a file of a journal"),
        (["lr=interval(0,1)"], "lr=0.0: must be a number above 0"),
        (["seed=choice(1,2)"], "a search varies what is trained"),
        ([LR, "study=a,b"], "a search varies what is trained"),
        ([LR, "tune.trails=3"], "did you mean tune.trials"),
        (["norm=group", "norm.num_grups=choice(2,4)"], "did you mean norm.num_groups"),
        (["optim=choice(sgd,adamm)"], "optim=adamm: no such optim"),
    ],
)
def test_mistake_is_refused_before_any_work(words: list[str], part: str):
    with pytest.raises(UserError) as caught:
        plans_of(*words)
    assert part in str(caught.value)


def test_seeds_that_only_touch_are_apart():
    (plan,) = plans_of(LR, "tune.first_seed=4", "replicas=4")
    assert list(plan.search_seeds) == [4, 5, 6]


def test_missing_optuna_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning_plan, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'normexp\[tune\]'"):
        plans_of(LR)


def test_help_lists_every_key_of_the_search():
    (plan,) = plans_of(LR)
    text = help_text("tune")
    assert all(f"tune.{key}=" in text for key in plan.base.tune)
    assert max(map(len, text.splitlines())) <= 100


def test_a_refusal_imports_no_torch():
    script = (
        "import sys; from normexp.tune import main; code = main(sys.argv[1:]); "
        "sys.exit(99 if {'torch', 'optuna'} & set(sys.modules) else code)"
    )
    run = subprocess.run([sys.executable, "-c", script, "norm=batch"], capture_output=True)
    assert run.returncode == 2


def test_search_that_torchrun_has_started_is_refused(monkeypatch: pytest.MonkeyPatch):
    for name, value in environment_of(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="run normexp.tune without srun or torchrun"):
        plans_of(LR, "trainer=ddp")
    assert plans_of(LR)
