"""`cells.run.run_task` without torch, for tests of a sweep: the key `act` says what a cell does."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from normexp.config.spec import CellSpec, Outcome
from normexp.records.files import file_lock, holder_of
from normexp.records.history import read_history
from normexp.records.paths import LOCK_FILE, seed_dir
from normexp.records.result import Result, read_records, write_result
from normexp.records.stacks import StackRecord, begin_stack, end_stack, list_stacks
from normexp.training.stopping import StopRequest, TrainingControl

OnBegin = Callable[[StackRecord, Sequence[str]], None]
OnSteps = Callable[[int, int], None]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_task(
    specs: Sequence[CellSpec], on_begin: OnBegin, control: TrainingControl
) -> list[Outcome]:
    if len(specs) == 1:
        on_steps = control.on_steps or (lambda *_: None)
        return [run_cell(specs[0], on_begin, on_steps, control.stop)]
    acts = {spec.cfg.act: Path(spec.cfg.runs_dir, "died") for spec in specs if spec.cfg}
    if "die together" in acts:
        die()
    if "die together once" in acts:
        if not (died := acts["die together once"]).exists():
            died.touch()
            die()
        return [Outcome("finished", spec.title, record={"together": len(specs)}) for spec in specs]
    return [Outcome("alone", spec.title) for spec in specs]


def run_cell(spec: CellSpec, on_begin: OnBegin, on_steps: OnSteps, stop: StopRequest) -> Outcome:
    cfg = spec.cfg
    if cfg is None:
        return Outcome("refused", spec.title, error=spec.error)
    if cfg.act == "die before":
        die()
    if cfg.act == "out of memory":
        return Outcome("failed", spec.title, error="RuntimeError: not enough memory")
    cell_id, by = f"cell-{cfg.name}", {"by": os.getpid()}
    study = Path(cfg.runs_dir) / cfg.study
    directory = study / cell_id
    if not read_records(directory, spec.seeds).new:
        return Outcome("skipped", spec.title, cell_id, directory, by)
    directory.mkdir(parents=True, exist_ok=True)
    with file_lock(directory / LOCK_FILE) as held, stop.listening():
        if not held:
            holder = holder_of(directory / LOCK_FILE)
            return Outcome("busy", spec.title, cell_id, directory, holder=holder)
        members = [(cell_id, seed) for seed in spec.seeds]
        stack = (list_stacks(study, [cell_id]) or [begin_stack(study, members, {cell_id: 0.1})])[0]
        deaths = [each for each in read_history(study).attempts if each.stack == stack.id]
        error = deaths[-1].error if len(deaths) == 2 else None
        if error is None:
            on_begin(stack, [cell_id])
            for step in range(cfg.steps):
                on_steps(step, cfg.steps)
                if stop.requested:
                    return Outcome("stopped", spec.title, cell_id, directory)
                time.sleep(0.02)
            if cfg.act == "die" or (cfg.act == "die once" and not deaths):
                print("last words", file=sys.stderr, flush=True)
                die()
        status = "finished" if error is None else "failed"
        for seed in spec.seeds:
            seed_dir(directory, seed).mkdir(exist_ok=True)
            result = Result(cell_id, seed, status, by, {}, {}, error=error)
            write_result(seed_dir(directory, seed), result)
        end_stack(stack)
        return Outcome(status, spec.title, cell_id, directory, by, error=error or "")
