"""A sweep's cells, as Hydra's basic sweeper counts them, without its launcher and directories."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hydra.core.override_parser.types import Glob, Override
from hydra.types import RunMode
from omegaconf import DictConfig

from normexp.errors import UserError
from normexp.studies.arguments import Arguments
from normexp.studies.composing import compose, parse_overrides
from normexp.studies.config import compose_cell
from normexp.studies.folders import group_choices
from normexp.studies.validate import validate


def compose_cells(arguments: Arguments) -> list[tuple[DictConfig, dict[str, str]]]:
    """Config and chosen names of every cell that a command line asks for.

    A single cell is validated here; in a sweep `validate` is the runner's, so that a combination
    of values that cannot be trained is a row and the other cells go on.

    Raises:
        UserError: whatever does not compose, in any cell: a typo is told before the first training.
    """
    cells = list_cells(arguments)
    if len(cells) > 1:
        return [_compose_of_sweep(cell, arguments.config_dirs) for cell in cells]
    config, choices = compose_cell(cells[0], arguments.config_dirs)
    validate(config)
    return [(config, choices)]


def _compose_of_sweep(
    cell: list[str], config_dirs: Sequence[str]
) -> tuple[DictConfig, dict[str, str]]:
    try:
        return compose_cell(cell, config_dirs)
    except UserError as error:
        raise UserError(f"{error} (in the cell {' '.join(cell)})") from error


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
        UserError: a sweep that cannot be listed, or lists nothing.
    """
    fixed = _compose_fixed(overrides, parse_overrides(overrides), config_dirs)
    params = fixed.hydra.sweeper.get("params") or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *overrides]
    values: dict[str, list[str]] = {}
    for override in parse_overrides(texts):
        values[override.get_key_element()] = list(_value_texts(override, config_dirs))
    return [list(cell) for cell in itertools.product(*values.values())]


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
