"""The text of --help, read from the YAMLs; imports neither torch nor Hydra."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from normexp.studies.folders import GROUPS, check_config_dirs, conf_dir, group_choices

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
