"""`python -m normexp.train` as typed: sweeps, refusals, workers, stops, other terminals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from normexp.cli import parse_command
from normexp.status import main as status
from normexp.train import main
from normexp.training.cells import run as run_module
from normexp.training.config.command import compose_cells
from normexp.training.records.journal import CommandEntry, Refusal, read_entries
from normexp.training.records.layout import ARCHIVED_RESULTS
from normexp.training.records.locks import file_lock
from normexp.training.records.result import Status, read_result
from normexp.training.records.stack_state import lock_of
from normexp.training.records.study import CellState, read_study
from normexp.training.sweeps import sweep as sweep_module
from normexp.training.sweeps.machine import WorkerSlot

QUICK = ["steps=2", "trainer=cpu", "save_weights=false", "study=s"]


def words_of(runs_dir: Path, *words: str) -> list[str]:
    return [*words, *QUICK, f"runs_dir={runs_dir}"]


def start(runs_dir: Path, *words: str) -> subprocess.Popen[str]:
    quick = [word for word in QUICK if word.partition("=")[0] not in "".join(words)]
    line = [*words, *quick, f"runs_dir={runs_dir}"]
    command = [sys.executable, "-m", "normexp.train", *line]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def wait_until(holds: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not holds():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def results_of(runs_dir: Path) -> dict[Path, tuple[int, int]]:
    """Each result.json; one that was written anew has another identity."""
    found = [(path, path.stat()) for path in sorted(runs_dir.glob("s/*/seed-*/result.json"))]
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in found}


def test_a_sweep_leaves_records_and_the_same_line_passes_over_it_without_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sweep = ["-m", "norm=batch,group", "norm_batch_size=2,8", "replicas=1"]
    assert main(words_of(tmp_path, *sweep, "workers=0")) == 0
    out = capsys.readouterr()
    assert "3 finished" in out.out and "[3/3 runs]" in out.err
    before = results_of(tmp_path)
    assert len(before) == 3 and not [*(tmp_path / "s" / "stacks").glob("*")]
    (entry,) = read_entries(tmp_path / "s")
    assert isinstance(entry, CommandEntry) and len(entry.cells) == 3
    code = "import sys; from normexp.train import main; print(main(sys.argv[1:])); "
    code += "print('torch' in sys.modules)"
    line = [sys.executable, "-c", code, *words_of(tmp_path, *sweep)]
    out2 = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert "3 skipped" in out2 and out2.endswith("0\nFalse\n")
    assert results_of(tmp_path) == before and len(read_entries(tmp_path / "s")) == 1


@pytest.mark.slow
def test_workers_train_what_one_process_trains(tmp_path: Path):
    for workers in (0, 2):
        words = ["-m", "norm=batch,group", "replicas=1", f"workers={workers}"]
        assert main(words_of(tmp_path / str(workers), *words)) == 0
    one, two = ([read_result(p) for p in results_of(tmp_path / name)] for name in "02")
    assert len(one) == 2 and [run.metrics for run in one] == [run.metrics for run in two]


def test_points_that_are_one_cell_are_a_row_with_all_their_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(words_of(tmp_path, "-m", "seed=0,1,2", "replicas=1", "workers=0")) == 0
    assert "n = 3 seeds" in capsys.readouterr().out
    assert main(words_of(tmp_path, "-m", "seed=0,1,2,3", "replicas=1", "dry_run=true")) == 0
    assert "1 run of 1 cell to do" in capsys.readouterr().out


def test_a_refused_cell_is_a_row_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sweep = ["-m", "norm=group", "norm.num_groups=3,4", "workers=0"]
    assert main(words_of(tmp_path, *sweep)) == 1
    out = capsys.readouterr().out
    assert "1 finished, 1 refused" in out and "num_groups=3" in out
    command, refusal = sorted(read_entries(tmp_path / "s"), key=lambda e: isinstance(e, Refusal))
    assert isinstance(command, CommandEntry) and isinstance(refusal, Refusal)
    assert refusal.command == command.id
    assert status(["study=s", f"runs_dir={tmp_path}"]) == 0
    assert "4 runs of 1 cell: 4 finished; 1 cell refused" in capsys.readouterr().out


def test_a_mistake_alone_is_a_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(words_of(tmp_path / "runs", "norm=group", "norm.num_groups=3", "workers=0")) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("normexp: ") and "num_groups" in err.splitlines()[-1]
    sweep = ["-m", "norm=group", "norm.num_groups=3", "lr=0.1,0.2", "workers=0"]
    assert main(words_of(tmp_path / "runs", *sweep)) == 2
    assert not (tmp_path / "runs" / "s").exists()


def test_beside_a_shipped_study_of_the_same_name_nothing_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with ZipFile(tmp_path / "s.zip", "w") as archive:
        archive.writestr(ARCHIVED_RESULTS, "")
    assert main(words_of(tmp_path)) == 2
    assert f"study=s ships as {tmp_path / 's.zip'}; train in " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["s.zip"]


def raises(*_: object) -> None:
    raise RuntimeError("broken")


def test_a_failed_run_is_tried_again_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = words_of(tmp_path, "norm=group", "replicas=1", "workers=0")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_fit", raises)
        assert main(words) == 1
    assert "failed: RuntimeError: broken" in capsys.readouterr().err
    (path,) = results_of(tmp_path)
    assert read_result(path).status is Status.FAILED
    assert main(words) == 0
    assert read_result(path).status is Status.FINISHED


def test_fail_fast_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_module, "_fit", raises)
    sweep = ["-m", "norm=batch,group,layer", "replicas=1", "workers=0", "fail_fast=true"]
    assert main(words_of(tmp_path, *sweep)) == 1
    assert len(results_of(tmp_path)) == 1


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_a_killed_command_stops_its_workers(tmp_path: Path):
    # Three seeds, cut into runs once torch is there: one trains in the command itself.
    command = start(tmp_path, "batch_size=128", "replicas=3", "steps=100000", "workers=3")

    def states() -> list[CellState]:
        return list(read_study(tmp_path / "s").cells.values())

    def workers() -> list[int]:
        text = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in text.split()}
        return [pid for pid, line in lines.items() if "spawn_main" in line]

    wait_until(lambda: len([*tmp_path.glob("s/stacks/*/progress.json")]) == 3, command)
    first, _ = workers()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(set(workers()) - {first}) == 2, command)
    command.kill()
    assert "a worker was lost, with code -9 (out of memory?)" in command.communicate()[0]
    while any(stack.holder for state in states() for stack in state.stacks):
        time.sleep(0.1)
    ends = {end for state in states() for end in state.states.values()}
    assert Status.INTERRUPTED in ends and Status.RUNNING not in ends


def test_ctrl_c_saves_and_says_what_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def press() -> None:
        while not [*tmp_path.glob("s/stacks/*/progress.json")]:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    words = ["norm=group", "steps=100000", "workers=0", "trainer=cpu", "study=s"]
    assert main([*words, f"runs_dir={tmp_path}"]) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert [*tmp_path.glob("s/stacks/*/last.ckpt")]


def test_a_command_trains_beside_others_and_says_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (path,) = WorkerSlot().paths()
    with file_lock(path.with_name("cpu-1")):
        path.with_name("cpu-1").write_text("process 1 (train norm=group)")
        assert main(words_of(tmp_path, "norm=group", "replicas=1", "workers=0")) == 0
    assert "sharing this machine with 1 other training" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_that_another_command_trains_are_waited_for_and_named(tmp_path: Path):
    (cell,) = compose_cells(parse_command(words_of(tmp_path, "norm=group", "replicas=2")))
    cell.directory.mkdir(parents=True)
    with file_lock(lock_of(cell.directory, 1)):
        command = start(tmp_path, "norm=group", "replicas=2")
        assert command.stdout is not None
        line = command.stdout.readline()
        assert "waiting for what others train" in line and f"process {os.getpid()} (" in line
    assert "n = 2 seeds" in command.communicate()[0]
    assert command.returncode == 0


@pytest.mark.slow
def test_two_commands_at_once_train_each_run_once(tmp_path: Path):
    sweep = ["-m", "norm=batch,group,layer,instance", "replicas=2"]
    both = [start(tmp_path, *sweep, f"workers={count}") for count in (0, 2)]
    texts = [command.communicate()[0] for command in both]
    assert [command.returncode for command in both] == [0, 0], texts
    assert len(results_of(tmp_path)) == 8
    assert not [*tmp_path.rglob(".lock")] and not [*(tmp_path / "s" / "stacks").glob("*")]


def test_a_launcher_that_starts_no_job_says_why(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("submitit")
    monkeypatch.setattr(sweep_module, "launch_workers", lambda *_: "there is no srun")
    assert main(words_of(tmp_path, "hydra/launcher=submitit_slurm")) == 1
    said = capsys.readouterr().err
    assert said.endswith("normexp: hydra/launcher=submitit_slurm stopped: there is no srun\n")
    assert "continues" not in said


@pytest.mark.slow
def test_a_launcher_starts_workers_of_the_command(tmp_path: Path):
    sweep = ["-m", "norm=batch,group", "hydra/launcher=basic", "workers=2"]
    assert main(words_of(tmp_path, *sweep)) == 0
    assert len(results_of(tmp_path)) == 8
    (entry,) = read_entries(tmp_path / "s")
    assert isinstance(entry, CommandEntry)


def test_status_says_what_is_missing_and_what_finishes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(words_of(tmp_path, "norm=group", "replicas=2", "workers=0")) == 0
    (path, _) = results_of(tmp_path)
    path.unlink()
    capsys.readouterr()
    assert status(["study=s", f"runs_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "2 runs of 1 cell: 1 finished, 1 not started" in out
    assert "  python -m normexp.train norm=group replicas=2 workers=0" in out
    assert f"study=s runs_dir={tmp_path}" in out


def test_a_refusal_leaves_no_folder_that_its_command_has_made(tmp_path: Path):
    runs_dir = tmp_path / "new"
    assert main(words_of(runs_dir, "data.limit_train=2", "workers=0")) == 2
    assert not runs_dir.exists()
    runs_dir.mkdir()
    assert main(words_of(runs_dir, "data.limit_train=2", "workers=0")) == 2
    assert [*runs_dir.iterdir()] == []


def test_dry_run_writes_nothing_and_counts_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sweep = ["-m", "norm=batch,group", "replicas=3"]
    assert main(words_of(tmp_path, *sweep, "dry_run=true")) == 0
    assert "6 runs of 2 cells to do: about" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(words_of(tmp_path, *sweep, "workers=0")) == 0
    capsys.readouterr()
    assert main(words_of(tmp_path, "-m", "norm=batch,group", "replicas=4", "dry_run=true")) == 0
    assert "2 runs of 2 cells to do" in capsys.readouterr().out
