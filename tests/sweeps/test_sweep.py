"""A sweep in worker processes, with workers that import no torch: isolation, locks, stopping."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_worker import run_task
from omegaconf import OmegaConf

from normexp.config.spec import CellSpec, Outcome
from normexp.errors import Halted
from normexp.records.files import FileLock, is_held
from normexp.records.history import read_history
from normexp.records.paths import LOCK_FILE
from normexp.records.result import read_result
from normexp.sweeps.display import Display
from normexp.sweeps.log import StudyLog
from normexp.sweeps.machine import Place
from normexp.sweeps.sweep import Sweep
from normexp.sweeps.tasks import OPEN, Board
from normexp.sweeps.worker import Ended, Event, Took, work
from normexp.training.stopping import StopRequest

KILLED = "killed by signal 9, SIGKILL (out of memory?)"


def spec(root: Path, name: str, act: str = "finish", steps: int = 1) -> CellSpec:
    sizes = {"batch_size": 2, "micro_batch_size": None, "norm_batch_size": None, "lr": 0.1}
    own = {"name": name, "act": act, "steps": steps, "seed": 0, "replicas": 2}
    place = {"runs_dir": str(root), "study": "s"}
    choices = {"norm": name, "data": "none"}
    return CellSpec(OmegaConf.create({**sizes, **own, **place}), choices, f"norm={name}")


def sweep_of(
    cells: list[CellSpec],
    num_workers: int = 2,
    fail_fast: bool = False,
    tasks: list[tuple[int, ...]] | None = None,
) -> Sweep:
    log = StudyLog(cells, ["normexp-train", "-m"])
    display = Display([cell.title for cell in cells], num_workers)
    tasks = tasks or [(index,) for index in range(len(cells))]
    places = [Place(1)] * num_workers
    return Sweep(cells, places, tasks, log, display, num_workers, fail_fast, run_task=run_task)


def statuses(outcomes: list[Outcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def test_outcomes_come_in_the_order_of_the_cells_from_workers_that_stay(tmp_path: Path):
    cells = [spec(tmp_path, name) for name in "abcdef"]
    outcomes = sweep_of(cells).run_workers()
    assert [outcome.cell_id for outcome in outcomes] == [f"cell-{name}" for name in "abcdef"]
    assert [[run.seed for run in outcome.results] for outcome in outcomes] == [[0, 1]] * 6
    assert 1 <= len({outcome.record["by"] for outcome in outcomes}) <= 2  # six cells, two workers
    assert len(read_history(tmp_path / "s").commands) == 1
    asked = read_history(tmp_path / "s").cells.values()
    assert [cell.cell_id for cell in asked] == [f"cell-{name}" for name in "abcdef"]


def test_this_process_walks_the_same_list(tmp_path: Path):
    cells = [CellSpec(None, {}, "norm=bad", "no such norm"), spec(tmp_path, "a", "out of memory")]
    cells += [spec(tmp_path, name) for name in "bc"]
    outcomes = sweep_of(cells, tasks=[(0,), (1,), (2, 3)]).run_here()
    assert statuses(outcomes) == ["refused", "failed", "finished", "finished"]


def test_stack_whose_worker_died_goes_on_in_another(tmp_path: Path):
    cells = [spec(tmp_path, "a", "die once"), *(spec(tmp_path, name) for name in "bc")]
    outcomes = sweep_of(cells, num_workers=1).run_workers()
    assert statuses(outcomes) == ["finished"] * 3
    (attempt,) = read_history(tmp_path / "s").attempts
    assert (attempt.error, attempt.died, attempt.checkpointed_at) == (KILLED, True, 0)
    log = tmp_path / "s" / "cell-a" / "stacks" / "0-1" / "run.log"
    assert log.read_text() == f"last words\n{KILLED}\n"


def test_deaths_are_counted_and_the_others_go_on(tmp_path: Path):
    cells = [spec(tmp_path, "a", "die"), *(spec(tmp_path, name) for name in "bc")]
    outcomes = sweep_of(cells, num_workers=1).run_workers()
    assert statuses(outcomes) == ["failed", "finished", "finished"]
    assert outcomes[0].error == KILLED
    assert len(read_history(tmp_path / "s").attempts) == 2
    assert read_result(tmp_path / "s" / "cell-a" / "seed-1").error == KILLED


def test_death_before_training_is_a_row_too_and_status_can_tell(tmp_path: Path):
    cells = [spec(tmp_path, "b"), spec(tmp_path, "a", "die before")]
    outcomes = sweep_of(cells, num_workers=1).run_workers()
    assert statuses(outcomes) == ["finished", "failed"]
    _, lost = read_history(tmp_path / "s").cells.values()
    assert lost.error.startswith("failed: killed by signal 9")


def test_one_death_before_training_changes_no_task(tmp_path: Path):
    """One worker is killed while it prepares; a task that was split would be other stacks."""
    cells = [spec(tmp_path, name, "die together once") for name in "ab"]
    outcomes = sweep_of(cells, num_workers=1, tasks=[(0, 1)]).run_workers()
    assert statuses(outcomes) == ["finished", "finished"]
    assert [outcome.record["together"] for outcome in outcomes] == [2, 2]


def test_fail_fast_stops_what_runs_and_begins_nothing(tmp_path: Path):
    cells = [spec(tmp_path, "a", steps=500), spec(tmp_path, "b", "die before", steps=10)]
    cells += [spec(tmp_path, "c")]
    sweep = sweep_of(cells, fail_fast=True)
    outcomes = sweep.run_workers()
    assert statuses(outcomes) == ["stopped", "failed", "stopped"]
    assert sweep.display.is_stopping  # no time is left
    assert outcomes[2].directory is None


def test_worker_with_too_little_memory_takes_no_other_task(tmp_path: Path):
    cells = [spec(tmp_path, "a", "out of memory"), spec(tmp_path, "b")]
    sweep = sweep_of(cells, num_workers=1)
    outcomes = sweep.run_workers()
    assert statuses(outcomes) == ["failed", "finished"]
    assert next(sweep._numbers) == 3  # two workers were started


def test_busy_task_waits_behind_the_others_and_is_then_trained(tmp_path: Path):
    held_dir = tmp_path / "s" / "cell-a"
    held_dir.mkdir(parents=True)
    lock = FileLock(held_dir / LOCK_FILE)
    assert lock.acquire()
    cells = [spec(tmp_path, name) for name in "ab"]
    board = Board([(0,), (1,)], [OPEN, OPEN], [0, 0])
    heard: list[Event] = []

    def report(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Ended) and event.task == (1,):
            lock.release()

    work(cells, board, Place(1), report, StopRequest(), run_task=run_task)
    ended = [(each.task, each.outcomes[0].status) for each in heard if isinstance(each, Ended)]
    assert ended == [((0,), "busy"), ((1,), "finished"), ((0,), "finished")]
    assert [event.task for event in heard if isinstance(event, Took)] == [(0,), (1,), (0,)]


def test_worker_that_waits_for_a_slot_ends_when_nothing_is_left_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place, board = Place(1, None, ["core-0"]), Board([(0,)], [OPEN], [0])
    events: list[Event] = []

    def act(_: float) -> None:
        board.end((0,))  # as another worker of the command does

    monkeypatch.setattr(time, "sleep", act)
    with place.slot(), caplog.at_level("INFO"):
        cells = [spec(tmp_path, "a")]
        work(cells, board, place, events.append, StopRequest(), run_task=run_task)
    assert not events
    assert "waiting" in caplog.text


def test_interrupt_stops_each_worker_and_leaves_no_process(tmp_path: Path):
    cells = [spec(tmp_path, name, steps=1000) for name in "abc"]
    sweep = sweep_of(cells)
    workers = []

    def interrupt() -> None:
        while len(sweep.workers) < 2 or not all(worker.stack for worker in sweep.workers):
            time.sleep(0.05)
        workers.extend(sweep.workers)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcomes = sweep.run_workers()
    thread.join()
    assert statuses(outcomes) == ["stopped"] * 3
    assert [worker.process.exitcode for worker in workers] == [0, 0]
    assert not is_held(tmp_path / "s" / "cell-a" / LOCK_FILE)


def test_second_interrupt_kills_the_workers(tmp_path: Path):
    cells = [spec(tmp_path, "a", steps=10_000)]
    sweep = sweep_of(cells, num_workers=1)

    def interrupt() -> None:
        while not sweep.workers or sweep.workers[0].stack is None:
            time.sleep(0.05)
        os.kill(sweep.workers[0].process.pid or 0, signal.SIGSTOP)  # it will not stop by itself
        os.kill(os.getpid(), signal.SIGINT)
        while not sweep.stopping:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sweep.run_workers()
    thread.join()
    assert sweep.workers[0].process.exitcode == -signal.SIGKILL


class Unpickled:
    """Ends a worker as it starts."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (3,)  # W&B replaces sys.exit


def test_workers_that_do_not_come_up_end_the_sweep(tmp_path: Path):
    sweep = sweep_of([spec(tmp_path, name) for name in "abc"])
    sweep.run_task = Unpickled()  # type: ignore[assignment]
    with pytest.raises(Halted, match="no worker process starts"):
        sweep.run_workers()


PARENT = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_sweep import spec, sweep_of
if __name__ == "__main__":
    sweep_of([spec(Path({root!r}), "a", steps=10_000)], num_workers=1).run_workers()
"""


def test_worker_ends_by_itself_when_the_sweeps_process_is_killed(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(paths=sys.path, root=str(tmp_path)))
    parent = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
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


@pytest.mark.parametrize("act", ["finish", "die together"])
def test_task_that_does_not_stack_goes_on_cell_by_cell(tmp_path: Path, act: str):
    cells = [spec(tmp_path, "a", act), *(spec(tmp_path, name) for name in "bc")]
    outcomes = sweep_of(cells, num_workers=1, tasks=[(0, 1, 2)]).run_workers()
    assert statuses(outcomes) == ["finished"] * 3


def test_workers_that_die_without_a_task_end_the_sweep(tmp_path: Path):
    """As where the folder of the slots cannot be written."""
    blocked = tmp_path / "a_file"
    blocked.write_text("")
    sweep = sweep_of([spec(tmp_path, name) for name in "ab"], num_workers=1)
    sweep.places = [Place(1, None, [f"{blocked}/core-0"])]
    with pytest.raises(Halted, match="no worker process starts"):
        sweep.run_workers()
