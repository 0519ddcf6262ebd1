"""Showing and saving an evaluation, of numbers that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from normexp.cells import finished as evaluating
from normexp.errors import UserError
from normexp.reporting.terminal import print_evaluations
from normexp.training.evaluation import EvaluationPlan


def test_names_with_brackets_are_text(capsys: pytest.CaptureFixture[str]):
    contents = {0: {"batch [2]": {"test/[/x]": 0.5}}}
    print_evaluations(contents, "batch [on] digits", why_nothing="", invalid=None)
    out = capsys.readouterr().out
    assert "batch [2]" in out and "test/[/x]" in out


@pytest.mark.parametrize(
    ("asked", "sizes", "reason"),
    [
        (("batch",), (), "mix samples"),
        (("precise", "batch"), (), "mix samples and keeps no running moments"),
        (("batch",), (2,), "finite"),
    ],
)
def test_evaluation_without_a_number_says_why_in_one_line(
    asked: tuple[str, ...],
    sizes: tuple[int, ...],
    reason: str,
    capsys: pytest.CaptureFixture[str],
):
    plan = EvaluationPlan(asked, 32, 2, sizes, every_epoch=False)
    why = evaluating.why_nothing(plan)
    print_evaluations({0: {}, 1: {}}, "group on digits", why_nothing=why, invalid=None)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"evaluate_with=[{','.join(asked)}]" in line
    assert reason in line and "evaluate_with=[running]" in line


def test_run_that_may_not_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "samples.npz.tmp")

    monkeypatch.setattr(evaluating, "write_samples", denied)
    with pytest.raises(UserError, match=r"Permission denied"):
        evaluating.save_evaluations(tmp_path, {0: {}}, {0: {}})
