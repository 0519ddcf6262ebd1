"""A sweep's cells, as Hydra's basic sweeper counts them, without its launcher and directories."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from hydra.types import RunMode
from omegaconf import DictConfig

from normexp.config.arguments import Arguments, config_dir_words
from normexp.config.compose import compose, compose_cell, parse_overrides
from normexp.config.help import group_choices
from normexp.config.rules import validate
from normexp.config.spec import CellSpec
from normexp.errors import UserError


def compose_cells(arguments: Arguments) -> list[CellSpec]:
    """Every cell that a command line asks for, with its config and its title.

    A single cell is validated here; in a sweep `validate` is the runner's. A combination of values
    that does not compose, or cannot be trained, is a row of the sweep, and the other cells go on.

    Raises:
        UserError: a single cell, or no cell of a sweep, composes.
    """
    lines = list_cells(arguments)
    if len(lines) > 1:
        return compose_sweep(lines, arguments.config_dirs)
    config, choices = compose_cell(lines[0], arguments.config_dirs)
    validate(config)
    return [CellSpec(config, choices, title=" ".join(lines[0]), overrides=lines[0])]


def compose_sweep(
    lines: Sequence[Sequence[str]], config_dirs: Sequence[str] = ()
) -> list[CellSpec]:
    """The cells of some lists of overrides. Raises the first UserError where none composes."""
    cells, errors = [], []
    for line, title in zip(lines, titles_of(lines), strict=True):
        try:
            config, choices = compose_cell(line, config_dirs)
            cells.append(CellSpec(config, choices, title, overrides=line))
        except UserError as error:
            cells.append(CellSpec(None, {}, title, str(error), line))
            errors.append(error)
    if len(errors) == len(cells):
        raise errors[0]
    return cells


def titles_of(lines: Sequence[Sequence[str]]) -> list[str]:
    """The overrides that set each line apart from the others; all of them where none does."""
    shared = set(lines[0]).intersection(*map(set, lines))
    own = [[text for text in line if text not in shared] for line in lines]
    return [" ".join(texts or line) for texts, line in zip(own, lines, strict=True)]


def list_cells(arguments: Arguments) -> list[list[str]]:
    """Overrides of each cell: one without -m, unless an experiment sets hydra.mode=MULTIRUN."""
    overrides, config_dirs = arguments.overrides, arguments.config_dirs
    if arguments.multirun:
        return expand_grid(overrides, config_dirs)
    parsed = parse_overrides(overrides)
    if any(override.key_or_group in ("experiment", "hydra.mode") for override in parsed):
        mode = _compose_fixed(overrides, parsed, config_dirs).hydra.mode
        if mode == RunMode.MULTIRUN:
            return expand_grid(overrides, config_dirs)
    return [list(overrides)]


def expand_grid(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[list[str]]:
    """The product of all sweeps in `overrides` and in `hydra.sweeper.params`; first key slowest.

    A sweep is `a,b`, `choice(...)`, `range(...)` or `glob(...)`. A key of the command line replaces
    the same key of the params. Cells are not composed: one may be refused while others go on.

    Raises:
        UserError: a sweep that cannot be listed, or lists nothing; a param that is to be searched.
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
    """The overrides of a line and of its experiment's `hydra.sweeper.params`, one for each key."""
    fixed = _compose_fixed(overrides, parse_overrides(overrides), config_dirs)
    params = fixed.hydra.sweeper.get("params") or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *overrides]
    last = {override.get_key_element(): override for override in parse_overrides(texts)}
    return list(last.values())


def expand_overrides(
    overrides: Sequence[Override], config_dirs: Sequence[str] = ()
) -> list[list[str]]:
    """The product of the values of each override; the first slowest. Raises as `expand_grid`."""
    values = [list(_value_texts(override, config_dirs)) for override in overrides]
    return [list(cell) for cell in itertools.product(*values)]


def _compose_fixed(
    overrides: Sequence[str], parsed: Sequence[Override], config_dirs: Sequence[str]
) -> DictConfig:
    """The config of what every cell shares."""
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
        choices = group_choices(override.key_or_group, config_dirs)
        names = value.filter([name for name in choices if name != "custom"])  # needs a target
    else:
        names = list(override.sweep_string_iterator())
    if not names:
        raise UserError(f"{override.input_line}: matches nothing")
    yield from (f"{key}={name}" for name in names)


def is_searched(override: Override) -> bool:
    """Whether an override is a dimension: choice, range or interval; `a,b` is a grid instead."""
    if not override.is_sweep_override():
        return False
    value = override.value()
    simple = isinstance(value, ChoiceSweep) and value.simple_form
    return isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep) and not simple
