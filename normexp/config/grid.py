"""The cells of a sweep, in the order of Hydra's basic sweeper."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from normexp.config.compose import (
    LAUNCHERS,
    compose,
    compose_cell,
    compose_config,
    parse_overrides,
    quoted,
    unknown_launcher,
)
from normexp.config.help import group_choices
from normexp.config.rules import KEYS, OPTIONS, as_typed, check_value, suggest, validate
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


@dataclass(frozen=True)
class Grid:
    """What a command spans: each listed cell at each point of the product of the overrides.

    Attributes:
        cells: the words of each cell of the key `cells`; [[]] if it lists none.
        overrides: typed, and of the experiment's `hydra.sweeper.params`, one per key.
        is_multirun: the config says so without -m.
    """

    cells: list[list[str]]
    overrides: list[Override]
    is_multirun: bool


def read_grid(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> Grid:
    """The grid of a line and its experiment. Raises UserError for a key that has two values."""
    fixed = _compose_fixed(overrides, config_dirs)
    params = fixed.hydra.sweeper.get("params") or {}
    texts = [*(f"{key}={value}" for key, value in params.items()), *overrides]
    last = {override.get_key_element(): override for override in parse_overrides(texts)}
    if "cells" in last and last.pop("cells").is_sweep_override():
        raise UserError("cells=...: must be one list; separate its cells by commas")
    cells = _words_of_cells(fixed.cells)
    for key in [word.partition("=")[0] for words in cells for word in words]:
        if key in last:
            raise UserError(f"{last[key].input_line}: cells sets {key} too; drop one of them")
    rows = [[*words, "cells=null"] for words in cells] or [[]]
    is_multirun = bool(cells) or fixed.hydra.mode == RunMode.MULTIRUN
    return Grid(rows, list(last.values()), is_multirun)


def _words_of_cells(listed: DictConfig | None) -> list[list[str]]:
    """The overrides of each cell of the key `cells`: `norm=batch`, `lr=1.0`."""
    check_value("cells", listed, KEYS["cells"].rule)
    cells: Any = [] if listed is None else OmegaConf.to_container(listed, resolve=True)
    return [[_word(key, value) for key, value in cell.items()] for cell in cells]


def _word(key: str, value: Any) -> str:
    """An override for a plain value; a text that Hydra would read as another value is quoted."""
    text = f"{key}={as_typed(value)}"
    is_plain = not isinstance(value, str) or re.fullmatch(r"[\w./-]+", value) is not None
    if is_plain and parse_overrides([text])[0].value() == value:
        return text
    return f"{key}={quoted(str(value))}"


def list_cells(command: Command) -> list[list[str]]:
    """The overrides of each cell: one without -m, unless the line or its experiment lists `cells`
    or sets hydra.mode=MULTIRUN.
    """
    keys = {override.key_or_group for override in parse_overrides(command.overrides)}
    if command.multirun or keys & {"experiment", "hydra.mode", "cells"}:
        grid = read_grid(command.overrides, command.config_dirs)
        if command.multirun or grid.is_multirun:
            return expand_grid(grid, command)
    return [list(command.overrides)]


def expand_grid(grid: Grid, command: Command) -> list[list[str]]:
    """The overrides of each cell of a grid: listed cells slowest, then the first key.

    A sweep is `a,b`, `choice(...)`, `range(...)` or `glob(...)`. A key on the command line replaces
    the same key of the params.

    Raises:
        UserError: a sweep without a list of values, a listed cell that does not compose, or a param
            that normexp.tune must search.
    """
    for override in grid.overrides:
        if is_searched(override) and override.input_line not in command.overrides:
            words = [*config_dir_words(command.config_dirs), *command.overrides]
            raise UserError(
                f"the experiment searches {override.input_line}: run python -m normexp.tune "
                + shlex.join(words)
            )
    lines = expand_overrides(grid.overrides, command.config_dirs)
    for words in filter(None, grid.cells):
        compose_cell([*words, *lines[0]], command.config_dirs)
    return [[*words, *line] for words in grid.cells for line in lines]


def expand_overrides(
    overrides: Sequence[Override], config_dirs: Sequence[str] = ()
) -> list[list[str]]:
    """The product of the values of each override, the first slowest; see `expand_grid`."""
    values = [list(_value_texts(override, config_dirs)) for override in overrides]
    return [list(cell) for cell in itertools.product(*values)]


def launcher_of(command: Command) -> str | None:
    """The Hydra launcher that runs the cells, typed or of an experiment; None for own workers."""
    words = [text for text in command.overrides if re.match("experiment=|hydra/launcher=", text)]
    if not words:
        return None
    name = str(_compose_fixed(words, command.config_dirs).hydra.runtime.choices["hydra/launcher"])
    if name not in ("basic", *LAUNCHERS):
        raise unknown_launcher(name)
    return None if name == "basic" else name


def _compose_fixed(overrides: Sequence[str], config_dirs: Sequence[str]) -> DictConfig:
    """The config that all cells share: without the sweeps."""
    pairs = zip(overrides, parse_overrides(overrides), strict=True)
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
    for line in expand_grid(read_grid(overrides, command.config_dirs), command):
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
