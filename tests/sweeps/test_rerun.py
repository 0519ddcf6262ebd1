"""Reruns of a command: failures and their limit, other code, a cell that another process trains."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from train_cases import cells, train

from normexp.cells import run
from normexp.config.spec import CellSpec, Outcome
from normexp.errors import Halted, UserError
from normexp.records.files import file_lock
from normexp.records.history import CommandEntry, append_entries, read_history
from normexp.records.paths import LOCK_FILE
from normexp.records.result import read_result
from normexp.sweeps import log as log_module
from normexp.sweeps import sweep as runner
from normexp.sweeps.log import StudyLog


def test_failure_is_a_row_with_its_error_and_is_tried_again_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(run, "train_on_devices", fail)
    for attempt in (1, 2):
        assert train(tmp_path, "norm=none", "max_attempts=2") == 1
        (cell,) = tmp_path.glob("runs/default/none-*")
        result = read_result(cell / "seed-0")
        assert (result.status, result.attempts) == ("failed", attempt)
    before = (cell / "seed-0" / "result.json").read_bytes()
    capsys.readouterr()
    for asked, remedy in (
        ("max_attempts=2", "max_attempts=3"),
        ("retry_failed=false", "retry_failed=true"),
    ):
        assert train(tmp_path, "norm=none", asked) == 1
        assert (cell / "seed-0" / "result.json").read_bytes() == before
        told = capsys.readouterr().err
        assert "RuntimeError: no more" in told and remedy in told
    monkeypatch.undo()
    assert train(tmp_path, "norm=none", "max_attempts=3") == 0
    assert read_result(cell / "seed-0").status == "finished"


def test_cell_that_does_not_compose_is_a_row_and_recorded_with_its_reason(tmp_path: Path, capsys):
    assert train(tmp_path, "-m", "norm=group,gruop") == 1
    captured = capsys.readouterr()
    assert "1 finished, 1 refused" in captured.out
    assert "[2/2] refused  norm=gruop" in captured.err
    good, bad = read_history(tmp_path / "runs" / "default").cells.values()
    assert good.title.startswith("norm=group batch_size=32") and bad.title.startswith("norm=gruop")
    assert good.cell_id.startswith("group-") and not good.error
    assert bad.error.startswith("refused: norm=gruop: no such norm")


def test_cell_that_another_process_trains_is_waited_for_and_other_code_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    study = tmp_path / "runs" / "default"
    study.mkdir(parents=True)
    append_entries(study, [CommandEntry(["normexp-train"], "0123456789abcdef", {})])
    assert train(tmp_path, "norm=none") == 0
    assert capsys.readouterr().err.count("0123456") == 1
    (cell,) = cells(tmp_path)
    shutil.rmtree(cell / "seed-1")
    lock = ExitStack()
    assert lock.enter_context(file_lock(cell / LOCK_FILE))

    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for process" in record.getMessage():
                lock.close()

    in_vain = threading.Timer(30.0, lock.close)
    in_vain.start()
    handler = Release()
    logging.getLogger("normexp").addHandler(handler)
    try:
        assert train(tmp_path, "norm=none") == 0
    finally:
        logging.getLogger("normexp").removeHandler(handler)
        in_vain.cancel()
    told = capsys.readouterr().err
    assert f"waiting for process {os.getpid()}" in told and "0123456" not in told
    assert read_result(cell / "seed-1").status == "finished"
    assert len(read_history(study).commands) == 3


def test_study_that_cannot_take_records_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    study = tmp_path / "runs" / "other"
    study.mkdir(parents=True)
    (tmp_path / "runs" / "default").touch()
    (study / "study.jsonl").write_text("my own notes\n")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(log_module, "append_entries", refuse)
    for name, message in (
        ("default", "study=default"),
        ("other", "study.jsonl line 1"),
        ("denied", "study=..."),
    ):
        assert train(tmp_path, "norm=none", f"study={name}") == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in study.iterdir()] == ["study.jsonl"]


def test_history_that_cannot_be_written_costs_no_result(tmp_path: Path, monkeypatch):
    errors = [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")]

    def refuse(*_: object) -> None:
        raise errors.pop(0)

    (tmp_path / "s").mkdir()
    monkeypatch.setattr(log_module, "append_entries", refuse)
    keys = ("batch_size", "micro_batch_size", "norm_batch_size")
    place = {"runs_dir": str(tmp_path), "study": "s", "seed": 0, "replicas": 1}
    cfg = OmegaConf.create({**place, **dict.fromkeys(keys)})
    spec = CellSpec(cfg, {"norm": "batch"}, "norm=batch")
    log = StudyLog([spec], ["normexp-train"])
    log.record_outcomes(
        [(spec, Outcome("refused", "", error="permission is not needed to read a study"))]
    )
    with pytest.raises(OSError, match="No space"):
        log.record_outcomes([(spec, Outcome("refused", "", error="a full disk is told"))])


# --- How a command ends --------------------------------------------------------------------------

STOPPED, FINISHED = Outcome("stopped", "a"), Outcome("finished", "b")
FAILED = Outcome("failed", "b", error="no more")
FULL = Outcome("failed", "a", error="the disk is full", halts=True)
NO_GPU, SMALL = (Outcome("refused", "a", error=error) for error in ("no GPU", "too small"))


@pytest.mark.parametrize(
    ("outcomes", "fail_fast", "expected", "match"),
    [
        ([STOPPED, FAILED], False, KeyboardInterrupt, "before"),
        ([FAILED, STOPPED], False, KeyboardInterrupt, "before"),
        ([STOPPED, FAILED], True, 1, ""),
        ([STOPPED, FINISHED], True, KeyboardInterrupt, "before"),
        ([STOPPED, FULL], False, Halted, "^the disk is full$"),
        ([NO_GPU, NO_GPU], False, UserError, "^no GPU$"),  # of all cells: the command's
        ([NO_GPU, SMALL], False, 1, ""),
        ([NO_GPU, FINISHED], False, 1, ""),
    ],
)
def test_end_of_a_command_follows_from_its_cells(
    tmp_path: Path, monkeypatch, outcomes, fail_fast, expected, match
):
    place = {"runs_dir": str(tmp_path), "study": "s"}
    cfg = OmegaConf.create({"fail_fast": fail_fast, "dry_run": False, **place})
    specs = [CellSpec(cfg, {}, outcome.title) for outcome in outcomes]
    monkeypatch.setattr(runner, "train_cells", lambda *_: list(outcomes))
    words = ["normexp-train", "-m"]
    if isinstance(expected, int):
        assert runner.run_cells(specs, words) == expected
        return
    with pytest.raises(expected, match=match):
        runner.run_cells(specs, words)
    if expected is KeyboardInterrupt:
        (tmp_path / "s").mkdir()
        with pytest.raises(KeyboardInterrupt, match="continues"):
            runner.run_cells(specs, words)


SCRIPT = """
from normexp.train import main
raise SystemExit(main(["-m", "norm=none,group", "workers=2", "steps=1"]))
"""


def test_program_on_stdin_cannot_start_workers(tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    streams: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    ended = subprocess.run([sys.executable], input=SCRIPT, cwd=tmp_path, env=env, **streams)
    assert ended.returncode == 2
    assert "workers=2" in ended.stderr and "Traceback" not in ended.stderr
    assert not [*tmp_path.iterdir()]
