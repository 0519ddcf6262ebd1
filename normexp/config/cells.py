"""A command and the cells that it asks for: its grid, each cell's config and id."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import join
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.errors import HydraException

from normexp.batching.sizes import SIZES
from normexp.config.compose import (
    Mistyped,
    compose_cell,
    compose_choices,
    parse_overrides,
    refuse_missing_targets,
    refuse_missing_values,
)
from normexp.config.help import group_choices
from normexp.config.identity import (
    cell_id,
    defining_values,
    id_of,
    identity_of,
    may_mix_samples,
    sources_of,
)
from normexp.config.process import started_processes
from normexp.config.schema import OPTIONS, in_identity, sees_validations, validate
from normexp.config.words import suggest
from normexp.errors import UserError

NOT_GLOBBED = ("custom", "as_built")  # the first needs a target, the second certain models


@dataclass(frozen=True)
class Command:
    """A parsed command line of train, tune or check; see `cli.parse_command`.

    Attributes:
        overrides: its `key=value` words, in order.
        multirun: -m was given: train every combination of the values.
        config_dirs: folders with the user's own YAMLs.
        shows_config: --cfg was given: the config is printed, nothing trains.
    """

    overrides: list[str]
    multirun: bool = False
    config_dirs: list[str] = field(default_factory=list)
    shows_config: bool = False

    def grid(self) -> list[Override]:
        """The words of the line and of its experiment; a typed key replaces the other."""
        base = compose_choices(parse_overrides(self.overrides), self.config_dirs)
        params: Mapping[str, Any] = base.hydra.sweeper.get("params") or {}
        words = [*(f"{key}={value}" for key, value in params.items()), *self.overrides]
        return [*{one.get_key_element(): one for one in parse_overrides(words)}.values()]

    def points(self, overrides: Sequence[Override]) -> list[list[str]]:
        """The words of each point of a grid; the first override varies slowest."""
        values = [_words_of(override, self.config_dirs) for override in overrides]
        return [list(point) for point in itertools.product(*values)]

    @property
    def launcher(self) -> str | None:
        """The Hydra launcher, typed or of an experiment; None for our own workers."""
        base = compose_choices(parse_overrides(self.overrides), self.config_dirs)
        name = base.hydra.runtime.choices["hydra/launcher"]
        return None if name == "basic" else name


def study_words(study_dir: Path) -> list[str]:
    """The words that name a study in any command, quoted where Hydra could not read them."""
    named = {"study": study_dir.name, "runs_dir": str(study_dir.parent)}
    plain = re.compile(r"[\w./ -]+", re.ASCII)
    return [
        f"{key}={value if plain.fullmatch(value) else json.dumps(value, ensure_ascii=False)}"
        for key, value in named.items()
        if (key, value) != ("runs_dir", "runs")
    ]


def is_searched(override: Override) -> bool:
    """True for a dimension of a search: choice, range or interval. `a,b` makes a grid instead."""
    value = override.value()
    is_list = isinstance(value, Glob) or (isinstance(value, ChoiceSweep) and value.simple_form)
    return override.is_sweep_override() and not is_list


def _words_of(override: Override, config_dirs: Sequence[str]) -> list[str]:
    """A word for each value of an override. A glob names a folder of choices, or leaves it out."""
    key, value, word = override.get_key_element(), override.value(), override.input_line
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    try:
        if isinstance(value, Glob):
            choices = group_choices(override.key_or_group, config_dirs)
            deep = "/" in str(word)  # deviations only where a pattern names their folder
            choices = [c for c in choices if c not in NOT_GLOBBED and (deep or "/" not in c)]
            names = value.filter(choices)
        else:
            names = list(override.sweep_string_iterator())
    except (ValueError, HydraException) as error:  # a range without a step, or an interval
        raise UserError(f"{word}: {error}; use a,b or range(...)") from error
    if not names:
        raise UserError(f"{word}: matches nothing")
    return [f"{key}={name}" for name in names]


# --- Cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellSpec:
    """One cell as a command line specifies it.

    Attributes:
        config: the values of all keys; None if it cannot be trained, and `error` says why.
        choices: the choice in each config group, as `compose_cell` returns them; {} if it does not
            compose.
        overrides: its typed words, one value per key.
        more_seeds: of other points of its grid that are the same cell.
        num_points: of its grid that are this cell.
    """

    config: dict[str, Any] | None
    choices: Mapping[str, str]
    error: str = ""
    overrides: Sequence[str] = ()
    more_seeds: Sequence[int] = ()
    num_points: int = 1

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The canonical content of the cell, which its id hashes; see `config.identity`.

        Of a cell that does not compose: its words.
        """
        if self.config is None:
            return {"overrides": list(self.overrides)}
        return identity_of(self.values, self.choices)

    @cached_property
    def defining(self) -> dict[str, Any]:
        """The values that define the training, as the config has them."""
        return defining_values(self.values)

    @cached_property
    def id(self) -> str:
        """The id of the cell: a readable slug and a hash of its identity."""
        if self.config is None:
            return cell_id(self.identity, [])
        _ = self.sources  # of the same moment
        return id_of(self.values, self.choices, self.identity)

    @cached_property
    def sources(self) -> dict[str, str]:
        """The digest of each of the user's own source files that the id counts, by path."""
        return {} if self.config is None else sources_of(self.values)

    @property
    def title(self) -> str:
        """Its norm, sizes and other words: `norm=batch batch_size=32 norm_batch_size=2 epochs=3`.

        Independent of the other cells of the command; leaves out the study, folders and seeds.
        """
        named = {"norm": self.choices.get("norm"), **({} if self.config is None else self.sizes)}
        words = [f"{key}={value}" for key, value in named.items() if value is not None]
        typed = {text.lstrip("+").partition("=")[0]: text for text in self.overrides}
        counted = {
            key for key in typed if key != "trainer" and in_identity(re.split("[/@]", key)[0])
        }
        if self.config is not None and sees_validations(self.config):
            counted.add("val_every_epochs")
        named = named if words else {}
        words += [text for key, text in typed.items() if key in counted and key not in named]
        return " ".join(words or self.overrides)

    @property
    def values(self) -> dict[str, Any]:
        """The config of a cell that composes."""
        assert self.config is not None, self.error
        return self.config

    @property
    def sizes(self) -> dict[str, Any]:
        """The three sizes as typed."""
        return {key: self.values[key] for key in SIZES}

    @property
    def lr(self) -> float:
        """The learning rate as typed; `lr_rule` may scale it."""
        return float(self.values["lr"])

    @property
    def seeds(self) -> list[int]:
        """The seeds to train; none if the config does not compose."""
        if self.config is None:
            return []
        first, replicas = self.config["seed"], self.config["replicas"]
        return sorted({*range(first, first + replicas), *self.more_seeds})

    @property
    def study_dir(self) -> Path | None:
        return None if self.config is None else Path(self.config["runs_dir"], self.config["study"])

    @property
    def directory(self) -> Path:
        """The folder of the cell in its study. The config must compose."""
        assert self.study_dir is not None
        return self.study_dir / self.id


def compose_cells(command: Command) -> list[CellSpec]:
    """Every cell of a command once, with its config and its title.

    Points of the grid with one id are one cell. A cell that does not compose or cannot be trained
    becomes a row of the sweep, and the other cells are trained.

    Raises:
        UserError: the single cell, or every cell of a sweep, is refused; or a value is mistyped, so
            that a group has no such choice or the user's file no such class.
    """
    cells = [_compose(line, command.config_dirs) for line in list_cells(command)]
    if all(cell.error for cell in cells):
        raise UserError(cells[0].error)
    return join_points(cells)


def join_points(cells: Sequence[CellSpec]) -> list[CellSpec]:
    """Each cell once, with the seeds of all of its points and the words that they share."""
    points: dict[tuple[Path | None, str], list[CellSpec]] = {}
    for cell in cells:
        points.setdefault((cell.study_dir, cell.id), []).append(cell)
    return [
        replace(
            first,
            overrides=[
                word for word in first.overrides if all(word in o.overrides for o in others)
            ],
            more_seeds=[seed for other in others for seed in other.seeds],
            num_points=1 + len(others),
        )
        for first, *others in points.values()
    ]


def _compose(line: list[str], config_dirs: Sequence[str]) -> CellSpec:
    choices: dict[str, str] = {}
    try:
        config, choices = compose_cell(line, config_dirs)
        refuse_missing_targets(config)
        validate(config)
        refuse_missing_values(config)
    except Mistyped:
        raise
    except UserError as error:
        return CellSpec(None, choices, str(error), line)
    if not may_mix_samples(config):
        config["norm_batch_size"] = None
    return CellSpec(config, choices, overrides=line)


def list_cells(command: Command) -> list[list[str]]:
    """The overrides of each point of a command's grid: one without -m, unless a recipe sweeps."""
    parsed = parse_overrides(command.overrides)
    hydra = compose_choices(parsed, command.config_dirs).hydra
    if command.multirun or hydra.sweeper.get("params") or str(hydra.mode).endswith("MULTIRUN"):
        return command.points(command.grid())
    return [list(command.overrides)]


# --- The norms of normexp.check -------------------------------------------------------------------


def compose_norms(command: Command) -> dict[str, dict[str, Any]]:
    """The config of each norm of a command of normexp.check, by its name and typed knobs.

    Raises:
        UserError: a key that has no effect on a card, or a norm that does not compose.
    """
    for word in command.overrides:
        key = word.lstrip("+").partition("=")[0]
        has_no_effect = key in ("norm.view", "norm.half_life") or word == "norm=as_built"
        if has_no_effect or key.partition(".")[0] not in ("norm", "eps"):
            takes = ["norm", "eps", *OPTIONS["check"]]
            hint = suggest(key, takes) or "a card takes a norm, its knobs and eps"
            raise UserError(f"{word}: has no effect on a card; {hint}")
    norms = {}
    for line in list_cells(replace(command, multirun=True)):
        config, choices = compose_cell(line, command.config_dirs)
        validate(config)
        refuse_missing_targets(config)
        words = [word.lstrip("+").removeprefix("norm.") for word in line]
        knobs = [word for word in words if not word.startswith(("norm=", "_target_="))]
        norms[" ".join([choices["norm"], *knobs])] = config
    return norms


# --- Who trains it --------------------------------------------------------------------------------


def check_processes(cells: Sequence[CellSpec], words: Sequence[str]) -> int | None:
    """The rank of this process; None if it is alone.

    Raises:
        UserError: torchrun or srun has not started a process for each device of the only cell.
    """
    rank, started = started_processes()
    for trainer in (cell.config["trainer"] for cell in cells if cell.config is not None):
        devices, num_nodes = trainer["devices"], trainer["num_nodes"]
        if devices * num_nodes == started:
            continue
        place = f"--nnodes {num_nodes} --nproc-per-node {devices}".replace("--nnodes 1 ", "")
        remedy = f"type torchrun {place} -m normexp.train {join(words[1:])}"
        raise UserError(
            f"trainer.devices={devices}, trainer.num_nodes={num_nodes}: needs as many processes, "
            f"and this command has {started}; "
            + (remedy if devices * num_nodes > 1 else "drop torchrun or srun")
        )
    if started > 1 and len(cells) > 1:
        raise UserError(f"{len(cells)} cells in one torchrun or srun: start one cell each")
    return rank if started > 1 else None
