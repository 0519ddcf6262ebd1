"""The text of --help, read from the YAMLs; imports neither torch nor Hydra."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from normexp.errors import UserError

GROUPS = ("norm", "model", "data", "optim", "trainer", "logger", "experiment")
CUSTOM_GROUPS = ("norm", "model", "data")  # take `<group>=custom <group>._target_=...`


def conf_dir() -> Path:
    """The folder of the shipped YAMLs: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"normexp is installed without its conf folder (beside {package})")


def group_choices(group: str, config_dirs: Sequence[str] = ()) -> list[str]:
    """What `group=` takes, sorted: shipped files, those of `config_dirs`, and `custom`."""
    names = {"custom"} if group in CUSTOM_GROUPS else set()
    for folder in (conf_dir(), *map(Path, config_dirs)):
        names.update(_names_in(folder / group))
    return sorted(names)


def check_config_dirs(config_dirs: Sequence[str]) -> None:
    """Refuses a folder that is not there, and a file that a shipped one would silently hide."""
    for config_dir in config_dirs:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir {config_dir}: no such folder")
        for group in GROUPS:
            folder = Path(config_dir, group)
            for name in sorted(_names_in(folder) & set(group_choices(group))):
                raise UserError(
                    f"{folder / name}.yaml: normexp has a {group}={name} of its own; rename yours"
                )


def _names_in(folder: Path) -> set[str]:
    files = folder.rglob("*.yaml")
    return {file.relative_to(folder).with_suffix("").as_posix() for file in files}


USAGE = """\
normexp trains one model with any norm and says how the result depends on the batch size.

  python -m normexp.train norm=group             one cell: a norm, a model, data, sizes; 4 seeds
  python -m normexp.train -m norm=batch,group    a sweep over values; the same line again resumes it
  python -m normexp.train -m experiment=NAME     a recipe of conf/experiment
"""

EXAMPLES = """\
Examples:
  python -m normexp.train norm=batch norm_batch_size=2
  python -m normexp.train -m norm=batch,layer,group batch_size=4,32 replicas=8 study=sizes
  python -m normexp.train data=manual norm=rms epochs=1
  python -m normexp.train norm=custom norm._target_=my_package.MyNorm norm.my_knob=2
"""

OPTIONS = """\
Options:
  -m, --multirun        several values per key (a,b or range(1,4)), every combination
  --config-dir FOLDER   your own YAMLs, e.g. FOLDER/norm/mine.yaml for norm=mine; may be repeated
  --cfg job             show the config instead of training; --info shows where it comes from
"""
# A line of config.yaml that help shows: a top-level key, its default, and a comment.
LINE = re.compile(r"^(?P<key>\w+): (?P<default>.+?)  # (?P<comment>.+)$")


def help_text(config_dirs: Sequence[str] = ()) -> str:
    """Usage, the groups with their choices, the values with defaults and units, examples.

    Raises:
        UserError: a folder of `config_dirs` that is not there.
    """
    check_config_dirs(config_dirs)
    return "\n".join([USAGE, _groups(config_dirs), _values(), OPTIONS, EXAMPLES])


def _groups(config_dirs: Sequence[str]) -> str:
    lines = ["Groups (group=choice):"]
    for group in GROUPS:
        choices = ", ".join(group_choices(group, config_dirs)) or "none yet"
        head = f"  {group:<12}"
        lines.append(textwrap.fill(choices, 100, initial_indent=head, subsequent_indent=" " * 14))
    lines += [
        "  A choice has knobs, as in norm.num_groups=4; its YAML in conf/ explains them.",
        "  norm=custom, model=custom and data=custom take norm._target_=... and any knob.",
    ]
    return "\n".join(lines) + "\n"


def _values() -> str:
    lines = ["Values (key=value) and their defaults; data and experiment files may set their own:"]
    for line in (conf_dir() / "config.yaml").read_text().splitlines():
        if found := LINE.match(line):
            setting = f"{found['key']}={found['default']}"
            lines.append(f"  {setting:<28}{found['comment']}")
    return "\n".join(lines) + "\n"


USAGE_TUNING_HELP = """\
normexp.tune searches hyperparameters on validation, then trains fresh seeds at the best.

  python -m normexp.tune 'lr=tag(log,interval(1e-3,1))' norm=batch,group
  python -m normexp.tune experiment=tuned_sensitivity

The same line again goes on where it was left, and adds nothing to a search that is done; a larger
tune.trials adds the difference. What is searched, and what is not:
  lr=tag(log,interval(1e-3,1))     searched, evenly in log(lr); interval(a,b) evenly in the value
  norm.num_groups=choice(2,4,8)    searched; choices alone, few enough, are tried whole
  batch_size=range(8,65,8)         searched, as a choice
  norm=batch,group                 a grid: one search for each
All other keys are those of normexp.train. The search's runs go to the study <study>-search, the
fresh seeds to <study>; normexp.report reads both.
"""
LINE_TUNING_HELP = re.compile(
    r"^  (?P<key>\w+): (?P<default>.+?)  # (?P<comment>.+)$", re.MULTILINE
)


def help_text_tuning_help() -> str:
    """Usage, and the keys under `tune` with defaults and meaning."""
    _, _, section = (conf_dir() / "config.yaml").read_text().partition("\ntune:\n")
    lines = ["Values (key=value) and their defaults:"]
    for line in LINE_TUNING_HELP.finditer(section.partition("\n\n")[0]):
        setting = f"tune.{line['key']}={line['default']}"
        lines.append(f"  {setting:<28}{line['comment']}")
    return "\n".join([USAGE_TUNING_HELP, *lines])
