"""A sweep through one of Hydra's launchers, such as `hydra/launcher=ray`: a job for each stack.

A job trains its cells as a worker does, with the same stacks, locks, checkpoints and records, so it
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
from pathlib import Path

import hydra
from omegaconf import DictConfig

from normexp.config.compose import VERSION_BASE, quoted
from normexp.config.help import conf_dir
from normexp.config.outcome import Outcome
from normexp.config.spec import CellSpec, Command
from normexp.records.logs import messages_to_stderr
from normexp.records.result import Status
from normexp.sweeps.log import StudyLog
from normexp.sweeps.machine import environment, shared_value
from normexp.sweeps.sweep import train_cells
from normexp.sweeps.walk import Walk

LAUNCHER_WORDS = r"experiment=|\+*hydra(/|\.(?!sweeper|mode))"  # words that configure the launcher
FOLDER = "launched"  # in a study: the files of Hydra, the launcher and the jobs


def launch_cells(
    command: Command, launcher: str, cells: Sequence[CellSpec], words: Sequence[str]
) -> list[Outcome]:
    """Like `train_cells`, with a job of the launcher for each stack.

    A job that dies leaves no result: its cells count as failed, and the same command retries them.
    """
    if shared_value(cells, "dry_run"):
        return train_cells(cells, words)
    log = StudyLog(cells, words)
    with messages_to_stderr():
        log.check()
        log.warn_of_added_seeds()
    walk = Walk(log)
    claims = [tuple(claim) for claim in walk]
    for study_dir in {cells[positions[0]].directory.parent for positions in claims}:
        log.begin(study_dir)
    tasks = [[cells[position] for position in positions] for positions in claims]
    study_dir = next(cell.study_dir for cell in cells if cell.study_dir is not None)
    folder = (study_dir / FOLDER).resolve()
    error = _run_hydra(command, launcher, folder, tasks, log.command_id) if tasks else ""
    launched = {position for positions in claims for position in positions}
    with messages_to_stderr():
        return [
            outcome_of_job(walk, position, error)
            if position in launched
            else walk.outcome(position)
            for position in range(len(cells))
        ]


def outcome_of_job(walk: Walk, position: int, launcher_error: str = "") -> Outcome:
    """The outcome of a cell that a job should have trained, by its records."""
    outcome = walk.outcome(position)
    if outcome.status is Status.SKIPPED:
        outcome.status = Status.FINISHED
    elif outcome.status is Status.STOPPED:
        died = "the launcher stopped before its job ended" if launcher_error else "its job died"
        outcome.status, outcome.error = Status.FAILED, f"{died}; the same command continues"
    return outcome


def _run_hydra(
    command: Command,
    launcher: str,
    folder: Path,
    tasks: Sequence[Sequence[CellSpec]],
    command_id: str,
) -> str:
    """Runs Hydra's multirun, a job for each task.

    Returns the error of the launcher in one line, empty without one.
    """
    # Only the words that configure Hydra: jobs read their composed cells by the number of the task.
    hydra_words = [word for word in command.overrides if re.match(LAUNCHER_WORDS, word)]
    numbers = ",".join(map(str, range(len(tasks))))
    overrides = [*hydra_words, f"+task={numbers}", f"hydra.sweep.dir={quoted(str(folder))}"]
    overrides.append("hydra.sweeper.params=null")  # of an experiment
    if launcher == "ray":  # the plugin sets a value that a running cluster refuses
        overrides.append("+hydra.launcher.ray.init.object_store_memory=null")
    folders = [quoted(f"file://{Path(path).resolve()}") for path in command.config_dirs]
    search = [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []
    cwd = Path.cwd()
    file = folder / f"tasks-{secrets.token_hex(8)}.pickle"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(tasks))

    def job(cfg: DictConfig) -> None:
        with suppress(OSError):  # on another machine, relative folders start where the job does
            os.chdir(cwd)
        cells = pickle.loads(file.read_bytes())[cfg.task]
        # The launching process has recorded the command.
        train_cells(cells, [], workers=0, command_id=command_id)

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
