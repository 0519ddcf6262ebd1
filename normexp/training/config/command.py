"""A command of train, tune or check: its overrides, its grid, and the cells that it asks for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from normexp.errors import UserError
from normexp.training.config.choices import compose_choices, is_choice, parse_overrides
from normexp.training.config.compose import compose_cell, refuse_missing
from normexp.training.config.groups import group_choices
from normexp.training.config.spec import CellSpec, join_points, shared_value
from normexp.training.config.validate import OPTIONS, UnknownKey
from normexp.training.records.source import class_flag
from normexp.words import as_typed, suggest

NOT_GLOBBED = "as_built"  # fits certain models


@dataclass(frozen=True)
class Command:
    """A parsed command line of train, tune or check; see `cli.parse_command`.

    Attributes:
        overrides: its `key=value` words, parsed, in order.
        multirun: -m was given: train every combination of the values.
        shows_config: --cfg was given: the config is printed, nothing trains.
    """

    overrides: Sequence[Override]
    multirun: bool = False
    shows_config: bool = False

    @cached_property
    def hydra(self) -> dict[str, Any]:
        """Hydra's own config for this command, by the first value of each choice.

        A swept `experiment` is left out, because each recipe would bring its own.
        """
        chosen: list[Override] = []
        for override in self.overrides:
            is_one_of_many = override.key_or_group == "experiment" and override.is_sweep_override()
            if is_choice(override) and not is_one_of_many:
                chosen += _values_of(override)[0]
        return compose_choices(chosen).hydra

    @property
    def launcher(self) -> str | None:
        """The Hydra launcher, typed or of an experiment; None for our own workers."""
        name = self.hydra["runtime"]["choices"]["hydra/launcher"]
        return None if name == "basic" else name

    def grid(self) -> list[Override]:
        """The overrides of its experiment and of the line; a typed key replaces the other."""
        params = self.hydra["sweeper"].get("params") or {}
        of_recipe = parse_overrides([f"{key}={value}" for key, value in params.items()])
        return [*{one.get_key_element(): one for one in (*of_recipe, *self.overrides)}.values()]

    def points(self, overrides: Sequence[Override]) -> list[list[Override]]:
        """Each point of a grid, with one value per key; the first override varies slowest."""
        values = map(_values_of, overrides)
        return [[*itertools.chain(*point)] for point in itertools.product(*values)]

    def lines(self) -> list[list[Override]]:
        """Each point of its grid: one without -m, unless a recipe sweeps."""
        recipe_sweeps = self.hydra["sweeper"].get("params")
        if self.multirun or recipe_sweeps or str(self.hydra["mode"]).endswith("MULTIRUN"):
            return self.points(self.grid())
        return [[*self.overrides]]

    def cell(self, overrides: Sequence[Override]) -> CellSpec:
        """The cell of a point. A value that is refused, alone or with others, is its `error`.

        Raises:
            UserError: an unknown key, choice or class.
        """
        config, choices = compose_cell(overrides)
        refuse_missing(config, choices)
        config = config | {"norm": _as_declared(config["norm"])}
        spec = CellSpec(config, choices, overrides=overrides)
        try:
            norm = spec.settings.norm
        except UserError as refused:
            return replace(spec, error=str(refused))
        if norm.may_mix_samples:
            return spec
        return replace(spec, config=config | {"norm_batch_size": None})


def _as_declared(norm: dict[str, Any]) -> dict[str, Any]:
    """The values of a norm; whether a user's class mixes samples, it may say itself."""
    target = str(norm.get("_target_"))
    if norm.get("mixes_samples") is not None or target.startswith("normexp."):
        return norm
    declared = class_flag(target, "mixes_samples")
    return norm if declared is None else norm | {"mixes_samples": declared}


def study_words(study_dir: Path) -> list[str]:
    """The words that name a study in any command."""
    named = {"study": study_dir.name, "runs_dir": str(study_dir.parent)}
    return [
        f"{key}={as_typed(value)}"
        for key, value in named.items()
        if (key, value) != ("runs_dir", "runs")
    ]


def is_searched(override: Override) -> bool:
    """True for a dimension of a search: choice, range or interval. `a,b` makes a grid instead."""
    value = override.value()
    is_list = isinstance(value, Glob) or (isinstance(value, ChoiceSweep) and value.simple_form)
    return override.is_sweep_override() and not is_list


def swept_texts(override: Override) -> list[str]:
    """The values of a sweep as they are typed; those of a range without the digits of 0.1 + 0.2."""
    texts, value = list(override.sweep_string_iterator()), override.value()
    if isinstance(value, RangeSweep):
        digits = 12 - math.floor(math.log10(abs(value.step)))
        texts = [str(round(float(text), digits)) if "." in text else text for text in texts]
    return texts


def _values_of(override: Override) -> list[list[Override]]:
    """What sets each value of an override. A glob names a folder of choices, or leaves it out."""
    if not override.is_sweep_override():
        return [[override]]
    key, value, word = override.get_key_element(), override.value(), override.input_line
    try:
        if isinstance(value, Glob):
            choices = group_choices(override.key_or_group)
            deep = "/" in str(word)  # deviations only where a pattern names their folder
            names = value.filter(
                [c for c in choices if c != NOT_GLOBBED and (deep or "/" not in c)]
            )
        else:
            names = swept_texts(override)
    except (ValueError, HydraException) as error:  # a range without a step, or an interval
        reason = "an interval has no list" if isinstance(value, IntervalSweep) else error
        raise UserError(f"{word}: {reason}; use a,b or range(...)") from error
    if not names:
        raise UserError(f"{word}: matches nothing")
    return [parse_overrides([f"{key}={name}"]) for name in names]


def compose_cells(command: Command) -> list[CellSpec]:
    """Every cell of a command once, with its config and its title.

    Points of the grid with one id are one cell. A cell whose values cannot be trained becomes a row
    of the sweep, and the other cells are trained.

    Raises:
        UserError: the single cell, or every cell of a sweep, is refused; or a word is wrong.
    """
    lines = command.lines()
    try:
        cells = [command.cell(line) for line in lines]
    except UnknownKey as unknown:
        raise _of_some_choices(command, lines, unknown) from None
    if all(cell.error for cell in cells):
        raise UserError(cells[0].error)
    for key in ("study", "runs_dir"):
        shared_value(cells, key)  # refuses several
    return join_points(cells)


def _of_some_choices(
    command: Command, lines: Sequence[Sequence[Override]], unknown: UnknownKey
) -> UserError:
    """Names the swept choices that take a key, if some do, as norm.num_groups of norm=group."""
    group = unknown.key.partition(".")[0]
    takers: dict[str, None] = {}
    for line in lines:
        with suppress(UserError):
            takers[command.cell(line).choices[group]] = None
    if not takers:
        return unknown
    choice = f"{group}={','.join(takers)}"
    return UserError(
        f"{unknown.key}: only {choice} takes it; train {choice} by itself, in the same study"
    )


def compose_norms(command: Command) -> dict[str, CellSpec]:
    """Each norm of a command of normexp.check, by its name and typed knobs.

    Raises:
        UserError: a key that has no effect on a card, or a norm that does not compose.
    """
    for override in command.overrides:
        key, word = override.key_or_group, override.input_line
        is_of_training = key in ("norm.view", "norm.half_life", "norm.running_from")
        has_no_effect = is_of_training or word == "norm=as_built"
        hint = "" if has_no_effect else suggest(key, ["norm", "eps", *OPTIONS["check"]])
        if has_no_effect or key.partition(".")[0] not in ("norm", "eps", "hydra"):
            raise UserError(f"{word}: has no effect on a card; {hint or 'it takes a norm and eps'}")
    norms = {}
    for spec in compose_cells(replace(command, multirun=True)):
        if spec.error:
            raise UserError(spec.error)
        knobs = [w.lstrip("+").removeprefix("norm.") for w in spec.typed.values()]
        knobs = [w for w in knobs if not w.startswith(("norm=", "_target_=", "hydra"))]
        norms[" ".join([spec.choices["norm"], *knobs])] = spec
    return norms
