"""Workers of a command in the jobs of one of Hydra's launchers, such as `hydra/launcher=ray`.

A job does what a worker does, so it needs access to the folder of the study.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from normexp.errors import one_line
from normexp.training.config.choices import VERSION_BASE, own_hydra
from normexp.training.config.command import Command
from normexp.training.config.groups import conf_dir

LAUNCHER_WORDS = r"experiment=|\+*hydra(/|\.(?!sweeper|mode))"  # words that configure the launcher
FOLDER = "launched"  # in a study: the files of Hydra, the launcher and the jobs


def launch_workers(command: Command, study_dir: Path, count: int, act: Callable[[], None]) -> str:
    """Calls `act` in `count` jobs of Hydra's multirun; returns the launcher's error, or nothing."""
    words = [str(override.input_line) for override in command.overrides]
    hydra_words = [word for word in words if re.match(LAUNCHER_WORDS, word)]
    folder = (study_dir / FOLDER).resolve()
    overrides = [
        *hydra_words,
        f"+worker={','.join(map(str, range(count)))}",
        f"hydra.sweep.dir={json.dumps(str(folder))}",
        "hydra.sweeper.params=null",  # an experiment sets them
    ]
    if command.launcher == "ray":  # the plugin sets a value that a running cluster refuses
        overrides.append("+hydra.launcher.ray.init.object_store_memory=null")
    cwd = Path.cwd()

    def run(_: DictConfig) -> None:
        with suppress(OSError):  # on another machine, relative folders start where the job does
            os.chdir(cwd)
        act()

    import hydra

    os.environ["HYDRA_FULL_ERROR"] = "1"  # raises errors instead of exiting
    program = sys.argv  # Hydra reads its command line there
    sys.argv = [program[0], "-m", *overrides]
    try:
        with own_hydra():
            hydra.main(config_path=str(conf_dir()), config_name="config", **VERSION_BASE)(run)()
    except Exception as error:  # a job died, or the launcher itself failed
        return one_line(error)
    finally:
        sys.argv = program
    return ""
