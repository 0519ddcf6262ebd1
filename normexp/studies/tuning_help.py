"""The text of `normexp.tune --help`, its keys read from config.yaml. No torch, no Hydra."""

from __future__ import annotations

import re

from normexp.studies.folders import conf_dir

USAGE = """\
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
LINE = re.compile(r"^  (?P<key>\w+): (?P<default>.+?)  # (?P<comment>.+)$", re.MULTILINE)


def help_text() -> str:
    """Usage, and the keys under `tune` with defaults and meaning."""
    _, _, section = (conf_dir() / "config.yaml").read_text().partition("\ntune:\n")
    lines = ["Values (key=value) and their defaults:"]
    for line in LINE.finditer(section.partition("\n\n")[0]):
        setting = f"tune.{line['key']}={line['default']}"
        lines.append(f"  {setting:<28}{line['comment']}")
    return "\n".join([USAGE, *lines])
