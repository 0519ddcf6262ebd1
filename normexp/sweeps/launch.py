"""A sweep through one of Hydra's launchers, such as `hydra/launcher=ray`: a job for each task.

A job trains its task as a worker does, with the same stacks, locks, checkpoints and records, so it
needs access to the folder of the study. Outcomes are read from the records.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import hydra
from omegaconf import DictConfig

from normexp.cells.recorded import find_skippable, recorded_outcome
from normexp.config.compose import VERSION_BASE, quoted
from normexp.config.help import conf_dir
from normexp.config.spec import CellSpec, Command, Outcome, norm_and_data
from normexp.records.history import read_history
from normexp.records.logs import messages_to_stderr
from normexp.sweeps.log import StudyLog
from normexp.sweeps.sweep import train_cells
from normexp.sweeps.tasks import environment, group_cells, shared_value

LAUNCHER_WORDS = r"experiment=|\+*hydra(/|\.(?!sweeper|mode))"  # words that configure the launcher
FOLDER = "launched"  # in a study: the files of Hydra, the launcher and the jobs


def launch_cells(
    command: Command, launcher: str, cells: Sequence[CellSpec], words: Sequence[str]
) -> list[Outcome]:
    """Like `train_cells`, with a job of the launcher for each task.

    A job that dies leaves no result: its cells count as failed, and the same command retries them.
    """
    cfgs = [cell.cfg for cell in cells if cell.cfg is not None]
    if shared_value(cfgs, "dry_run"):
        return train_cells(cells, words)
    log = StudyLog(cells, words)
    with messages_to_stderr():
        log.check()
    known = find_skippable(cells)
    before = read_outcomes(cells)
    for study_dir in log.study_dirs:
        log.begin(study_dir)
    tasks = [
        [cells[index] for index in task]
        for task in group_cells(cells)
        if cells[task[0]].cfg is not None and not known.keys() >= set(task)
    ]
    folder = Path(cfgs[0].runs_dir, cfgs[0].study, FOLDER).resolve()
    error = _run_hydra(command, launcher, folder, tasks) if tasks else ""
    outcomes = read_outcomes(cells, error)
    for old, new in zip(before, outcomes, strict=True):
        if (old.status, new.status) == ("failed", "skipped"):
            new.status = "finished"
    return outcomes


def read_outcomes(cells: Sequence[CellSpec], launcher_error: str = "") -> list[Outcome]:
    """The outcomes of cells that other processes train, from the records: never `finished`."""
    died = "the launcher stopped before its job ended" if launcher_error else "its job died"
    read = cache(read_history)
    outcomes = []
    for cell in cells:
        if cell.cfg is None or cell.study_dir is None:
            outcomes.append(Outcome("refused", norm_and_data(cell), error=cell.error))
            continue
        known = read(cell.study_dir).cells.get(cell.digest)
        outcome = Outcome("failed", norm_and_data(cell))
        if known is not None and known.error:
            status, _, outcome.error = known.error.partition(": ")
            outcome.status = "refused" if status == "refused" else "failed"
        elif known is not None and known.cell_id:
            outcome = recorded_outcome(cell, known.cell_id)
        if outcome.status == "failed":
            outcome.error = outcome.error or f"{died}; the same command continues"
        outcomes.append(outcome)
    return outcomes


def _run_hydra(
    command: Command, launcher: str, folder: Path, tasks: Sequence[Sequence[CellSpec]]
) -> str:
    """Runs Hydra's multirun, a job for each task.

    Returns the error of the launcher in one line, empty without one.
    """
    # Only the words that configure Hydra: jobs read their composed cells by the number of the task.
    own = [word for word in command.overrides if re.match(LAUNCHER_WORDS, word)]
    numbers = ",".join(map(str, range(len(tasks))))
    overrides = [*own, f"+task={numbers}", f"hydra.sweep.dir={quoted(str(folder))}"]
    overrides.append("hydra.sweeper.params=null")  # of an experiment
    if launcher == "ray":  # the plugin sets a value that a running cluster refuses
        overrides.append("+hydra.launcher.ray.init.object_store_memory=null")
    folders = [quoted(f"file://{Path(each).resolve()}") for each in command.config_dirs]
    search = [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []
    cwd = Path.cwd()
    file = folder / f"tasks-{secrets.token_hex(8)}.pickle"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(tasks))

    def job(cfg: DictConfig) -> None:
        with suppress(OSError):  # on another machine, relative folders start where the job does
            os.chdir(cwd)
        cells = pickle.loads(file.read_bytes())[cfg.task]
        train_cells(cells, [], workers=0)  # the launching process has recorded the command

    program = sys.argv  # Hydra reads its command line there
    sys.argv = [program[0], "-m", *search, *overrides]
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}):  # raises errors instead of exiting
            hydra.main(config_path=str(conf_dir()), config_name="config", **VERSION_BASE)(job)()
    except Exception as error:  # a job died, or the launcher itself failed
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"normexp: the launcher stopped: {reason}", file=sys.stderr)
        return reason
    finally:
        sys.argv = program
        file.unlink(missing_ok=True)
    return ""
