"""Showing and saving an evaluation, of numbers that are there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from normexp.errors import UserError
from normexp.studies import evaluating


def test_names_with_brackets_are_text(capsys: pytest.CaptureFixture[str]):
    cell = cast("Any", SimpleNamespace(invalid=None, title="batch [on] digits"))
    evaluating.print_evaluations(cell, {0: {"batch [2]": {"test/[/x]": 0.5}}})
    out = capsys.readouterr().out
    assert "batch [2]" in out and "test/[/x]" in out


def test_run_that_may_not_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "evaluation.json.tmp")

    monkeypatch.setattr(evaluating, "write_evaluation", denied)
    with pytest.raises(UserError, match=r"Permission denied; the numbers are printed, but not"):
        evaluating.save_evaluations(tmp_path, {0: {}})
