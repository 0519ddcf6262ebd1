"""study.yaml and cells.csv, as a command writes them; where it may not, results do not suffer."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from normexp.config.spec import CellSpec, Outcome
from normexp.errors import UserError
from normexp.sweeps import log as study_log
from normexp.sweeps.log import GRID_KEYS, StudyLog

WORDS = ["normexp-train"]


def cell_of(runs_dir: Path) -> CellSpec:
    keys = dict.fromkeys(GRID_KEYS, 1)
    cfg = OmegaConf.create({**keys, "runs_dir": str(runs_dir), "study": "s"})
    return CellSpec(cfg, {"norm": "batch"}, "norm=batch")


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(study_log, "append_cells", refuse)


@pytest.mark.usefixtures("denied")
def test_study_that_is_only_read_takes_no_news_and_is_no_error(tmp_path: Path):
    (tmp_path / "s").mkdir()
    cell = cell_of(tmp_path)
    StudyLog([cell], WORDS).settle(cell, Outcome("refused", "", error="cannot be written"))
    assert not list((tmp_path / "s").iterdir())


@pytest.mark.usefixtures("denied")
def test_study_that_may_not_be_written_is_refused_before_training(tmp_path: Path):
    with pytest.raises(UserError, match=r"s: Permission denied; take another study="):
        StudyLog([cell_of(tmp_path)], WORDS).begin(tmp_path / "s")


def test_full_disk_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "s").mkdir()
    monkeypatch.setattr(study_log, "append_cells", full)
    cell = cell_of(tmp_path)
    with pytest.raises(OSError, match="No space"):
        StudyLog([cell], WORDS).tell(cell, error="refused")


def test_study_that_is_a_file_is_named_as_one(tmp_path: Path):
    (tmp_path / "s").touch()
    with pytest.raises(UserError, match="study=s: .* is a file; take another name"):
        StudyLog([cell_of(tmp_path)], WORDS).check()
