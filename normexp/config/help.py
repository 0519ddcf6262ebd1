"""The texts of --help, read from the YAMLs and the table of keys. Imports neither torch nor Hydra.

A norm's YAML begins with comments: the first line is its name and a phrase, the last one its
family, as `# family: batch`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

from normexp.errors import UserError
from normexp.norms.slots import PLACEMENTS

GROUPS = (
    *("norm", "model", "data", "optim", "schedule", "callback"),
    *("trainer", "logger", "experiment"),
)
CUSTOM_GROUPS = GROUPS[:6]  # take `<group>=custom <group>._target_=...`
WIDTH = 100


def conf_dir() -> Path:
    """The folder of the shipped YAMLs: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"normexp is installed without its conf folder (beside {package})")


def group_choices(group: str, config_dirs: Sequence[str] = ()) -> list[str]:
    """The names that `group=` takes, sorted: shipped files, those of `config_dirs`, `custom`."""
    names = {"custom"} if group in (*CUSTOM_GROUPS, "logger") else set()
    return sorted(names | choice_files(group, config_dirs).keys())


def check_config_dirs(config_dirs: Sequence[str]) -> None:
    """Refuses a missing folder, and a file with the name of a shipped choice or of `custom`."""
    for config_dir in config_dirs:
        if not Path(config_dir).is_dir():
            raise UserError(f"--config-dir {config_dir}: no such folder")
        for group in GROUPS:
            folder = Path(config_dir, group)
            for name in sorted(_names_in(folder) & set(group_choices(group))):
                raise UserError(
                    f"{folder / name}.yaml: normexp has {group}={name} itself; rename yours"
                )


def choice_files(group: str, config_dirs: Sequence[str]) -> dict[str, Path]:
    """The YAML file of each choice of a group."""
    folders = [folder / group for folder in (conf_dir(), *map(Path, config_dirs))]
    return {name: folder / f"{name}.yaml" for folder in folders for name in _names_in(folder)}


def _names_in(folder: Path) -> set[str]:
    files = folder.rglob("*.yaml")
    names = {file.relative_to(folder).with_suffix("").as_posix() for file in files}
    return names - {"claims"}  # conf/experiment/claims.yaml, which is read and not trained


USAGE = {
    "train": """\
normexp trains a model with any norm, and measures how the result depends on the batch size.

  python -m normexp.train norm=group             one cell: a norm, a model, data, sizes; 4 seeds
  python -m normexp.train -m norm=batch,group    a sweep over values; the same line again resumes it
  python -m normexp.train -m experiment=NAME     a recipe of conf/experiment

A recipe may set a launcher: `- override /hydra/launcher: submitit_slurm`, below `defaults:`.
""",
    "tune": """\
normexp.tune searches hyperparameters on validation, then trains fresh seeds at the best.

  python -m normexp.tune 'lr=interval(1e-3,1)' norm=batch,group
  python -m normexp.tune 'lr=choice(0.03,0.1,0.3)' norm=batch norm_batch_size=2,32

The points are known in advance and are the same for every norm: all combinations if there are few,
otherwise scrambled Sobol points. The same line again resumes the search, and trains nothing that
is recorded; a larger tune.points adds the difference. What is searched, and what is not:
  lr=interval(1e-3,1)              searched, evenly in log(lr)
  optim.momentum=interval(0,0.99)  searched, evenly in the value; tag(log,interval(a,b)): in its log
  norm.num_groups=choice(2,4,8)    searched; choices alone, if few enough, are all tried
  batch_size=range(8,65,8)         searched, as a choice
  norm=batch,group                 a grid: one search for each
All other keys are those of normexp.train. The runs of the search go to the study <study>-search,
the fresh seeds to <study>.
""",
    "benchmark": """\
normexp.benchmark trains a norm by frozen rules, and says where it stands among the reference.

  python -m normexp.benchmark                  the table: ranking and claims; trains nothing
  python -m normexp.benchmark norm=custom norm._target_=my_package.MyNorm
  python -m normexp.benchmark norm=custom norm._target_=my_package.MyNorm dry_run=true    its cost
Needs pip install 'normexp[mnist]'. The same line again resumes. Rates, sizes, seeds and budgets are
those of conf/experiment/benchmark1. A table of runs of your own: python -m
normexp.benchmark.table RUNS_DIR FILE.npz, then reference=FILE.npz.
""",
    "check": """\
normexp.check prints the card of a norm: its properties, as measured and not as declared.

  python -m normexp.check norm=NAME            one card: contract, traits, compatibility, cost
  python -m normexp.check norm=batch,group     a table of several; norm=glob(*) for all shipped
  python -m normexp.check norm=custom norm._target_=my_package.MyNorm norm.my_knob=2
""",
    "evaluate": """\
normexp.evaluate evaluates the finished runs of a cell again, from the weights they kept.

  python -m normexp.evaluate run=runs/<study>/<cell_id>

Results go to evaluation.json beside each run's result.json, and to a table, with what carries the
test loss from training to evaluation mode.
""",
    "report": """\
normexp.report turns a study into tables, figures, a page and verdicts.

  python -m normexp.report                     writes runs/index.html: every study and its headline
  python -m normexp.report study=NAME          writes runs/NAME/report/, also while it is running
  python -m normexp.report study=[a,b]         two studies of one grid: differences, paired by seed
""",
    "status": """\
normexp.status says which runs of a study have ended, which are missing, and why some failed.

  python -m normexp.status study=NAME          also while it is running, from another terminal

""",
}
ENDINGS = {
    "train": """\
Options:
  -m, --multirun        several values per key (a,b or range(1,4)), every combination
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
In a test of your own: from normexp.checks import assert_contract; assert_contract(MyNorm)
""",
}
GROUPS_FOOTER = """\
  A choice has knobs, as in norm.num_groups=4; its YAML in conf/ explains them.
  norm=custom takes norm._target_=... and its knobs; all groups with `custom` likewise.
  trainer.precision is 32-true, 64-true, or bf16-mixed, which trainer=gpu sets and every norm and
  model takes; 16-mixed is refused, because losses are not scaled.
"""
CHECK_KEYS = (
    ("norm=batch", "a norm, or several as a,b; its knobs as norm.num_groups=4"),
    ("eps=1e-5", "passed to a norm that has such an argument"),
)
VALUES = "Values (key=value) and their defaults"


def help_text(entry: str, config_dirs: Sequence[str] = ()) -> str:
    """The help of `train`, `tune`, `check`, `evaluate`, `report` or `status`.

    Raises:
        UserError: a missing folder among `config_dirs`.
    """
    check_config_dirs(config_dirs)
    if entry == "train":
        title = f"{VALUES}; data and experiment files may set their own:"
        placements = _table(
            "Placements (placement=NAME) of norms in a transformer block:", [*PLACEMENTS.items()]
        )
        keys = _table(title, config_lines())
        choices = [(group, ", ".join(group_choices(group, config_dirs))) for group in GROUPS[1:]]
        groups = _table("Groups (group=choice):", choices, width=12) + GROUPS_FOOTER
        parts = [_norms(config_dirs), groups, placements, keys]
    elif entry == "tune":
        lines = config_lines("tune")
        parts = [_table(f"{VALUES}:", [(f"tune.{setting}", text) for setting, text in lines])]
    else:
        known = CHECK_KEYS if entry == "check" else ()
        parts = [_table(f"{VALUES}:", [*known, *config_lines(entry, "entries.yaml")])]
    return "\n".join([USAGE[entry], *parts, *filter(None, [ENDINGS.get(entry)])]).rstrip("\n")


def config_lines(section: str = "", file: str = "config.yaml") -> Iterator[tuple[str, str]]:
    """`key=default` and comment of each value in a YAML of conf/, at the top or under one key."""
    text, indent = (conf_dir() / file).read_text(encoding="utf-8"), ""
    if section:
        text, indent = text.partition(f"\n{section}:\n")[2].partition("\n\n")[0], "  "
    for match in re.finditer(rf"^{indent}(\w+): (.+?)  # (.+)$", text, re.MULTILINE):
        yield f"{match[1]}={match[2].replace('???', '')}", match[3]


def option_defaults(entry: str) -> dict[str, Any]:
    """The default of each key of an entry without a config; ??? for one that must be given."""
    import yaml

    return yaml.safe_load((conf_dir() / "entries.yaml").read_text(encoding="utf-8"))[entry]


def _norms(config_dirs: Sequence[str]) -> str:
    """The norms by family, with a phrase each; those in subfolders are counted, not listed."""
    families: dict[str, list[tuple[str, str]]] = {}
    folders: dict[str, int] = {}
    for name, path in sorted(choice_files("norm", config_dirs).items()):
        if "/" in name:
            folder = name.partition("/")[0]
            folders[folder] = folders.get(folder, 0) + 1
        else:
            family, phrase = _read_header(path)
            families.setdefault(family, []).append((name, phrase))
    lines = ["Norms (norm=NAME) by family; `over` says what their statistics pool:"]
    for family in sorted(families, key=lambda name: (name == "other", name)):
        lines.append(f"  {family}")
        for name, phrase in families[family]:
            lines.append(f"    {name:<22}{shorten(phrase, WIDTH - 26, placeholder=' ...')}")
    for folder, count in folders.items():
        lines.append(f"  {folder}/NAME: {count} more, each explained in conf/norm/{folder}/")
    return "\n".join(lines) + "\n"


def _read_header(path: Path) -> tuple[str, str]:
    """Family and phrase of a norm, from the comments at the top of its YAML."""
    header = itertools.takewhile(
        lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()
    )
    lines = [line.lstrip("# ") for line in header] or [""]
    family = lines[-1].removeprefix("family: ") if "family: " in lines[-1] else "other"
    return family, re.sub(r" \(arXiv:[^)]*\)", "", lines[0]).rstrip(".")


def _table(title: str, rows: Iterable[tuple[str, str]], width: int = 28) -> str:
    """Rows of a head and a text, side by side; `width` characters for the heads."""
    lines = [title]
    for head, text in rows:
        first = f"  {head:<{width}}" if len(head) < width else f"  {head}  "
        rest = " " * (width + 2)
        lines.append(fill(text, WIDTH, initial_indent=first, subsequent_indent=rest))
    return "\n".join(lines) + "\n"
