"""A worker without torch, for the tests of a sweep: its cells say in `act` what they do."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from normexp.config.spec import CellSpec, Listener, Outcome, Start
from normexp.records.files import FileLock
from normexp.records.paths import LOCK_FILE, seed_dir
from normexp.records.result import Result, write_result
from normexp.sweeps.messages import Ended
from normexp.sweeps.worker import open_link, serve
from normexp.training.stopping import StopRequest


def run(composed: CellSpec, listener: Listener, stop: StopRequest) -> Outcome:
    cfg = composed.cfg
    if cfg.act == "die before":
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.act == "raise":
        return Outcome("failed", composed.title, error="RuntimeError: no more")
    cell_id = f"cell-{cfg.name}"
    directory = Path(cfg.runs_dir) / cfg.study / cell_id
    if (seed_dir(directory, 0) / "result.json").is_file() and cfg.act == "finish":
        return Outcome("skipped", composed.title, cell_id, directory, {"by": os.getpid()})
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK_FILE)
    with lock as held:
        if not held:
            return Outcome("busy", composed.title, cell_id, directory, holder=lock.holder())
        listener.begins(Start(cell_id, directory, {}, composed.seeds, 10))
        for step in range(cfg.steps):
            listener.on_steps(step, cfg.steps)
            if stop.requested:
                return Outcome("stopped", composed.title, cell_id, directory)
            time.sleep(0.02)
        if cfg.act == "die":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        results = [
            Result(cell_id, seed, "finished", {"by": os.getpid()}, {}, {})
            for seed in composed.seeds
        ]
        for result in results:
            seed_dir(directory, result.seed).mkdir(exist_ok=True)
            write_result(seed_dir(directory, result.seed), result)
        return Outcome("finished", composed.title, cell_id, directory, {"by": os.getpid()}, results)


def run_task(task: tuple[CellSpec, ...], listener: Listener, stop: StopRequest) -> Ended:
    """Cells of a task of several are handed back, but for the first."""
    return Ended([run(task[0], listener, stop), *[None] * (len(task) - 1)], False)


if __name__ == "__main__":
    sys.exit(serve(open_link(int(sys.argv[1])), run_task))
