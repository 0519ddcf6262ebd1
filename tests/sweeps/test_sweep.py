"""A sweep in worker processes: isolation, locks, stopping. A callback says what each cell does."""

from __future__ import annotations

import multiprocessing
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

from normexp.cli import parse_command
from normexp.config.grid import compose_cells
from normexp.config.outcome import Outcome
from normexp.errors import Halted
from normexp.records.files import file_lock, holder_of, is_held
from normexp.records.history import read_history
from normexp.records.paths import LOCK_FILE
from normexp.records.result import read_result
from normexp.sweeps import worker_process
from normexp.sweeps.log import StudyLog
from normexp.sweeps.machine import WorkerSlot
from normexp.sweeps.sweep import Sweep
from normexp.sweeps.walk import Walk
from normexp.sweeps.worker import Event, StackEnded, StackTaken, WorkerWaits, work
from normexp.training.stopping import StopRequest

KILLED = "killed by signal 9, SIGKILL (out of memory?)"
ACTS = """
import os, signal, sys, time
from pathlib import Path
from pytorch_lightning import Callback

HERE = Path(__file__).parent

class Act(Callback):
    def __init__(self, act):
        self.act = act
        if act == "die_before":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer, module):
        if self.act == "out_of_memory":
            raise RuntimeError("not enough memory")
        if self.act == "die_once" and not (HERE / "died").exists() or self.act == "die":
            (HERE / "died").touch()
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.act.startswith("alone"):
            (HERE / "at_work").touch(exist_ok=False)
            time.sleep(0.05)
            (HERE / "at_work").unlink()

    def on_train_batch_end(self, *_):
        if self.act.startswith("wait"):
            time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _acts(own_module: Callable[[str, str], Path]) -> None:
    own_module("acts_of_a_test", ACTS)


@pytest.fixture(autouse=True)
def _quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks workers from a process that has imported torch, instead of starting new ones."""
    multiprocessing.set_forkserver_preload(["normexp.cells.run"])
    monkeypatch.setattr(worker_process, "SPAWN", multiprocessing.get_context("forkserver"))


def words_of(root: Path, *acts: str) -> list[str]:
    """The command line of a cell for each act."""
    steps = 2000 if any(act.startswith("wait") for act in acts) else 2
    own = ["callback=custom", "callback._target_=acts_of_a_test.Act"]
    own += [f"callback.act={','.join(acts)}", f"steps={steps}", "log_every=10000"]
    place = ["replicas=2", "save_weights=false", f"runs_dir={root}", "study=s", "trainer=cpu"]
    return ["-m", "norm=none", *own, *place]


def sweep_of(root: Path, *acts: str, workers: int = 1, fail_fast: bool = False) -> Sweep:
    words = words_of(root, *acts)
    log = StudyLog(compose_cells(parse_command(words)), ["normexp-train", *words])
    return Sweep(log, [WorkerSlot(1)] * 2, workers, fail_fast)


def statuses(outcomes: list[Outcome]) -> list[str]:
    return [str(outcome.status) for outcome in outcomes]


@pytest.mark.parametrize("workers", [0, 2])
def test_outcomes_come_in_the_order_of_the_cells_and_the_command_is_recorded_once(
    tmp_path: Path, workers: int
):
    names = [f"finish{number}" for number in range(4)]
    sweep = sweep_of(tmp_path, *names, workers=workers)
    outcomes = sweep.train()
    ids = [cell.id for cell in sweep.cells]
    assert [outcome.cell_id for outcome in outcomes] == ids and len(set(ids)) == 4
    assert [[run.seed for run in outcome.results] for outcome in outcomes] == [[0, 1]] * 4
    assert sweep.num_started == workers
    (command,) = read_history(tmp_path / "s").commands
    assert [*command.cells] == ids
    again = sweep_of(tmp_path, *names, workers=workers)
    assert statuses(again.train()) == ["skipped"] * 4 and again.num_started == 0
    assert len(read_history(tmp_path / "s").commands) == 1


def test_threads_of_one_process_train_in_turn(tmp_path: Path):
    sweeps = [sweep_of(tmp_path, f"alone{name}1", f"alone{name}2", workers=0) for name in "ab"]
    ended: list[str] = []
    threads = [
        threading.Thread(target=lambda sweep=sweep: ended.extend(statuses(sweep.train())))
        for sweep in sweeps
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == ["finished"] * 4


@pytest.mark.parametrize(("fail_fast", "last"), [(False, "finished"), (True, "stopped")])
def test_this_process_walks_the_same_list(tmp_path: Path, fail_fast: bool, last: str):
    words = words_of(tmp_path, "finish1", "out_of_memory", "finish2")
    words[1] = "norm=torch.nn.Conv2d,none"  # the first lacks an argument
    log = StudyLog(compose_cells(parse_command(words)), ["normexp-train", *words])
    outcomes = Sweep(log, [WorkerSlot(1)], fail_fast=fail_fast).train()
    assert statuses(outcomes) == ["refused"] * 3 + ["finished", "failed", last]


@pytest.mark.parametrize(
    ("acts", "expected", "num_workers"),
    [
        (["die_once", "finish"], ["finished", "finished"], 2),
        (["out_of_memory", "finish"], ["failed", "finished"], 2),  # a fresh process
    ],
)
def test_what_happens_to_a_worker_costs_its_own_cell_at_most(
    tmp_path: Path, acts, expected, num_workers
):
    sweep = sweep_of(tmp_path, *acts)
    assert statuses(sweep.train()) == expected
    assert sweep.num_started >= num_workers


def test_death_is_an_attempt_with_the_last_words_and_two_are_a_failure(tmp_path: Path):
    sweep = sweep_of(tmp_path, "die", "finish")
    failed, finished = sweep.train()
    assert KILLED in failed.error and statuses([failed, finished]) == ["failed", "finished"]
    assert sweep.num_started >= 3  # the two runs apart, after two deaths
    attempts = read_history(tmp_path / "s").attempts
    assert {(each.error, each.died, each.checkpointed_at) for each in attempts} == {
        (KILLED, True, 0)
    }
    cell = sweep.cells[0].directory
    assert (cell / "stacks/0-1/run.log").read_text().count(f"last words\n{KILLED}\n") == 2
    assert read_result(cell / "seed-1").error == KILLED


def test_death_before_training_is_recorded_and_leaves_no_folder(tmp_path: Path):
    sweep = sweep_of(tmp_path, "finish", "die_before")
    assert statuses(sweep.train()) == ["finished", "failed"]
    assert sweep.num_started >= 2
    (lost,) = read_history(tmp_path / "s").errors.values()
    assert lost.error.startswith("killed by signal 9") and lost.cell == sweep.cells[1].id


def test_fail_fast_stops_what_runs_and_begins_nothing(tmp_path: Path):
    sweep = sweep_of(tmp_path, "wait1", "out_of_memory", "wait2", workers=2, fail_fast=True)
    assert statuses(sweep.train()) == ["stopped", "failed", "stopped"]
    assert sweep.display.is_stopping  # no time is left


# --- Claiming ------------------------------------------------------------------------------------


def test_busy_stack_waits_behind_the_others_and_is_then_trained(tmp_path: Path):
    sweep = sweep_of(tmp_path, "finish1", "finish2")
    lock_file = sweep.cells[0].directory / LOCK_FILE
    lock_file.parent.mkdir(parents=True)
    events: list[Event] = []
    with ExitStack() as held:
        assert held.enter_context(file_lock(lock_file))

        def report(event: Event) -> None:
            events.append(event)
            if isinstance(event, WorkerWaits):
                held.close()

        assert work(Walk(sweep.log), WorkerSlot(1), report, StopRequest())
    taken = [event.positions for event in events if isinstance(event, StackTaken)]
    ended = [[*event.outcomes] for event in events if isinstance(event, StackEnded)]
    assert (taken, ended) == ([(1,), (0,)], [[1], [0]])
    assert [event.holder for event in events if isinstance(event, WorkerWaits)] == [os.getpid()]


def test_a_stop_that_foreign_code_swallows_still_counts(tmp_path: Path):
    events, stop = list[Event](), StopRequest()
    with suppress(KeyboardInterrupt):  # as the import of a library may
        stop.stop_at_once(signal.SIGTERM, None)
    walk = Walk(sweep_of(tmp_path, "finish").log)
    assert not work(walk, WorkerSlot(1), events.append, stop)
    assert not events and walk.left


def test_worker_that_waits_for_a_slot_ends_when_nothing_is_left_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    slot, walk = WorkerSlot(1, None, ["core-0"]), Walk(sweep_of(tmp_path, "finish").log)
    events: list[Event] = []
    monkeypatch.setattr(time, "sleep", lambda _: walk.left.clear())  # another worker trains it
    with slot.claim(), caplog.at_level("INFO"):
        assert work(walk, slot, events.append, StopRequest())
    assert not events
    assert "waiting" in caplog.text


def test_a_mistake_that_only_building_shows_is_refused_before_it_waits_for_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    words = ["norm=group", "model=torchvision", "model.name=resnet99", f"runs_dir={tmp_path}"]
    log = StudyLog(compose_cells(parse_command(words)), ["normexp-train", *words])
    slot, events = WorkerSlot(1, None, ["core-0"]), list[Event]()
    with slot.claim(), caplog.at_level("INFO"):
        assert work(Walk(log), slot, events.append, StopRequest())
    (ended,) = [event for event in events if isinstance(event, StackEnded)]
    assert "try resnet" in ended.outcomes[0].error and "waiting" not in caplog.text


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
                and all(worker.stack for worker in sweep.workers)
            )
        )
        then()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_interrupt_stops_each_worker_and_leaves_no_process(tmp_path: Path):
    sweep = sweep_of(tmp_path, "wait1", "wait2", "wait3", workers=2)
    workers = []
    thread = interrupted(sweep, lambda: workers.extend(sweep.workers))
    assert statuses(sweep.train()) == ["stopped"] * 3
    thread.join()
    assert [worker.process.exitcode for worker in workers] == [0, 0]
    assert not is_held(sweep.cells[0].directory / LOCK_FILE)


def test_second_interrupt_kills_the_workers(tmp_path: Path):
    sweep = sweep_of(tmp_path, "wait1", "wait2")
    killed = []

    def first() -> None:
        killed.extend(sweep.workers)
        os.kill(killed[0].process.pid or 0, signal.SIGSTOP)  # it will not stop by itself
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: sweep.stopping)

    thread = interrupted(sweep, first)
    with pytest.raises(KeyboardInterrupt):
        sweep.train()
    thread.join()
    assert killed[0].process.exitcode != 0


@pytest.mark.parametrize("at", ["start", "locks"])
def test_workers_that_die_without_a_stack_end_the_sweep(tmp_path: Path, monkeypatch, at: str):
    sweep = sweep_of(tmp_path, "finish1", "finish2", "finish3")
    if at == "start":  # the worker cannot even import what trains
        monkeypatch.setattr(worker_process, "main", os.abort)
    else:  # the folder of the locks cannot be written
        (tmp_path / "a_file").touch()
        sweep.slots = [WorkerSlot(1, None, [f"{tmp_path}/a_file/core-0"])]
    with pytest.raises(Halted, match="no worker process starts"):
        sweep.train()


def test_worker_ends_by_itself_when_the_sweeps_process_is_killed(tmp_path: Path):
    words = [*words_of(tmp_path, "wait1", "wait2"), "workers=1"]
    cell, _ = compose_cells(parse_command(words))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen(
        [sys.executable, "-m", "normexp.train", *words], env=environment, stderr=subprocess.DEVNULL
    )
    lock_file = cell.directory / LOCK_FILE
    try:
        wait_until(lambda: list(cell.directory.glob("stacks/*/run.log")))
        status = Path(f"/proc/{holder_of(lock_file)}/status")
        if status.exists():  # Linux; Ctrl-C while the worker started was for its parent
            (masked,) = re.findall(r"^SigBlk:\s*(\w+)$", status.read_text(), re.MULTILINE)
            assert int(masked, 16) >> (signal.SIGINT - 1) & 1
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_held(lock_file))
    assert not lock_file.exists()  # it ended as after Ctrl-C and gave its lock back
