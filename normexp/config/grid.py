"""The cells of a sweep, in the order of Hydra's basic sweeper."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from hydra.types import RunMode
from omegaconf import DictConfig

from normexp.config.compose import compose, compose_cell, compose_config, parse_overrides
from normexp.config.help import group_choices
from normexp.config.rules import OPTIONS, suggest, validate
from normexp.config.spec import CellSpec, Command, NormSpec, config_dir_words
from normexp.errors import UserError


def compose_cells(command: Command) -> list[CellSpec]:
    """Every cell of a command, with its config and its title.

    A single cell is validated here, the cells of a sweep when they run. A cell that does not
    compose or cannot be trained becomes a row of the sweep, and the other cells are trained.

    Raises:
        UserError: the single cell, or every cell of a sweep, is refused.
    """
    lines = list_cells(command)
    if len(lines) > 1:
        return _compose_sweep(lines, command.config_dirs)
    config, choices = compose_cell(lines[0], command.config_dirs)
    validate(config)
    return [CellSpec(config, choices, title=" ".join(lines[0]), overrides=lines[0])]


def _compose_sweep(lines: Sequence[Sequence[str]], config_dirs: Sequence[str]) -> list[CellSpec]:
    """The cells of several lists of overrides. Raises the first UserError if none composes."""
    cells, errors = [], []
    for line, title in zip(lines, _titles_of(lines), strict=True):
        try:
            config, choices = compose_cell(line, config_dirs)
            cells.append(CellSpec(config, choices, title, overrides=line))
        except UserError as error:
            cells.append(CellSpec(None, {}, title, str(error), line))
            errors.append(error)
    if len(errors) == len(cells):
        raise errors[0]
    return cells


def _titles_of(lines: Sequence[Sequence[str]]) -> list[str]:
    """The overrides of each line that differ between lines; all of them if none differs."""
    shared = set(lines[0]).intersection(*map(set, lines))
    own = [[text for text in line if text not in shared] for line in lines]
    return [" ".join(texts or line) for texts, line in zip(own, lines, strict=True)]


def list_cells(command: Command) -> list[list[str]]:
    """The overrides of each cell: one without -m, unless an experiment sets hydra.mode=MULTIRUN."""
    overrides, config_dirs = command.overrides, command.config_dirs
    if command.multirun:
        return expand_grid(overrides, config_dirs)
    parsed = parse_overrides(overrides)
    if any(override.key_or_group in ("experiment", "hydra.mode") for override in parsed):
        mode = _compose_fixed(overrides, parsed, config_dirs).hydra.mode
        if mode == RunMode.MULTIRUN:
            return expand_grid(overrides, config_dirs)
    return [list(overrides)]


def expand_grid(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[list[str]]:
    """The product of all sweeps in `overrides` and in `hydra.sweeper.params`; first key slowest.

    A sweep is `a,b`, `choice(...)`, `range(...)` or `glob(...)`. A key on the command line replaces
    the same key of the params. Cells are not composed here.

    Raises:
        UserError: a sweep without a list of values, or a param that normexp.tune must search.
    """
    merged = with_params(overrides, config_dirs)
    for override in merged:
        if is_searched(override) and override.input_line not in overrides:
            raise UserError(
                f"the experiment searches {override.input_line}: run python -m normexp.tune "
                + shlex.join([*config_dir_words(config_dirs), *overrides])
            )
    return expand_overrides(merged, config_dirs)


def with_params(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[Override]:
    """The overrides of a line and of its experiment's `hydra.sweeper.params`, one per key."""
    fixed = _compose_fixed(overrides, parse_overrides(overrides), config_dirs)
    params = fixed.hydra.sweeper.get("params") or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *overrides]
    last = {override.get_key_element(): override for override in parse_overrides(texts)}
    return list(last.values())


def expand_overrides(
    overrides: Sequence[Override], config_dirs: Sequence[str] = ()
) -> list[list[str]]:
    """The product of the values of each override, the first slowest; see `expand_grid`."""
    values = [list(_value_texts(override, config_dirs)) for override in overrides]
    return [list(cell) for cell in itertools.product(*values)]


def _compose_fixed(
    overrides: Sequence[str], parsed: Sequence[Override], config_dirs: Sequence[str]
) -> DictConfig:
    """The config that all cells share: without the sweeps."""
    pairs = zip(overrides, parsed, strict=True)
    fixed = [text for text, override in pairs if not override.is_sweep_override()]
    return compose(fixed, config_dirs)


def _value_texts(override: Override, config_dirs: Sequence[str]) -> Iterator[str]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        value = "" if override.is_delete() else f"={override.get_value_element_as_str()}"
        yield key + value
        return
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: not a list of values; use range(...) or a,b")
    value = override.value()
    if isinstance(value, Glob):
        names = _matches(value, group_choices(override.key_or_group, config_dirs))
    else:
        names = list(override.sweep_string_iterator())
    if not names:
        raise UserError(f"{override.input_line}: matches nothing")
    yield from (f"{key}={name}" for name in names)


def _matches(glob: Glob, choices: Sequence[str]) -> list[str]:
    """The choices that match a glob; choices in a subfolder need a pattern with that folder."""
    deep = Glob([p for p in glob.include if "/" in p], glob.exclude)
    flat = [name for name in choices if "/" not in name and name != "custom"]  # needs a target
    return glob.filter(flat) + deep.filter([name for name in choices if "/" in name])


def is_searched(override: Override) -> bool:
    """True for a dimension of a search: choice, range or interval. `a,b` is a grid instead."""
    if not override.is_sweep_override():
        return False
    value = override.value()
    simple = isinstance(value, ChoiceSweep) and value.simple_form
    return isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep) and not simple


# Keys of a norm's YAML that have no effect on a card, and why.
NOT_OF_A_CARD = {
    "norm.view": "a card always measures the norm on (N, C, *)",
    "norm.half_life": "a card has no batch size; set norm.momentum",
}


def compose_norms(command: Command) -> list[NormSpec]:
    """The norms of a command of normexp.check, one for each combination of its values.

    Raises:
        UserError: a key that has no effect on a card, or a norm that does not compose.
    """
    overrides = [_as_sweep(text) for text in command.overrides]
    for override in parse_overrides(overrides):
        key, text = override.key_or_group, override.input_line
        if key in NOT_OF_A_CARD:
            raise UserError(f"{text}: {NOT_OF_A_CARD[key]}")
        if key not in ("norm", "eps") and not key.startswith("norm."):
            known = ["norm", "eps", *OPTIONS["check"]]
            hint = suggest(key, known) or f"a card takes {', '.join(known)}"
            raise UserError(f"{text}: no key of a card; {hint}")
    norms = []
    for line in expand_grid(overrides, command.config_dirs):
        config = compose_config(line, command.config_dirs)
        validate(config)
        norms.append(NormSpec(_name_of_norm(line, config), config))
    return norms


def _as_sweep(text: str) -> str:
    """`norm=[a,b]` as `norm=a,b`."""
    is_list = text.startswith("norm=[") and text.endswith("]")
    return text.replace("[", "").replace("]", "").replace(" ", "") if is_list else text


def _name_of_norm(line: Sequence[str], config: DictConfig) -> str:
    """`batch`, `group num_groups=4`, or the class of a custom norm with its knobs."""
    chosen, knobs = "batch", []
    for text, override in zip(line, parse_overrides(line), strict=True):
        if override.key_or_group == "norm":
            chosen = str(override.value())
        elif override.key_or_group != "norm._target_":
            knobs.append(text.lstrip("+").removeprefix("norm."))
    if chosen == "custom":
        chosen = str(config.norm["_target_"]).rpartition(".")[2]
    return " ".join([chosen, *knobs])
