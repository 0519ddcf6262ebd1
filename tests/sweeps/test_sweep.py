"""A sweep in worker processes, with workers that import no torch: isolation, locks, stopping."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from normexp.config.spec import CellSpec, Outcome
from normexp.records.files import FileLock, is_held
from normexp.records.history import read_history
from normexp.records.paths import LOCK_FILE
from normexp.records.result import read_result
from normexp.sweeps.display import Display
from normexp.sweeps.log import StudyLog
from normexp.sweeps.machine import Place
from normexp.sweeps.messages import Begins, Ended, Ready, Stop
from normexp.sweeps.pool import Worker
from normexp.sweeps.sweep import Session, Sweep, WorkersFail
from normexp.sweeps.worker import STOPPED, Link, TaskReport, serve
from normexp.training.stopping import StopRequest


class FakeWorker(Worker):
    module = "fake_worker"


class FakeSweep(Sweep):
    new_worker = FakeWorker


def spec(root: Path, name: str, act: str = "finish", steps: int = 1) -> CellSpec:
    sizes = {"batch_size": 2, "micro_batch_size": None, "norm_batch_size": None, "lr": 0.1}
    own = {"name": name, "act": act, "steps": steps, "seed": 0, "replicas": 2}
    place = {"runs_dir": str(root), "study": "s"}
    choices = {"norm": name, "data": "none"}
    return CellSpec(OmegaConf.create({**sizes, **own, **place}), choices, f"norm={name}")


def sweep_of(cells: list[CellSpec], num_workers: int = 2, fail_fast: bool = False) -> FakeSweep:
    log = StudyLog(cells, ["normexp-train", "-m"])
    display = Display([cell.title for cell in cells], num_workers)
    return FakeSweep(cells, [Place(1)] * num_workers, log, display, fail_fast=fail_fast)


def statuses(outcomes: list[Outcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def test_outcomes_come_in_the_order_of_the_cells_from_warm_workers(tmp_path: Path):
    cells = [spec(tmp_path, name) for name in "abcdef"]
    outcomes = sweep_of(cells).run()
    assert [outcome.cell_id for outcome in outcomes] == [f"cell-{name}" for name in "abcdef"]
    assert 1 <= len({outcome.record["by"] for outcome in outcomes}) <= 2  # six cells, two workers
    assert len(read_history(tmp_path / "s").commands) == 1
    asked = read_history(tmp_path / "s").cells.values()
    assert [cell.cell_id for cell in asked] == [f"cell-{name}" for name in "abcdef"]


def test_killed_worker_is_a_failed_row_with_recorded_runs_and_the_others_go_on(tmp_path: Path):
    cells = [spec(tmp_path, "a", "die"), *(spec(tmp_path, name) for name in "bc")]
    outcomes = sweep_of(cells, num_workers=1).run()
    assert statuses(outcomes) == ["failed", "finished", "finished"]
    assert outcomes[0].error == "killed by signal 9, SIGKILL (out of memory?)"
    for seed in (0, 1):
        result = read_result(tmp_path / "s" / "cell-a" / f"seed-{seed}")
        assert (result.status, result.error, result.attempts) == ("failed", outcomes[0].error, 1)
    log = tmp_path / "s" / "cell-a" / "stacks" / "0-1" / "run.log"
    assert log.read_text() == f"last words\n{outcomes[0].error}\n"
    assert sweep_of(cells[:1], num_workers=1).run()[0].results[0].attempts == 2


def test_death_before_training_is_a_row_too_and_status_can_tell(tmp_path: Path):
    cells = [spec(tmp_path, "b"), spec(tmp_path, "a", "die before")]
    outcomes = sweep_of(cells, num_workers=1).run()
    assert statuses(outcomes) == ["finished", "failed"]
    _, lost = read_history(tmp_path / "s").cells.values()
    assert lost.error.startswith("failed: killed by signal 9")


def test_cell_that_does_not_compose_is_refused_without_a_worker(tmp_path: Path):
    bad = CellSpec(None, {}, "norm=bad", "norm=bad: no such norm")
    outcomes = sweep_of([bad, spec(tmp_path, "a")]).run()
    assert statuses(outcomes) == ["refused", "finished"]
    assert outcomes[0].error == "norm=bad: no such norm"


def test_fail_fast_stops_what_runs_and_begins_nothing(tmp_path: Path):
    cells = [spec(tmp_path, "a", steps=500), spec(tmp_path, "b", "die", steps=10)]
    cells += [spec(tmp_path, "c")]
    sweep = sweep_of(cells, fail_fast=True)
    outcomes = sweep.run()
    assert statuses(outcomes) == ["stopped", "failed", "stopped"]
    assert sweep.display.is_stopping  # no time is left
    assert outcomes[0].directory is not None  # was begun, and stopped itself
    assert outcomes[2].directory is None


def test_busy_cell_waits_behind_the_others_and_is_then_skipped(tmp_path: Path):
    held_dir = tmp_path / "s" / "cell-a"
    held_dir.mkdir(parents=True)
    lock = FileLock(held_dir / LOCK_FILE)
    assert lock.acquire()
    ended: list[str] = []

    class Watched(FakeSweep):
        def _end_cell(self, index: int, outcome: Outcome) -> None:
            super()._end_cell(index, outcome)
            ended.append(outcome.cell_id)
            if ended == ["cell-b"]:
                lock.release()

    cells = [spec(tmp_path, name) for name in "ab"]
    log, display = StudyLog(cells, ["normexp-train"]), Display(["a", "b"])
    outcomes = Watched(cells, [Place(1)], log, display, fail_fast=False).run()
    assert ended == ["cell-b", "cell-a"]
    assert statuses(outcomes) == ["finished", "finished"]


def test_interrupt_stops_each_worker_and_leaves_no_process(tmp_path: Path):
    cells = [spec(tmp_path, name, steps=1000) for name in "abc"]
    sweep = sweep_of(cells)

    workers: list[Worker] = []

    def interrupt() -> None:
        while not all(worker.begun for worker in sweep.pool.workers) or len(sweep.pool.workers) < 2:
            time.sleep(0.05)
        workers.extend(sweep.pool.workers)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcomes = sweep.run()
    thread.join()
    assert statuses(outcomes) == ["stopped"] * 3
    assert [worker.process.returncode for worker in workers] == [130, 130]
    assert not is_held(tmp_path / "s" / "cell-a" / LOCK_FILE)


def test_workers_that_do_not_come_up_end_the_sweep(tmp_path: Path):
    class Broken(FakeSweep):
        class new_worker(Worker):  # noqa: N801
            module = "no_such_module_of_a_test"

    cells = [spec(tmp_path, name) for name in "abc"]
    log, display = StudyLog(cells, ["normexp-train"]), Display(["a", "b", "c"])
    with pytest.raises(WorkersFail, match="no_such_module_of_a_test"):
        Broken(cells, [Place(1)], log, display, fail_fast=False).run()


PARENT = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_sweep import spec, sweep_of
sweep_of([spec(Path({root!r}), "a", steps=10_000)], num_workers=1).run()
"""


def test_worker_ends_by_itself_when_the_sweeps_process_is_killed(tmp_path: Path):
    script = PARENT.format(paths=sys.path, root=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    lock_file = tmp_path / "s" / "cell-a" / LOCK_FILE
    try:
        _wait_until(lambda: is_held(lock_file))
    finally:
        parent.kill()
        parent.wait()
    _wait_until(lambda: not is_held(lock_file))
    assert not lock_file.exists()  # it ended as after Ctrl-C and gave its lock back


def _wait_until(holds, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_task_that_its_worker_hands_back_goes_on_cell_by_cell(tmp_path: Path):
    cells = [spec(tmp_path, name) for name in "abc"]
    log, display = StudyLog(cells, ["normexp-train"]), Display(["a", "b", "c"])
    sweep = FakeSweep(cells, [Place(1)], log, display, fail_fast=False, tasks=[(0, 1, 2)])
    assert statuses(sweep.run()) == ["finished"] * 3


@pytest.mark.slow
def test_worker_that_dies_with_a_task_of_several_fails_only_the_cell_that_kills(tmp_path: Path):
    cells = [spec(tmp_path, "a", "die"), *(spec(tmp_path, name) for name in "bc")]
    log, display = StudyLog(cells, ["normexp-train"]), Display(["a", "b", "c"])
    sweep = FakeSweep(cells, [Place(1)], log, display, fail_fast=False, tasks=[(0, 1, 2)])
    assert statuses(sweep.run()) == ["failed", "finished", "finished"]
    assert read_result(tmp_path / "s" / "cell-a" / "seed-0").attempts == 1  # alone, not together


def test_next_sweep_of_a_session_takes_the_warm_workers(tmp_path: Path):
    taken = []
    with Session() as session:
        for name in "ab":
            cells = [spec(tmp_path, name), spec(tmp_path, f"{name}2")]
            log, display = session.log_of(cells, ["normexp-tune"], writes=True), Display(["", ""])
            warm = session.idle
            sweep = FakeSweep(cells, [Place(1)], log, display, fail_fast=False, warm=warm)
            taken += [outcome.record["by"] for outcome in sweep.run()]
        (worker,) = session.idle
        assert worker.is_alive
    assert len(set(taken)) == 1
    assert worker.process.returncode == 0
    assert len(read_history(tmp_path / "s").commands) == 1
    assert len(read_history(tmp_path / "s").cells) == 4


def test_stop_that_arrives_with_a_task_stops_its_training():
    ours, theirs = Pipe()
    link = Link(theirs)
    link.is_idle = True  # `serve` has the task, and has not said so yet
    ours.send(Stop())
    link.listen()
    given = (CellSpec(None, {}, "cell"),)

    def run(task: tuple[CellSpec, ...], report: TaskReport, stop: StopRequest) -> Ended:
        assert task == given
        assert not stop.requested
        report.on_begin(0, Outcome("running", "cell"))
        assert stop.requested
        return Ended([Outcome("stopped", "cell")], False)

    stopped, _ = link.tasks.get(), link.tasks.put(given)
    link.tasks.put(stopped)  # behind the task
    assert serve(link, run) == STOPPED
    assert [type(ours.recv()) for _ in range(3)] == [Ready, Begins, Ended]
