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
from normexp.train import main

QUICK = ["steps=4", "replicas=2", "workers=0", "save_weights=false"]

BROKEN_NORM = """
from torch import nn

class Broken(nn.Module):
    works = False
    has_begun = False  # what breaks before a training is refused
    def __init__(self, num_features):
        super().__init__()
    def forward(self, x):
        if Broken.has_begun and x.shape[0] == 32 and not Broken.works:
            raise RuntimeError("no more")
        return x
"""
BROKEN = ["norm=custom", "norm._target_=broken_norm_of_a_test.Broken", "batch_size=32"]


@pytest.fixture
def broken_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_norm_of_a_test.py").write_text(BROKEN_NORM)
    monkeypatch.syspath_prepend(str(tmp_path))
    trains = run.train_on_devices

    def train_broken(*arguments: Any) -> None:
        norm = sys.modules["broken_norm_of_a_test"].Broken
        norm.has_begun = True
        try:
            trains(*arguments)
        finally:
            norm.has_begun = False

    monkeypatch.setattr(run, "train_on_devices", train_broken)
    yield
    sys.modules.pop("broken_norm_of_a_test", None)


def train(tmp_path: Path, *words: str) -> int:
    return main([*words, *QUICK, f"runs_dir={tmp_path / 'runs'}"])


def only_run(tmp_path: Path) -> Path:
    (path,) = tmp_path.glob("runs/default/*/seed-0/result.json")
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("broken_norm")
def test_failed_runs_are_tried_again_up_to_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for attempt in (1, 2):
        assert train(tmp_path, *BROKEN, "max_attempts=2") == 1
        assert read_result(only_run(tmp_path)).attempts == attempt
    before = only_run(tmp_path).read_bytes()
    capsys.readouterr()
    assert train(tmp_path, *BROKEN, "max_attempts=2") == 1
    assert only_run(tmp_path).read_bytes() == before
    told = capsys.readouterr().err
    assert "RuntimeError: no more" in told and "max_attempts=3" in told
    assert train(tmp_path, *BROKEN, "max_attempts=9", "retry_failed=false") == 1
    assert only_run(tmp_path).read_bytes() == before
    assert "retry_failed=true" in capsys.readouterr().err
    sys.modules["broken_norm_of_a_test"].Broken.works = True
    assert train(tmp_path, *BROKEN, "max_attempts=3") == 0
    assert read_result(only_run(tmp_path)).status == "finished"


@pytest.mark.slow
@pytest.mark.usefixtures("broken_norm")
@pytest.mark.parametrize(("fail_fast", "num_trained"), [("true", 0), ("false", 1)])
def test_fail_fast_begins_nothing_after_a_failure(tmp_path: Path, fail_fast: str, num_trained: int):
    words = ["-m", *BROKEN[:2], "batch_size=32,16", f"fail_fast={fail_fast}"]
    assert train(tmp_path, *words) == 1
    results = [read_result(path) for path in tmp_path.glob("runs/default/*/seed-0")]
    assert [run.status for run in results].count("finished") == num_trained


def test_cell_that_does_not_compose_is_a_row_and_recorded_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(tmp_path, "-m", "norm=group,gruop") == 1
    captured = capsys.readouterr()
    assert "1 finished, 1 refused" in captured.out
    assert "[2/2] refused  norm=gruop" in captured.err
    asked = list(read_history(tmp_path / "runs" / "default").cells.values())
    titles = ["norm=group batch_size=32 steps=4", "norm=gruop steps=4"]
    assert [cell.title for cell in asked] == titles
    assert asked[0].cell_id.startswith("group-") and not asked[0].error
    assert asked[1].error.startswith("refused: norm=gruop: no such norm")


@pytest.mark.slow
def test_other_code_is_told_once_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    study = tmp_path / "runs" / "default"
    study.mkdir(parents=True)
    append_entries(study, [CommandEntry(["normexp-train"], "0123456789abcdef", {})])
    assert train(tmp_path, "norm=none") == 0
    assert capsys.readouterr().err.count("0123456") == 1
    assert train(tmp_path, "norm=none", "seed=7") == 0
    assert "0123456" not in capsys.readouterr().err
    assert len(read_history(study).commands) == 3


def test_cell_that_another_process_trains_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(tmp_path, "norm=none") == 0
    (cell,) = [path for path in (tmp_path / "runs" / "default").iterdir() if path.is_dir()]
    shutil.rmtree(cell / "seed-1")
    lock = ExitStack()
    assert lock.enter_context(file_lock(cell / LOCK_FILE))
    capsys.readouterr()

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
    assert f"waiting for process {os.getpid()}" in capsys.readouterr().err
    assert read_result(cell / "seed-1").status == "finished"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["workers=-1"], "workers=-1"),
        (["max_attempts=0"], "max_attempts=0"),
        (["-m", "norm=none,group", "workers=0,1"], "workers=0,1"),
    ],
)
def test_mistakes_in_how_to_run_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    assert main([*words, f"runs_dir={tmp_path / 'runs'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_study_that_cannot_take_records_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "default").touch()
    assert train(tmp_path, "norm=none") == 2
    assert "study=default" in capsys.readouterr().err
    study = tmp_path / "runs" / "other"
    study.mkdir()
    (study / "study.jsonl").write_text("my own notes\n")
    assert train(tmp_path, "norm=none", "study=other") == 2
    assert "study.jsonl line 1" in capsys.readouterr().err
    assert [path.name for path in study.iterdir()] == ["study.jsonl"]

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(log_module, "append_entries", refuse)
    assert train(tmp_path, "norm=none", "study=denied") == 2
    assert "study=..." in capsys.readouterr().err


def test_history_that_cannot_be_written_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    errors = [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")]

    def refuse(*_: object) -> None:
        raise errors.pop(0)

    (tmp_path / "s").mkdir()
    monkeypatch.setattr(log_module, "append_entries", refuse)
    cfg = OmegaConf.create({"runs_dir": str(tmp_path), "study": "s", "seed": 0, "replicas": 1})
    sizes = dict.fromkeys(("batch_size", "micro_batch_size", "norm_batch_size"))
    spec = CellSpec(OmegaConf.create({**cfg, **sizes}), {"norm": "batch"}, "norm=batch")
    log = StudyLog([spec], ["normexp-train"])
    log.settle([(spec, Outcome("refused", "", error="permission is not needed to read a study"))])
    with pytest.raises(OSError, match="No space"):
        log.settle([(spec, Outcome("refused", "", error="a full disk is told"))])


STOPPED, FAILED = Outcome("stopped", "a"), Outcome("failed", "b", error="no more")


def run_to(
    monkeypatch: pytest.MonkeyPatch,
    *outcomes: Outcome,
    fail_fast: bool = False,
    runs_dir: Path = Path("nowhere"),
) -> int:
    """A command whose cells come to these outcomes."""
    place = {"runs_dir": str(runs_dir), "study": "s"}
    cfg = OmegaConf.create({"fail_fast": fail_fast, "dry_run": False, **place})
    cells = [CellSpec(cfg, {}, outcome.title) for outcome in outcomes]
    monkeypatch.setattr(runner, "train_cells", lambda *_: list(outcomes))
    return runner.run_cells(cells, ["normexp-train", "-m"])


def test_stopped_command_ends_as_stopped_though_a_cell_failed(monkeypatch: pytest.MonkeyPatch):
    for outcomes in ([STOPPED, FAILED], [FAILED, STOPPED]):
        with pytest.raises(KeyboardInterrupt):
            run_to(monkeypatch, *outcomes)
    assert run_to(monkeypatch, STOPPED, FAILED, fail_fast=True) == 1
    with pytest.raises(KeyboardInterrupt):
        run_to(monkeypatch, STOPPED, Outcome("finished", "b"), fail_fast=True)


def test_command_that_was_stopped_before_it_began_has_nothing_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(KeyboardInterrupt, match="before"):
        run_to(monkeypatch, STOPPED, runs_dir=tmp_path)
    (tmp_path / "s").mkdir()
    with pytest.raises(KeyboardInterrupt, match="continues"):
        run_to(monkeypatch, STOPPED, runs_dir=tmp_path)


def test_full_disk_ends_a_command_with_one_line(monkeypatch: pytest.MonkeyPatch):
    full = Outcome("failed", "a", error="the disk is full", halts=True)
    with pytest.raises(Halted, match="^the disk is full$"):
        run_to(monkeypatch, STOPPED, full)


SCRIPT = """
from normexp.train import main
raise SystemExit(main(["-m", "norm=none,group", "workers=2", "steps=1"]))
"""


def test_program_on_stdin_cannot_start_workers(tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable],
        input=SCRIPT,
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "workers=2" in run.stderr and "Traceback" not in run.stderr
    assert not [*tmp_path.iterdir()]


def test_one_refusal_of_all_cells_is_the_commands(monkeypatch: pytest.MonkeyPatch):
    no_gpu, other = (Outcome("refused", "a", error=error) for error in ("no GPU", "too small"))
    with pytest.raises(UserError, match="^no GPU$"):
        run_to(monkeypatch, no_gpu, no_gpu)
    assert run_to(monkeypatch, no_gpu, other) == 1
    assert run_to(monkeypatch, no_gpu, Outcome("finished", "b")) == 1
