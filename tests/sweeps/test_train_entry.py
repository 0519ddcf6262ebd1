"""`python -m normexp.train` as a user runs it: records, the same line again, ends, mistakes."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import QUICK, cells, files, train

import normexp
from normexp.cells import run
from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.outcome import Outcome
from normexp.config.spec import CellSpec
from normexp.errors import Halted, UserError
from normexp.records.files import file_lock
from normexp.records.history import CommandEntry, append_entries, read_history
from normexp.records.metrics import read_metrics
from normexp.records.paths import LOCK_FILE
from normexp.records.result import Status, read_result
from normexp.sweeps import log as log_module
from normexp.sweeps import machine
from normexp.sweeps import sweep as runner
from normexp.sweeps.log import StudyLog
from normexp.train import main


def test_a_run_leaves_what_the_design_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "norm=group") == 0
    (cell,) = cells(tmp_path)
    assert cell.name.startswith("group-convnet-digits-b32-lr0.1-")
    assert {p.name for p in cell.iterdir()} == {"config.yaml", "seed-0", "seed-1", "stacks"}
    for seed in (0, 1):
        run = {p.name for p in (cell / f"seed-{seed}").iterdir()}
        assert {"result.json", "metrics.csv", "weights.pt"} <= run
    assert [p.name for p in (cell / "stacks" / "0-1").iterdir()] == ["run.log"]
    result = read_result(cell / "seed-1")
    assert result.status == "finished"
    assert result.config["norm"] == "group"
    assert result.config["num_steps"] == 12
    assert result.config["recipe"]["norm"]["num_groups"] == 8  # also what is as by default
    assert {"val/loss", "val/accuracy", "test/loss", "test/accuracy"} == set(result.metrics)
    weights = torch.load(cell / "seed-1" / "weights.pt", weights_only=True)
    assert result.num_parameters == sum(tensor.numel() for tensor in weights.values())
    out = capsys.readouterr().out
    assert str(cell) in out.replace("\n", "")
    assert "n = 2 seeds" in out and "next:" in out

    rows = [read_metrics(cell / f"seed-{seed}" / "metrics.csv") for seed in (0, 1)]
    assert [row.step for row in rows[1] if row.name == "train/loss"] == [5, 10]
    assert {row.name: row.value for row in rows[1]}["val/loss"] == result.metrics["val/loss"]
    assert rows[0] != rows[1]

    before = files(cell)
    assert train(tmp_path, "norm=group") == 0  # the same line again
    assert files(cell) == before


def test_norm_batch_sizes_are_one_cell_for_a_norm_that_does_not_mix_samples(tmp_path: Path, capsys):
    assert train(tmp_path, "-m", "norm=group,batch", "norm_batch_size=2,8,5") == 1
    names = [cell.name for cell in cells(tmp_path)]
    assert len([name for name in names if name.startswith("group-")]) == 1
    assert len([name for name in names if name.startswith("batch-")]) == 2
    said = capsys.readouterr().err
    assert "norm_batch_size=5 does not divide" in said  # the others went on
    assert set(re.findall(r"\[\d+/(.*?) runs]", said)) == {"6"}  # from the first line


def test_a_dry_run_lists_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train(tmp_path, "-m", "norm=batch,group", "dry_run=true") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:3]]
    assert [row[:2] for row in rows] == [["norm=batch", "2"], ["norm=group", "2"]]
    assert all(row[-1] == "MiB" for row in rows)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_added_seeds_are_warned_of_with_the_words_to_type_instead(tmp_path: Path, capsys):
    """By a dry run too, in place of the smallest difference; of a size without effect as well."""
    words = ["-m", "norm=layer,group", "steps=2", "norm_batch_size=2", "study=mine", "workers=0"]
    words += [f"runs_dir={tmp_path}", f"data_dir={tmp_path / 'data'}", "save_weights=false"]
    warning = "train a new study: study=mine-2 seed=2 replicas=3"
    assert main([*words, "replicas=2"]) == main([*words, "replicas=2"]) == 0
    assert "new study" not in capsys.readouterr().err
    assert main([*words, "replicas=3"]) == 0
    assert warning in capsys.readouterr().err.splitlines()[0]
    [comparison] = normexp.load_report("mine", runs_dir=tmp_path).comparisons
    assert comparison.is_extended


COUNTS_THREADS = """
import torch
from pathlib import Path

class CountsThreads(torch.nn.Identity):
    def __init__(self, num_features):
        super().__init__()

    def forward(self, x):
        with Path(__file__).with_name("threads").open("a") as file:
            file.write(f"{torch.get_num_threads()} {len(x)}\\n")
        return x
"""


@pytest.mark.slow
def test_a_dry_run_times_a_step_on_the_threads_of_a_worker(
    tmp_path: Path, own_module: Callable[[str, str], Path], monkeypatch
):
    """On more threads than there are free cores, a step takes a hundred times as long."""
    path = own_module("counts_threads", COUNTS_THREADS)
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    before = torch.get_num_threads()
    words = ["norm=counts_threads.CountsThreads", "batch_size=256", "dry_run=true"]
    words += ["-m", "lr=0.1,0.2", "workers=2", f"runs_dir={tmp_path}"]
    try:
        torch.set_num_threads(3)
        assert main(words) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    lines = path.with_name("threads").read_text().splitlines()
    threads = {line.split()[0] for line in lines if line.endswith(" 256")}
    assert threads == {"1", "2"}  # probes take one


CTRL_C = """
import os, signal
from pytorch_lightning import Callback

class CtrlC(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 4 and os.environ.pop("INTERRUPTED", ""):
            os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_leaves_a_checkpoint_that_the_same_line_finishes(
    tmp_path: Path, own_module: Callable[[str, str], Path], monkeypatch, capsys
):
    """The interrupted and resumed study equals an undisturbed one, byte for byte."""
    own_module("presses_ctrl_c", CTRL_C)
    words = ["norm=batch", "callback=custom", "callback._target_=presses_ctrl_c.CtrlC"]
    assert train(tmp_path / "whole", *words) == 0
    monkeypatch.setenv("INTERRUPTED", "once")
    capsys.readouterr()
    assert train(tmp_path / "cut", *words) == 130
    err = capsys.readouterr().err
    assert err.count("stopped") == err.count("normexp: stopped; ") == 1
    (cut,), (whole,) = (cells(tmp_path / name) for name in ("cut", "whole"))
    assert (cut / "stacks" / "0-1" / "last.ckpt").exists()
    assert train(tmp_path / "cut", *words) == 0
    assert not (cut / "stacks" / "0-1" / "last.ckpt").exists()
    for seed in ("seed-0", "seed-1"):
        rows = [(cell / seed / "metrics.csv").read_bytes() for cell in (cut, whole)]
        metrics = [read_result(cell / seed).metrics for cell in (cut, whole)]
        assert rows[0] == rows[1] and metrics[0] == metrics[1]


# --- the same command again ----------------------------------------------------------------------


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
    assert train(tmp_path, "-m", "norm=group,none", "norm.num_groups=4") == 1
    captured = capsys.readouterr()
    assert "1 finished, 1 refused" in captured.out
    assert " runs] refused  norm=none" in captured.err
    history = read_history(tmp_path / "runs" / "default")
    (command,), (bad,) = history.commands, history.ends
    (good, _), *_ = (points[0] for points in command.cells.values())
    assert good.startswith("norm=group") and bad.title.startswith("norm=none")
    assert bad.status == "refused" and bad.error.startswith("norm.num_groups: unknown key")


def test_a_mistyped_name_in_a_list_stops_the_command_before_it_trains(tmp_path: Path, capsys):
    assert train(tmp_path, "-m", "norm=group,gruop") == 2
    assert "norm=gruop: no such norm; did you mean group" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_cell_that_another_process_trains_is_waited_for_and_other_code_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    study = tmp_path / "runs" / "default"
    study.mkdir(parents=True)
    append_entries(study, [CommandEntry("c", ["normexp-train"], "0123456789abcdef", 3, {})])
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

    in_vain = threading.Timer(300.0, lock.close)
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

    cells = compose_cells(parse_command(["norm=none", f"runs_dir={tmp_path}", "study=s"]))
    (tmp_path / "s").mkdir()
    monkeypatch.setattr(log_module, "append_entries", refuse)
    log = StudyLog(cells, ["normexp-train"])
    log.end(cells[0], Status.REFUSED, "permission is not needed to read a study")
    assert log.end_of(cells[0])  # which this process does not try again
    with pytest.raises(OSError, match="No space"):
        log.end(cells[0], Status.REFUSED, "a full disk is told")


# --- How a command ends --------------------------------------------------------------------------

STOPPED, FINISHED = Outcome(Status.STOPPED, "a"), Outcome(Status.FINISHED, "b")
FAILED = Outcome(Status.FAILED, "b", error="no more")
FULL = Outcome(Status.FAILED, "a", error="the disk is full", halts=True)
NO_GPU, SMALL = (Outcome(Status.REFUSED, "a", error=error) for error in ("no GPU", "too small"))


@pytest.mark.parametrize(
    ("outcomes", "fail_fast", "expected", "match"),
    [
        ([STOPPED, FAILED], False, KeyboardInterrupt, "before"),
        ([FAILED, STOPPED], False, KeyboardInterrupt, "before"),
        ([STOPPED, FAILED], True, 1, ""),
        ([STOPPED, FINISHED], True, KeyboardInterrupt, "before"),
        ([STOPPED, FULL], False, Halted, "^the disk is full$"),
        ([NO_GPU, NO_GPU], False, UserError, "^no GPU$"),  # of all cells: the command's
        ([NO_GPU, SMALL], False, 2, ""),
        ([NO_GPU, FINISHED], False, 1, ""),
    ],
)
def test_end_of_a_command_follows_from_its_cells(
    tmp_path: Path, monkeypatch, outcomes, fail_fast, expected, match
):
    place = {"runs_dir": str(tmp_path), "study": "s"}
    config = {"fail_fast": fail_fast, "dry_run": False, **place}
    specs = [CellSpec(config, {}, outcome.title) for outcome in outcomes]
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


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("norm=batch batch_size=2000", "batch_size=2000 is more than the 1294"),  # as it is built
        ("norm=batch norm.half_life=100", "are both set"),
        ("workers=-1", "workers=-1"),
        ("max_attempts=0", "max_attempts=0"),
        ("-m norm=none,group workers=0,1", "workers=0,1"),
        ("runs_dir={blocked}/runs", "runs_dir"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, capsys, line: str, part: str):
    (tmp_path / "a_file").touch()
    words = line.format(blocked=tmp_path / "a_file").split()
    given = {word.partition("=")[0] for word in words}
    others = [*QUICK, f"runs_dir={tmp_path / 'runs'}"]
    assert main([*words, *(word for word in others if word.partition("=")[0] not in given)]) == 2
    err = capsys.readouterr().err
    (told,) = [text for text in err.splitlines() if text.startswith("normexp: ")]
    assert part in told
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
