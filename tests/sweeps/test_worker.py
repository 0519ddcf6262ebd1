"""The worker's end of the pipe: a stop that comes in any moment is heard."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path

from normexp.config.spec import CellSpec, Listener, Start
from normexp.sweeps.messages import Begins, Ended, Ready, Stop
from normexp.sweeps.worker import STOPPED, Link, Telling, serve
from normexp.training.stopping import StopRequest

START = Start("cell", Path("cell"), {}, [0], 10)
TASK = (CellSpec(None, {}, "cell"),)


def test_stop_that_comes_as_a_task_is_taken_stops_its_training():
    ours, theirs = Pipe()
    link = Link(theirs)
    link.is_idle = True  # `serve` has the task, and has not said so yet
    ours.send(Stop())
    link.listen()

    def run(task: tuple[CellSpec, ...], listener: Listener, stop: StopRequest) -> Ended:
        assert task == TASK and isinstance(listener, Telling)
        assert not stop.requested
        listener.begins(START)
        assert stop.requested
        return Ended([None], False)

    stopped, _ = link.tasks.get(), link.tasks.put(TASK)
    link.tasks.put(stopped)  # behind the task
    assert serve(link, run) == STOPPED
    assert [type(ours.recv()) for _ in range(3)] == [Ready, Begins, Ended]
