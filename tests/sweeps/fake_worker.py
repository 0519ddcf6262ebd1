"""`cells.run.run_task` without torch, for tests of a sweep: the key `act` says what a cell does."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from normexp.config.spec import CellSpec, Outcome
from normexp.records.files import FileLock
from normexp.records.history import read_history
from normexp.records.paths import LOCK_FILE, seed_dir
from normexp.records.result import Result, read_records, write_result
from normexp.records.stacks import StackRecord, begin_stack, end_stack, list_stacks
from normexp.training.stopping import StopRequest

OnBegin = Callable[[StackRecord, Sequence[str]], None]
OnSteps = Callable[[int, int], None]


def run_task(
    specs: Sequence[CellSpec],
    on_begin: OnBegin | None = None,
    on_steps: OnSteps | None = None,
    stop: StopRequest | None = None,
) -> list[Outcome]:
    if len(specs) > 1:
        acts = [spec.cfg.act for spec in specs if spec.cfg]
        if "die together" in acts:
            os.kill(os.getpid(), signal.SIGKILL)
        if "die together once" in acts:
            return run_together(specs)
        return [Outcome("alone", spec.title) for spec in specs]
    assert on_begin and stop
    return [run_cell(specs[0], on_begin, on_steps or (lambda *_: None), stop)]


def run_together(specs: Sequence[CellSpec]) -> list[Outcome]:
    assert specs[0].cfg is not None
    died = Path(specs[0].cfg.runs_dir) / "died"
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [Outcome("finished", spec.title, record={"together": len(specs)}) for spec in specs]


def run_cell(spec: CellSpec, on_begin: OnBegin, on_steps: OnSteps, stop: StopRequest) -> Outcome:
    cfg = spec.cfg
    if cfg is None:
        return Outcome("refused", spec.title, error=spec.error)
    if cfg.act == "die before":
        os.kill(os.getpid(), signal.SIGKILL)
    if cfg.act == "out of memory":
        return Outcome("failed", spec.title, error="RuntimeError: not enough memory")
    cell_id = f"cell-{cfg.name}"
    study = Path(cfg.runs_dir) / cfg.study
    directory = study / cell_id
    seeds = list(spec.seeds)
    if not read_records(directory, seeds).new:
        return Outcome("skipped", spec.title, cell_id, directory, {"by": os.getpid()})
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / LOCK_FILE)
    with lock as held, stop.listening():
        if not held:
            return Outcome("busy", spec.title, cell_id, directory, holder=lock.holder())
        members = [(cell_id, seed) for seed in seeds]
        stack = (list_stacks(study, [cell_id]) or [begin_stack(study, members, {cell_id: 0.1})])[0]
        deaths = [each for each in read_history(study).attempts if each.stack == stack.id]
        status = "failed" if len(deaths) == 2 else "finished"
        if status == "finished":
            on_begin(stack, [cell_id])
            for step in range(cfg.steps):
                on_steps(step, cfg.steps)
                if stop.requested:
                    return Outcome("stopped", spec.title, cell_id, directory)
                time.sleep(0.02)
            if cfg.act == "die" or (cfg.act == "die once" and not deaths):
                print("last words", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        error = deaths[-1].error if status == "failed" else None
        for seed in seeds:
            seed_dir(directory, seed).mkdir(exist_ok=True)
            by = {"by": os.getpid()}
            result = Result(cell_id, seed, status, by, {}, {}, error=error)
            write_result(seed_dir(directory, seed), result)
        end_stack(stack)
        return Outcome(
            status, spec.title, cell_id, directory, {"by": os.getpid()}, error=error or ""
        )
