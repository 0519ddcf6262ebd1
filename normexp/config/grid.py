"""The cells of a sweep, in the order of Hydra's basic sweeper."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from hydra.types import RunMode

from normexp.config.compose import (
    UnknownChoice,
    compose_cell,
    compose_choices,
    compose_config,
    parse_overrides,
    refuse_missing_files,
    refuse_missing_targets,
)
from normexp.config.help import group_choices
from normexp.config.identity import may_mix_samples
from normexp.config.rules import OPTIONS, suggest, validate
from normexp.config.spec import CellSpec, Command, NormSpec, config_dir_words, norm_of
from normexp.errors import UserError

NOT_GLOBBED = ("custom", "as_built")  # the first needs a target, the second certain models


def compose_cells(command: Command) -> list[CellSpec]:
    """Every cell of a command once, with its config and its title.

    Points of the grid with one id are one cell. A cell that does not compose or cannot be trained
    becomes a row of the sweep, and the other cells are trained.

    Raises:
        UserError: the single cell, or every cell of a sweep, is refused; or a value is mistyped, so
            that a group has no such choice or the user's file no such class.
    """
    lines = list_cells(command)
    shared = set(lines[0]).intersection(*lines) if len(lines) > 1 else set()
    cells, errors = [], []
    for line in lines:
        words = [word for word in line if word not in shared] or line
        title, choices = " ".join(words), dict[str, str]()
        try:
            config, choices = compose_cell(line, command.config_dirs)
            refuse_missing_targets(config)
            validate(config)
            refuse_missing_files(config)
            if not may_mix_samples(config):
                config["norm_batch_size"] = None
            cells.append(CellSpec(config, choices, title, overrides=line))
        except UnknownChoice:
            raise
        except UserError as error:
            cells.append(CellSpec(None, choices, title, str(error), line))
            errors.append(error)
    if len(errors) == len(cells):
        raise errors[0]
    return join_points(cells)


def join_points(cells: Sequence[CellSpec]) -> list[CellSpec]:
    """The cells without repetitions; a cell has the seeds of all of its points."""
    points: dict[tuple[Path | None, str], list[CellSpec]] = {}
    for cell in cells:
        points.setdefault((cell.study_dir, cell.id), []).append(cell)
    return [_join(*same) for same in points.values()]


def _join(first: CellSpec, *others: CellSpec) -> CellSpec:
    if not others:
        return first

    def shared(words: Sequence[str], of_others: Sequence[Sequence[str]]) -> list[str]:
        return [word for word in words if all(word in other for other in of_others)]

    title = shared(first.title.split(), [other.title.split() for other in others])
    return replace(
        first,
        title=" ".join(title) or first.title,
        overrides=shared(first.overrides, [other.overrides for other in others]),
        more_seeds=[seed for other in others for seed in other.seeds],
        num_points=1 + len(others),
    )


def list_cells(command: Command) -> list[list[str]]:
    """The overrides of each cell of a command.

    Without -m there is one, unless its experiment sweeps keys.

    Raises:
        UserError: a sweep without a list of values, or an experiment that normexp.tune must search.
    """
    grid = read_grid(command)
    if not (command.multirun or grid.is_multirun):
        return [list(command.overrides)]
    for override in grid.overrides:
        if is_searched(override) and override.input_line not in command.overrides:
            words = [*config_dir_words(command.config_dirs), *command.overrides]
            raise UserError(
                f"the experiment searches {override.input_line}: run python -m normexp.tune "
                + shlex.join(words)
            )
    return grid.lines(grid.overrides)


@dataclass(frozen=True)
class Grid:
    """The cells of a command: each point of the product of the overrides.

    Attributes:
        overrides: those typed and those in `hydra.sweeper.params`, one per key.
        is_multirun: the config asks for several cells, even without -m.
        config_dirs: folders with the user's own choices.
    """

    overrides: list[Override]
    is_multirun: bool
    config_dirs: Sequence[str]

    def lines(self, overrides: Sequence[Override]) -> list[list[str]]:
        """The words of each cell; the first override varies slowest.

        Raises UserError for a sweep other than `a,b`, `choice(...)`, `range(...)` and `glob(...)`.
        """
        values = [list(_words_of(override, self.config_dirs)) for override in overrides]
        return [list(point) for point in itertools.product(*values)]


def read_grid(command: Command) -> Grid:
    """The grid of a command line and its experiment; a typed key replaces the experiment's."""
    base = compose_choices(parse_overrides(command.overrides), command.config_dirs)
    params: Mapping[str, Any] = base.hydra.sweeper.get("params") or {}
    words = [*(f"{key}={value}" for key, value in params.items()), *command.overrides]
    last = {override.get_key_element(): override for override in parse_overrides(words)}
    return Grid(
        list(last.values()),
        bool(params) or base.hydra.mode == RunMode.MULTIRUN,
        command.config_dirs,
    )


def launcher_of(command: Command) -> str | None:
    """The Hydra launcher that runs the cells, typed or of an experiment; None for our workers."""
    return compose_choices(parse_overrides(command.overrides), command.config_dirs).launcher


def is_searched(override: Override) -> bool:
    """True for a dimension of a search: choice, range or interval. `a,b` makes a grid instead."""
    if not override.is_sweep_override():
        return False
    value = override.value()
    simple = isinstance(value, ChoiceSweep) and value.simple_form
    return isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep) and not simple


def _words_of(override: Override, config_dirs: Sequence[str]) -> Iterator[str]:
    """A word for each value of an override."""
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        names = [override.get_value_element_as_str()]
    elif not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: not a list of values; use range(...) or a,b")
    elif isinstance(value, Glob):
        names = _matches(value, group_choices(override.key_or_group, config_dirs))
    else:
        try:
            names = list(override.sweep_string_iterator())
        except ValueError as error:  # a range without a step
            raise UserError(f"{override.input_line}: {error}") from error
    if not names:
        raise UserError(f"{override.input_line}: matches nothing")
    yield from (f"{key}={name}" for name in names)


def _matches(glob: Glob, choices: Sequence[str]) -> list[str]:
    """The choices that match a glob; those in a subfolder only if the pattern names the folder."""
    deep = Glob([p for p in glob.include if "/" in p], glob.exclude)
    flat = [name for name in choices if "/" not in name and name not in NOT_GLOBBED]
    return glob.filter(flat) + deep.filter([name for name in choices if "/" in name])


# --- the norms of normexp.check ------------------------------------------------------------------

# Keys of a norm's YAML that have no effect on a card, and why.
WITHOUT_EFFECT_ON_CARD = {
    "norm.view": "a card always measures the norm on (N, C, *)",
    "norm.half_life": "a card has no batch size; set norm.momentum",
}


def compose_norms(command: Command) -> list[NormSpec]:
    """The norms of a command of normexp.check, one for each combination of its values.

    Raises:
        UserError: a key that has no effect on a card, or a norm that does not compose.
    """
    words = [re.sub(r"[][ ]", "", t) if t.startswith("norm=[") else t for t in command.overrides]
    for override in parse_overrides(words):
        key, text = override.key_or_group, override.input_line
        if key in WITHOUT_EFFECT_ON_CARD:
            raise UserError(f"{text}: {WITHOUT_EFFECT_ON_CARD[key]}")
        if key not in ("norm", "eps") and not key.startswith("norm."):
            known = ["norm", "eps", *OPTIONS["check"]]
            hint = suggest(key, known) or f"a card takes {', '.join(known)}"
            raise UserError(f"{text}: a card has no such key; {hint}")
        if key == "norm" and override.value() == "as_built":
            raise UserError(
                f"{text}: a card is of one norm; name the class, as torch.nn.BatchNorm2d"
            )
    norms = []
    for line in list_cells(Command(words, multirun=True, config_dirs=command.config_dirs)):
        config = compose_config(line, command.config_dirs)
        validate(config)
        refuse_missing_targets(config)
        norms.append(norm_of(config, _name_of_norm(line, config["norm"]["_target_"])))
    return norms


def _name_of_norm(line: Sequence[str], target: str) -> str:
    """`batch`, `group num_groups=4`, or the class of a custom norm with its knobs."""
    chosen, knobs = "batch", []
    for override in parse_overrides(line):
        if override.key_or_group == "norm":
            chosen = str(override.value())
        elif override.key_or_group != "norm._target_":
            knobs.append(str(override.input_line).lstrip("+").removeprefix("norm."))
    if chosen == "custom":
        chosen = target.rpartition(".")[2]
    return " ".join([chosen, *knobs])
