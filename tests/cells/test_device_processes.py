"""How the processes of several devices are started and heard, whatever they do."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from typing import Any

import pytest

from normexp.cells import device_process, device_processes
from normexp.cells.device_processes import DeviceProcess, Order, run_processes
from normexp.training.fit import StopRequest

ORDER = Order({}, {}, [0], [], False)
Started = list[subprocess.Popen[bytes]]


def start_script(monkeypatch: pytest.MonkeyPatch, script: str, most: int = 9) -> Started:
    """In the place of trainings: processes that run `script`; one more than `most` cannot start."""
    started: Started = []
    real = subprocess.Popen

    def popen(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if len(started) == most:
            raise OSError("no more processes")
        process: Any = real([sys.executable, "-c", script], **options)
        started.append(process)
        return process

    monkeypatch.setattr(device_processes.subprocess, "Popen", popen)
    return started


def test_process_that_was_started_ends_where_the_next_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
):
    started = start_script(monkeypatch, "import time; time.sleep(60)", most=1)
    with pytest.raises(OSError, match="no more processes"):
        run_processes(ORDER, 2, StopRequest())
    assert [process.poll() for process in started] == [-9]


def test_line_that_a_killed_process_tore_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    lines = ['{"step": 3, "num_steps": 5}', '{"step": 4, "num', '{"kind": "error"}']
    start_script(monkeypatch, f"print({chr(10).join(lines)!r})")
    steps: list[tuple[int, int]] = []
    process = DeviceProcess(0, 1, 0, lambda *step: steps.append(step))
    process._process.wait()
    process.end()
    assert steps == [(3, 5)]
    assert process.report == {"kind": "error"}


def test_first_process_tells_no_note_that_was_told_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def train_stack(_cell: None, _seeds: list[int], notes: list[str], *_: Any) -> None:
        for note in [*notes, "a new one"]:
            logging.getLogger("normexp.cells.stack").info(note)

    monkeypatch.setattr("normexp.cells.stack.follow_stack", None)  # for the others
    monkeypatch.setattr("normexp.cells.stack.train_stack", train_stack)
    monkeypatch.setattr("normexp.cells.cell.prepare_cell", lambda *_: None)
    monkeypatch.setenv("RANK", "0")
    assert device_process._train(Order({}, {}, [0], ["told"], False), io.StringIO()) == 0
    assert capsys.readouterr().err == "a new one\n"


@pytest.mark.slow
def test_port_on_which_processes_meet_is_held_before_they_start(monkeypatch: pytest.MonkeyPatch):
    script = (
        "import os, socket; from torch.distributed.rendezvous import rendezvous; "
        "socket.create_connection(('127.0.0.1', int(os.environ['MASTER_PORT'])), 5); "
        "assert next(rendezvous('env://'))[1] == int(os.environ['RANK'])"
    )
    started = start_script(monkeypatch, script)
    run_processes(ORDER, 2, StopRequest())
    assert [process.returncode for process in started] == [0, 0]
