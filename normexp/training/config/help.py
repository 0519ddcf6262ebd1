"""The texts of --help, read from the YAMLs and the table of keys. Imports neither torch nor Hydra.

A norm's YAML begins with comments: the first line is its name and a phrase, the last one its
family, as `# family: batch`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from itertools import groupby
from textwrap import fill

from normexp.training.config.groups import GROUPS, conf_dir, group_choices
from normexp.training.config.slots import PLACEMENTS

HANG = 6  # of a row whose first part takes more than half of a line
WIDTH, HEAD_WIDTH = 100, 28  # characters of a line at most, and of the key at its start

USAGE = {
    "train": """\
normexp trains a model with any norm, and measures how the result depends on the batch size.

  python -m normexp.train norm=group             one cell: a norm, a model, data, sizes; 4 seeds
  python -m normexp.train -m norm=batch,group    a sweep over values; the same command resumes it
  python -m normexp.train -m experiment=NAME     a recipe of conf/experiment

A recipe may set a launcher: `- override /hydra/launcher: submitit_slurm`, below `defaults:`.
""",
    "tune": """\
normexp.tune searches hyperparameters on validation, then trains fresh seeds at the best.

  python -m normexp.tune 'lr=interval(1e-3,1)' norm=batch,group
  python -m normexp.tune 'lr=choice(0.03,0.1,0.3)' norm=batch norm_batch_size=2,32

The points are known in advance and are the same for every norm: all combinations if there are few,
otherwise scrambled Sobol points. The same command again resumes the search and trains nothing that
is recorded; a larger tune.points adds the missing ones. What is searched, and what is not:
  lr=interval(1e-3,1)              searched, evenly in log(lr)
  optim.momentum=interval(0,0.99)  searched, evenly in the value; tag(log,interval(a,b)): in its log
  norm.num_groups=choice(2,4,8)    searched; choices alone, if few enough, are all tried
  batch_size=range(8,65,8)         searched, as a choice
  norm=batch,group                 a grid: one search for each
All other keys are those of normexp.train. The runs of the search go to the study <study>-search,
the fresh seeds to <study>.
""",
    "benchmark": """\
normexp.benchmark trains a norm by fixed rules and ranks it among the shipped ones.

  python -m normexp.benchmark                                      ranking and claims, no training
  python -m normexp.benchmark norm=my_package.MyNorm               trains it and ranks it
  python -m normexp.benchmark norm=my_package.MyNorm dry_run=true  the time it needs

Training needs pip install -e '.[mnist]'; the same command again resumes it. Learning rates, sizes,
seeds and budgets are those of conf/experiment/benchmark1. To rank it among runs of your own:
python -m normexp.training.records.archive runs/benchmark1 mine.zip, then reference=mine.zip.
""",
    "check": """\
normexp.check prints the card of a norm: its properties, as measured rather than declared.

  python -m normexp.check norm=NAME            one card: the contract, then what the norm does
  python -m normexp.check norm=batch,group     a table of several; 'norm=glob(*)' for all shipped
  python -m normexp.check norm=my_package.MyNorm norm.my_knob=2
""",
    "confirm": """\
normexp.confirm trains the best tries of a study and its baseline anew, and gives verdicts on them.

  python -m normexp.confirm study=NAME best=2

The tries are ranked by their means on validation. They and the baseline are trained on seeds that
nothing in the study has used, and compared on test data, once. The same command again resumes, and
trains nothing that is recorded. The first confirmation of a study spends 3.0 % of the
5 % of false verdicts, the second 0.8 %, the j-th 5 % x 6 / (pi^2 j^2).
""",
    "evaluate": """\
normexp.evaluate evaluates the finished runs of a cell again, from the weights they kept.

  python -m normexp.evaluate run=runs/<study>/<cell_id>

Results go to evaluation.json beside each run's result.json and to a table, with a diagnosis of how
the test loss changes from training to evaluation mode.
""",
    "report": """\
normexp.report turns a study into tables, figures, a page and verdicts.

  python -m normexp.report                     writes runs/index.html: every study and its headline
  python -m normexp.report study=NAME          writes runs/NAME/report/, also while it is running
  python -m normexp.report study=[a,b]         two studies in one report, compared seed by seed
  python -m normexp.report runs.csv arm=optimizer seed=seed metric=val/accuracy
                                               runs made elsewhere, a row each; writes runs_report/
""",
    "status": """\
normexp.status says which runs of a study have ended, which are missing, and why some failed.

  python -m normexp.status study=NAME          also while it is running, from another terminal
""",
}
ENDINGS = {
    "train": """\
Options:
  -m, --multirun        several values per key (a,b or 'key=range(1,4)'), every combination
  --config-dir FOLDER   your own YAMLs, e.g. FOLDER/norm/mine.yaml for norm=mine; may be repeated
  --cfg job             show the config instead of training

Exit code: 0 finished or diverged, 1 a cell failed or was refused (the others are trained), 2 a
mistake in the command (nothing is trained), 130 interrupted with a checkpoint.

Examples:
  python -m normexp.train norm=batch norm_batch_size=2
  python -m normexp.train -m norm=batch,layer,group batch_size=4,32 replicas=8 study=sizes
  python -m normexp.train data=manual norm=rms epochs=1
  python -m normexp.train norm=my_package.MyNorm norm.my_knob=2
  python -m normexp.train -m norm=batch,group,my_package.MyNorm
""",
    "tune": """\
Exit code: as that of normexp.train.
""",
    "check": """\
Options:
  --config-dir FOLDER   your own YAMLs, e.g. FOLDER/norm/mine.yaml for norm=mine; may be repeated

Exit code: 0, 1 if a line of the contract fails, 2 for a mistake in the command.
In a test of your own: normexp.assert_contract(MyNorm)
""",
}
GROUPS_FOOTER = """\
  A choice has knobs, as in norm.num_groups=4; its YAML in conf/ explains them.
  Groups but trainer and experiment also take a class of yours: model=my_package.MyModel, or
  model=custom model._target_=my_package.MyModel, and its knobs.
  trainer.precision is 32-true, 64-true, or bf16-mixed, which trainer=gpu sets and every norm and
  model takes; 16-mixed is refused, because losses are not scaled.
"""
CHECK_KEYS = (
    ("norm=batch", "a norm, or several as a,b; its knobs as norm.num_groups=4"),
    ("eps=1e-5", "passed to a norm that has such an argument"),
)
VALUES = "Values (key=value) and their defaults"


def help_text(entry: str) -> str:
    """The help of an entry, such as `train`."""
    sections = [USAGE[entry], *_tables(entry), ENDINGS.get(entry, "")]
    text = "\n".join(sections).rstrip("\n")
    return _folded(text, min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns))


def _folded(text: str, width: int) -> str:
    """Breaks lines between words: refills paragraphs, and lets the second part of a row hang."""
    lines = []
    for is_row, group in groupby(text.splitlines(), lambda line: not line or line[0] == " "):
        if is_row:
            lines += [part for line in group for part in _folded_row(line, width)]
        else:
            lines.append(_fill(" ".join(group), width))
    return "\n".join(lines)


def _folded_row(line: str, width: int) -> list[str]:
    """The lines of a row; its second part has its own, where less than half of one is left."""
    if len(line) <= width:
        return [line]
    head = re.findall(r"^ *(?:\S.*?  +(?=\S))?", line)[0]
    second = line[len(head) :]
    if len(head) <= width // 2:
        return [_fill(line, width, len(head) if head.strip() else HANG)]
    first = [_fill(head.rstrip(), width, HANG)] if head.strip() else []
    return [*first, _fill(" " * HANG + second, width, HANG)]


def _fill(line: str, width: int, hang: int = 0) -> str:
    indent = " " * hang
    return fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _tables(entry: str) -> list[str]:
    if entry == "tune":
        return [_table(f"{VALUES}:", [(f"tune.{key}", text) for key, text in config_lines("tune")])]
    if entry != "train":
        norm_keys = CHECK_KEYS if entry == "check" else ()
        return [_table(f"{VALUES}:", [*norm_keys, *config_lines(entry, "entries.yaml")])]
    tables = [_norms()]
    for group in GROUPS[1:]:
        if group_choices(group):
            tables.append(_table(f"Choices of {group} ({group}=NAME):", _choices(group)))
    return [
        *tables,
        GROUPS_FOOTER,
        _table("Placements (placement=NAME) of norms in a transformer block:", PLACEMENTS.items()),
        _table(f"{VALUES}; data and experiment files may set their own:", config_lines()),
    ]


def config_lines(section: str = "", file: str = "config.yaml") -> list[tuple[str, str]]:
    """`key=default` and comment of each value in a YAML of conf/, at the top or under one key."""
    text, indent = (conf_dir() / file).read_text(encoding="utf-8"), ""
    if section:
        text = text.partition(f"\n{section}:\n")[2].partition("\n\n")[0]
        indent = "  "
    lines = re.findall(rf"^{indent}(\w+): (.+?)  # (.+)$", text, re.MULTILINE)
    return [(f"{key}={default.replace('???', '')}", comment) for key, default, comment in lines]


def norm_words(name: str) -> tuple[str, str]:
    """The phrase and the family of a shipped norm, from the comments at the top of its YAML."""
    header = _header("norm", name)
    phrase = re.sub(r" \(arXiv:[^)]*\)", "", header[0]).rstrip(".")
    return phrase, header[-1].removeprefix("family: ")


def _norms() -> str:
    """The norms by family, which is the last comment at the top of their YAMLs."""
    families: dict[str, list[tuple[str, str]]] = {}
    for name in group_choices("norm"):
        if "/" not in name:
            phrase, family = norm_words(name)
            families.setdefault(family, []).append((name, phrase))
    text = "Norms (norm=NAME) by family; `over` says what their statistics pool:\n"
    for family, rows in sorted(families.items()):
        text += _table(f"  {family}", rows, "    ")
    return text + "  and NAME of conf/norm/deviations: the errors of other code\n"


def _choices(group: str) -> list[tuple[str, str]]:
    """The choices of a group, with the first sentence of each YAML; then its folders of choices."""
    rows, folders = {}, {}
    for name in group_choices(group):
        folder, slash, _ = name.partition("/")
        if slash:
            folders[f"{folder}/NAME"] = f"see conf/{group}/{folder}"
            continue
        first_line = next(line for line in _header(group, name) if line[:1] != "@")
        sentence = re.split(r"(?<=\?) |(?<=\.) (?=[A-Z])", first_line)[0]
        rows[name] = sentence.rstrip(".,")
    return [*(rows | folders).items()]


def _header(group: str, name: str) -> list[str]:
    """The comments at the top of a YAML."""
    text = (conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8")
    header = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        header.append(line.lstrip("# "))
    return header


def _table(title: str, rows: Iterable[tuple[str, str]], indent: str = "  ") -> str:
    """A title, and rows of a key and a text side by side."""
    lines = [f"{indent}{head}".ljust(HEAD_WIDTH) + f"  {text}" for head, text in rows]
    return "\n".join([title, *lines]) + "\n"
