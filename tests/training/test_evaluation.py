"""What a training records of other statistics, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_cases import build_task, rows_of, state_of, train

from normexp.training.evaluation import EvaluationPlan, StatisticsEvaluation


def plan(every_epoch: bool) -> EvaluationPlan:
    return EvaluationPlan(("running", "precise", "batch"), 40, 8, (4,), every_epoch)


@pytest.mark.parametrize("every_epoch", [False, True])
def test_training_records_each_statistics_once_where_asked(tmp_path: Path, every_epoch: bool):
    evaluation = StatisticsEvaluation(plan(every_epoch))
    task = train(build_task(seeds=(0, 1), stacked=True), tmp_path / "a.ckpt", [evaluation])
    rows = [(step, name) for step, _, _, metrics in rows_of(task) for name in metrics]
    val = [step for step, name in rows if name == "val/accuracy@precise"]
    assert val == ([5, 10] if every_epoch else [10])
    assert [step for step, name in rows if name == "test/loss@batch4"] == [10]
    content = evaluation.content(task, 1)
    assert content["precise"]["num_samples"] == 40
    assert content["batch4"]["val/loss"] == task.final["val/loss@batch4"][1]
    assert content["running"]["test/loss"] == task.final["test/loss"][1]
    assert content["gap"].keys() == {"norm1", "norm2", "norm3"}


def test_evaluating_every_epoch_changes_no_weight(tmp_path: Path):
    plain = train(build_task(), tmp_path / "a.ckpt")
    watched = train(build_task(), tmp_path / "b.ckpt", [StatisticsEvaluation(plan(True))])
    for name, value in state_of(plain).items():
        assert torch.equal(state_of(watched)[name], value), name
