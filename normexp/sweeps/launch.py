"""A sweep through one of Hydra's launchers, such as `hydra/launcher=ray`: a job for each cell.

Hydra composes and submits. A job trains its cell as any other command does, with the same records,
locks and checkpoints, so it needs access to the folder of the study.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from normexp.cells.logs import messages_to_stderr
from normexp.config.compose import VERSION_BASE, names_of, quoted, register_custom
from normexp.config.grid import compose_cells
from normexp.config.help import conf_dir
from normexp.config.spec import LAUNCHER, CellSpec, Command, Outcome, name_of
from normexp.errors import UserError
from normexp.records.files import open_atomic
from normexp.sweeps.log import StudyLog
from normexp.sweeps.summary import print_closing_table
from normexp.sweeps.sweep import run_cells

# Launcher to the extra of normexp that installs it, and the module that holds it.
LAUNCHERS = {
    "ray": ("ray", "hydra_plugins.hydra_ray_launcher"),
    "ray_aws": ("ray", "hydra_plugins.hydra_ray_launcher"),
    "submitit_local": ("slurm", "hydra_plugins.hydra_submitit_launcher"),
    "submitit_slurm": ("slurm", "hydra_plugins.hydra_submitit_launcher"),
    "joblib": ("joblib", "hydra_plugins.hydra_joblib_launcher"),
}
ADDRESS = "hydra.launcher.ray.init.address"
FOLDER = "launched"  # in a study: the files of Hydra, the launcher and the jobs


def check_launcher(name: str, overrides: Sequence[str]) -> None:
    """Raises UserError if a launcher is not installed or its cluster does not answer."""
    if name not in LAUNCHERS:
        known = ", ".join(["basic", *LAUNCHERS])
        raise UserError(f"{LAUNCHER}{name}: no such launcher (choices: {known})")
    extra, module = LAUNCHERS[name]
    if not is_installed(module):
        raise UserError(f"{LAUNCHER}{name} is not installed; pip install 'normexp[{extra}]'")
    if name == "ray":
        _check_address(overrides)


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


def _check_address(overrides: Sequence[str]) -> None:
    """Raises UserError if a Ray cluster does not answer; Ray itself would try for a minute."""
    given = [text.lstrip("+").split("=", 1) for text in overrides]
    addresses = [pair[1] for pair in given if pair[0] == ADDRESS and len(pair) == 2]
    address = addresses[-1] if addresses else os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # `auto`, `local`, null, or none
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"{ADDRESS}={address}: nothing answers there ({reason}); start a cluster by "
            "`ray start --head`, or leave the address out"
        ) from None


def launch(command: Command, words: Sequence[str]) -> int:
    """Trains every cell in a job, waits for all, prints the closing table; returns the exit code.

    A job that dies leaves no outcome. Its cell is a failed row, and the same command tries again.

    Raises:
        UserError: no such launcher or cluster, or a cell that does not compose.
    """
    assert command.launcher is not None
    check_launcher(command.launcher, command.overrides)
    cells = compose_cells(command)
    if len(cells) == 1 and not command.multirun:
        raise UserError(f"{LAUNCHER}{command.launcher} runs sweeps; add -m")
    for cell in cells:
        if cell.cfg is None:  # Hydra would refuse the whole sweep
            raise UserError(f"{cell.error} (in the cell {cell.title})")
    cfgs = [cell.cfg for cell in cells if cell.cfg is not None]
    if cfgs[0].dry_run:
        return run_cells(cells, words)
    log = StudyLog(cells, words)
    with messages_to_stderr():
        log.check()
    for cell in cells:
        if cell.study_dir is not None:
            log.open(cell.study_dir)
    folder = Path(cfgs[0].runs_dir, cfgs[0].study, FOLDER).resolve()
    for cell in cells:
        _outcome_file(folder, cell).unlink(missing_ok=True)
    error = _run_hydra(command, folder)
    outcomes = [_outcome_of(folder, cell, error) for cell in cells]
    for cell, outcome in zip(cells, outcomes, strict=True):
        log.settle(cell, outcome)
    print_closing_table(cells, outcomes)
    return 0 if all(outcome.status in ("finished", "skipped") for outcome in outcomes) else 1


def _run_hydra(command: Command, folder: Path) -> str:
    """Runs Hydra's multirun; returns the error of the launcher in one line, empty without one."""
    overrides = [*command.overrides, f"hydra.sweep.dir={quoted(str(folder))}"]
    if command.launcher == "ray":  # the plugin sets a value that a running cluster refuses
        overrides.append("+hydra.launcher.ray.init.object_store_memory=null")
    folders = [quoted(f"file://{Path(each).resolve()}") for each in command.config_dirs]
    search = [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []
    register_custom()
    try:
        with _as_program(["-m", *search, *overrides]):
            hydra.main(config_path=str(conf_dir()), config_name="config", **VERSION_BASE)(job)()
    except Exception as error:  # a job died, or the launcher itself failed
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"normexp: the launcher stopped: {reason}", file=sys.stderr)
        return reason
    return ""


@contextmanager
def _as_program(argv: list[str]) -> Iterator[None]:
    """Gives Hydra the command line `argv` inside the block, and lets its errors through."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def job(cfg: DictConfig) -> str:
    """Trains the cell of one of Hydra's jobs; returns the status of its outcome."""
    settings = HydraConfig.get()
    with suppress(OSError):  # on another machine, relative folders start where the job does
        os.chdir(settings.runtime.cwd)
    choices = names_of(cfg, settings.runtime.choices)
    cfg.study = str(cfg.study)  # study=2026 names a folder
    overrides = list(settings.overrides.task)
    composed = CellSpec(cfg, choices, " ".join(overrides), overrides=overrides)

    from normexp.cells.run import run_task

    with messages_to_stderr():
        (outcome,) = run_task([composed])
    with open_atomic(_outcome_file(Path(settings.sweep.dir), composed)) as file:
        pickle.dump(outcome, file)
    return outcome.status


def _outcome_file(folder: Path, cell: CellSpec) -> Path:
    return folder / f"{cell.digest}-{cell.seeds[0]}-{cell.seeds[-1]}.outcome"


def _outcome_of(folder: Path, cell: CellSpec, error: str) -> Outcome:
    """Reads and removes the outcome that a job left."""
    path = _outcome_file(folder, cell)
    if not path.is_file():
        reason = "the launcher stopped before its job ended" if error else "its job died"
        return Outcome("failed", name_of(cell), error=f"{reason}; the same command continues")
    with open(path, "rb") as file:
        outcome = pickle.load(file)
    path.unlink()
    return outcome
