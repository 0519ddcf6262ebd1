"""A worker without torch, for the tests of a sweep: the key `act` of a cell says what it does."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from normexp.config.spec import CellSpec, Outcome
from normexp.records.files import FileLock
from normexp.records.paths import LOCK_FILE, seed_dir
from normexp.records.result import Result, write_result
from normexp.sweeps.messages import Ended
from normexp.sweeps.worker import TaskReport, open_link, serve
from normexp.training.stopping import StopRequest


def run(spec: CellSpec, report: TaskReport, stop: StopRequest) -> Outcome:
    cfg = spec.cfg
    assert cfg is not None
    if cfg.act == "die before":
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.act == "raise":
        return Outcome("failed", spec.title, error="RuntimeError: no more")
    cell_id = f"cell-{cfg.name}"
    directory = Path(cfg.runs_dir) / cfg.study / cell_id
    if (seed_dir(directory, 0) / "result.json").is_file() and cfg.act == "finish":
        return Outcome("skipped", spec.title, cell_id, directory, {"by": os.getpid()})
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK_FILE)
    with lock as held:
        if not held:
            return Outcome("busy", spec.title, cell_id, directory, holder=lock.holder())
        begun = Outcome("running", spec.title, cell_id, directory, missing=spec.seeds)
        report.on_begin(0, begun)
        for step in range(cfg.steps):
            report.on_steps(step, cfg.steps)
            if stop.requested:
                return Outcome("stopped", spec.title, cell_id, directory)
            time.sleep(0.02)
        if cfg.act == "die":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        results = [
            Result(cell_id, seed, "finished", {"by": os.getpid()}, {}, {}) for seed in spec.seeds
        ]
        for result in results:
            seed_dir(directory, result.seed).mkdir(exist_ok=True)
            write_result(seed_dir(directory, result.seed), result)
        return Outcome("finished", spec.title, cell_id, directory, {"by": os.getpid()}, results)


def run_task(task: tuple[CellSpec, ...], report: TaskReport, stop: StopRequest) -> Ended:
    """Runs the first cell of a task; the others are to be trained alone."""
    others = [Outcome("alone", spec.title) for spec in task[1:]]
    return Ended([run(task[0], report, stop), *others], False)


if __name__ == "__main__":
    sys.exit(serve(open_link(int(sys.argv[1])), run_task))
