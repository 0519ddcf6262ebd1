"""A sweep in worker processes, with workers that import no torch: isolation, locks, stopping."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from fake_worker import run_task
from omegaconf import OmegaConf

from normexp.config.spec import CellSpec, Outcome
from normexp.errors import Halted
from normexp.records.files import file_lock, holder_of, is_held
from normexp.records.history import read_history
from normexp.records.paths import LOCK_FILE
from normexp.records.result import read_result
from normexp.sweeps.log import StudyLog
from normexp.sweeps.sweep import Sweep
from normexp.sweeps.tasks import OPEN, Task, TaskBoard, WorkerSlot
from normexp.sweeps.worker import Event, TaskEnded, TaskTaken, work
from normexp.training.stopping import StopRequest

KILLED = "killed by signal 9, SIGKILL (out of memory?)"


def spec(root: Path, name: str, act: str, steps: int = 1) -> CellSpec:
    own = {"name": name, "act": act, "steps": steps, "seed": 0, "replicas": 2}
    sizes = {"batch_size": 2, "micro_batch_size": None, "norm_batch_size": None}
    cfg = OmegaConf.create({**own, **sizes, "runs_dir": str(root), "study": "s"})
    return CellSpec(cfg, {"norm": name, "data": "none"}, f"norm={name}")


def sweep_of(root: Path, *acts: str, tasks: list[Task] | None = None, steps: int = 1) -> Sweep:
    """A sweep in one worker of the cells a, b and so on."""
    cells = [spec(root, name, act, steps) for name, act in zip("abcdef", acts, strict=False)]
    tasks = tasks or [(index,) for index in range(len(cells))]
    log = StudyLog(cells, ["normexp-train", "-m"])
    return Sweep(log, tasks, [WorkerSlot(1)] * 2, num_workers=1, run_task=run_task)


def statuses(outcomes: list[Outcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def test_outcomes_come_in_the_order_of_the_cells_from_workers_that_stay(tmp_path: Path):
    sweep = sweep_of(tmp_path, *["finish"] * 6)
    sweep.num_workers = 2
    outcomes = sweep.train()
    assert [outcome.cell_id for outcome in outcomes] == [f"cell-{name}" for name in "abcdef"]
    assert [[run.seed for run in outcome.results] for outcome in outcomes] == [[0, 1]] * 6
    assert 1 <= len({outcome.record["by"] for outcome in outcomes}) <= 2  # six cells, two workers
    history = read_history(tmp_path / "s")
    assert [command.command for command in history.commands] == [["normexp-train", "-m"]]
    assert [cell.cell_id for cell in history.cells.values()] == [f"cell-{n}" for n in "abcdef"]


def test_threads_of_one_process_train_in_turn(tmp_path: Path):
    at_work, counts = [], []

    def run_alone(specs: list[CellSpec], *_: object) -> list[Outcome]:
        at_work.append(specs)
        counts.append(len(at_work))
        time.sleep(0.05)
        at_work.pop()
        return [Outcome("finished", spec.title) for spec in specs]

    sweeps = [sweep_of(tmp_path / name, "finish", "finish") for name in "ab"]
    for sweep in sweeps:
        sweep.num_workers, sweep.run_task = 0, run_alone
    threads = [threading.Thread(target=sweep.train) for sweep in sweeps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 4


@pytest.mark.parametrize(("fail_fast", "last"), [(False, "finished"), (True, "stopped")])
def test_this_process_walks_the_same_list(tmp_path: Path, fail_fast: bool, last: str):
    sweep = sweep_of(tmp_path, "finish", "finish", "out of memory", "finish")
    cells = [CellSpec(None, {}, "norm=bad", "no such norm"), *sweep.cells]
    log = StudyLog(cells, ["normexp-train", "-m"])
    tasks = [(0,), (1, 2), (3,), (4,)]
    outcomes = Sweep(log, tasks, sweep.slots, fail_fast=fail_fast, run_task=run_task).train()
    assert statuses(outcomes) == ["refused", "finished", "finished", "failed", last]


@pytest.mark.parametrize(
    ("acts", "tasks", "expected", "num_workers"),
    [
        (["die once", "finish"], None, ["finished", "finished"], 2),
        (["die", "finish"], None, ["failed", "finished"], 4),  # memory may be short
        (["finish", "die before"], None, ["finished", "failed"], 2),
        (["out of memory", "finish"], None, ["failed", "finished"], 2),  # a fresh process
        (["finish", "finish"], [(0, 1)], ["finished", "finished"], 1),  # they do not stack
        (["die together once", "finish"], [(0, 1)], ["finished", "finished"], 2),
        (["die together", "finish"], [(0, 1)], ["finished", "finished"], 3),  # cell by cell
    ],
)
def test_what_happens_to_a_worker_costs_its_own_cell_at_most(
    tmp_path: Path, acts, tasks, expected, num_workers
):
    sweep = sweep_of(tmp_path, *acts, tasks=tasks)
    outcomes = sweep.train()
    assert statuses(outcomes) == expected
    assert sweep.num_started == num_workers
    # A task that one death had split would be other stacks.
    assert (outcomes[0].record.get("together") == 2) == ("die together once" in acts)


def test_death_is_an_attempt_with_the_last_words_and_two_are_a_failure(tmp_path: Path):
    (failed,) = sweep_of(tmp_path, "die").train()
    assert failed.error == KILLED
    attempts = read_history(tmp_path / "s").attempts
    told = [(each.error, each.died, each.checkpointed_at) for each in attempts]
    assert told == [(KILLED, True, 0)] * 2
    cell = tmp_path / "s" / "cell-a"
    assert (cell / "stacks/0-1/run.log").read_text() == f"last words\n{KILLED}\n" * 2
    assert read_result(cell / "seed-1").error == KILLED


def test_death_before_training_is_recorded_with_the_cell(tmp_path: Path):
    assert statuses(sweep_of(tmp_path, "finish", "die before").train()) == ["finished", "failed"]
    _, lost = read_history(tmp_path / "s").cells.values()
    assert lost.error.startswith("failed: killed by signal 9")


def test_fail_fast_stops_what_runs_and_begins_nothing(tmp_path: Path):
    sweep = sweep_of(tmp_path, "finish", "die before", "finish", steps=10_000)
    sweep.num_workers, sweep.fail_fast = 2, True
    outcomes = sweep.train()
    assert statuses(outcomes) == ["stopped", "failed", "stopped"]
    assert sweep.display.is_stopping  # no time is left
    assert outcomes[2].directory is None


# --- Claiming ------------------------------------------------------------------------------------


def test_busy_task_waits_behind_the_others_and_is_then_trained(tmp_path: Path):
    lock_file = tmp_path / "s" / "cell-a" / LOCK_FILE
    lock_file.parent.mkdir(parents=True)
    board = TaskBoard([(0,), (1,)], [OPEN, OPEN], [0, 0])
    heard: list[Event] = []
    with ExitStack() as held:
        assert held.enter_context(file_lock(lock_file))

        def report(event: Event) -> None:
            heard.append(event)
            if isinstance(event, TaskEnded) and event.task == (1,):
                held.close()

        cells = [spec(tmp_path, name, "finish") for name in "ab"]
        work(cells, board, WorkerSlot(1), report, StopRequest(), run_task=run_task)
    ended = [(each.task, each.outcomes[0].status) for each in heard if isinstance(each, TaskEnded)]
    assert ended == [((0,), "busy"), ((1,), "finished"), ((0,), "finished")]
    assert [event.task for event in heard if isinstance(event, TaskTaken)] == [(0,), (1,), (0,)]


def test_a_stop_that_foreign_code_swallows_still_counts(tmp_path: Path):
    board, events, stop = TaskBoard([(0,)], [OPEN], [0]), list[Event](), StopRequest()
    with suppress(KeyboardInterrupt):  # as the import of a library may
        stop.stop_at_once(signal.SIGTERM, None)
    cells = [spec(tmp_path, "a", "finish")]
    work(cells, board, WorkerSlot(1), events.append, stop, run_task=run_task)
    assert not events and board.num_open == 1


def test_worker_that_waits_for_a_slot_ends_when_nothing_is_left_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    slot, board = WorkerSlot(1, None, ["core-0"]), TaskBoard([(0,)], [OPEN], [0])
    events: list[Event] = []
    monkeypatch.setattr(time, "sleep", lambda _: board.end((0,)))  # as another worker does
    with slot.claim(), caplog.at_level("INFO"):
        cells = [spec(tmp_path, "a", "finish")]
        work(cells, board, slot, events.append, StopRequest(), run_task=run_task)
    assert not events
    assert "waiting" in caplog.text


# --- Stopping ------------------------------------------------------------------------------------


def wait_until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def interrupted(sweep: Sweep, then: Callable[[], None] = lambda: None) -> threading.Thread:
    """A thread that presses Ctrl-C once every worker trains."""

    def interrupt() -> None:
        wait_until(
            lambda: (
                len(sweep.workers) == sweep.num_workers
                and all(each.stack for each in sweep.workers)
            )
        )
        then()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_interrupt_stops_each_worker_and_leaves_no_process(tmp_path: Path):
    sweep = sweep_of(tmp_path, *["finish"] * 3, steps=10_000)
    sweep.num_workers = 2
    workers = []
    thread = interrupted(sweep, lambda: workers.extend(sweep.workers))
    assert statuses(sweep.train()) == ["stopped"] * 3
    thread.join()
    assert [worker.process.exitcode for worker in workers] == [0, 0]
    assert not is_held(tmp_path / "s" / "cell-a" / LOCK_FILE)


def test_second_interrupt_kills_the_workers(tmp_path: Path):
    sweep = sweep_of(tmp_path, "finish", steps=10_000)

    def first() -> None:
        os.kill(sweep.workers[0].process.pid or 0, signal.SIGSTOP)  # it will not stop by itself
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: sweep.stopping)

    thread = interrupted(sweep, first)
    with pytest.raises(KeyboardInterrupt):
        sweep.train()
    thread.join()
    assert sweep.workers[0].process.exitcode == -signal.SIGKILL


class Unpickled:
    """Ends a worker as it starts."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (3,)  # W&B replaces sys.exit


@pytest.mark.parametrize("at", ["start", "locks"])
def test_workers_that_die_without_a_task_end_the_sweep(tmp_path: Path, at: str):
    sweep = sweep_of(tmp_path, "finish", "finish", "finish")
    if at == "start":
        sweep.run_task = Unpickled()  # type: ignore[assignment]
    else:  # the folder of the locks cannot be written
        (tmp_path / "a_file").touch()
        sweep.slots = [WorkerSlot(1, None, [f"{tmp_path}/a_file/core-0"])]
    with pytest.raises(Halted, match="no worker process starts"):
        sweep.train()


PARENT = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_sweep import sweep_of
if __name__ == "__main__":
    sweep_of(Path({root!r}), "finish", steps=10_000).train()
"""


def test_worker_ends_by_itself_when_the_sweeps_process_is_killed(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(paths=sys.path, root=str(tmp_path)))
    parent = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    lock_file = tmp_path / "s" / "cell-a" / LOCK_FILE
    try:
        wait_until(lambda: is_held(lock_file) and holder_of(lock_file))
        status = Path(f"/proc/{holder_of(lock_file)}/status")
        if status.exists():  # Linux; Ctrl-C while the worker started was for its parent
            (masked,) = re.findall(r"^SigBlk:\s*(\w+)$", status.read_text(), re.MULTILINE)
            assert int(masked, 16) >> (signal.SIGINT - 1) & 1
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_held(lock_file))
    assert not lock_file.exists()  # it ended as after Ctrl-C and gave its lock back
