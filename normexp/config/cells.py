"""A command and the cells that it asks for: its grid, each cell's config and id."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from shlex import join
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.errors import HydraException

from normexp.batching.sizes import SIZES
from normexp.config.compose import (
    compose_cell,
    compose_choices,
    is_choice,
    parse_overrides,
    refuse_missing,
)
from normexp.config.identity import id_of, identity_of, may_mix_samples, sources_of
from normexp.config.schema import OPTIONS, group_choices, in_identity, validate
from normexp.config.words import as_typed, suggest
from normexp.errors import UserError

NOT_GLOBBED = "as_built"  # fits certain models


@dataclass(frozen=True)
class Command:
    """A parsed command line of train, tune or check; see `cli.parse_command`.

    Attributes:
        overrides: its `key=value` words, in order.
        multirun: -m was given: train every combination of the values.
        shows_config: --cfg was given: the config is printed, nothing trains.
    """

    overrides: list[str]
    multirun: bool = False
    shows_config: bool = False

    @cached_property
    def hydra(self) -> dict[str, Any]:
        """Hydra's own config of the command; that of several recipes is of none."""
        chosen = [
            _words_of(one)[0]
            for one in parse_overrides(self.overrides)
            if is_choice(one) and not (one.is_sweep_override() and one.key_or_group == "experiment")
        ]
        return compose_choices(parse_overrides(chosen))["hydra"]

    @property
    def launcher(self) -> str | None:
        """The Hydra launcher, typed or of an experiment; None for our own workers."""
        name = self.hydra["runtime"]["choices"]["hydra/launcher"]
        return None if name == "basic" else name

    def grid(self) -> list[Override]:
        """The words of the line and of its experiment; a typed key replaces the other."""
        params = self.hydra["sweeper"].get("params") or {}
        words = [*(f"{key}={value}" for key, value in params.items()), *self.overrides]
        return [*{one.get_key_element(): one for one in parse_overrides(words)}.values()]

    def points(self, overrides: Sequence[Override]) -> list[list[str]]:
        """The words of each point of a grid; the first override varies slowest."""
        return [list(point) for point in itertools.product(*map(_words_of, overrides))]

    def lines(self) -> list[list[str]]:
        """The words of each point of its grid: one without -m, unless a recipe sweeps."""
        sweeps = self.hydra["sweeper"].get("params") or str(self.hydra["mode"]).endswith("MULTIRUN")
        return self.points(self.grid()) if self.multirun or sweeps else [[*self.overrides]]

    def cell(self, words: Sequence[str]) -> CellSpec:
        """The cell of a point. Values that cannot be trained together are its `error`.

        Raises:
            UserError: a word that is wrong in itself: an unknown key, choice or class.
        """
        config, choices = compose_cell(words)
        refuse_missing(config)
        error = ""
        try:
            validate(config)
            if not may_mix_samples(config):
                config["norm_batch_size"] = None
        except UserError as refused:
            error = str(refused)
        return CellSpec(config, choices, error, words)


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


def _words_of(override: Override) -> list[str]:
    """A word for each value of an override. A glob names a folder of choices, or leaves it out."""
    key, value, word = override.get_key_element(), override.value(), override.input_line
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    try:
        if isinstance(value, Glob):
            choices = group_choices(override.key_or_group)
            deep = "/" in str(word)  # deviations only where a pattern names their folder
            names = value.filter(
                [c for c in choices if c != NOT_GLOBBED and (deep or "/" not in c)]
            )
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
        config: the values of all keys.
        choices: the choice in each config group, as `compose_cell` returns them.
        error: why it cannot be trained; empty if it can.
        overrides: its typed words, one value per key.
        more_seeds: of other points of its grid that are the same cell.
        num_points: of its grid that are this cell.
    """

    config: dict[str, Any]
    choices: dict[str, str]
    error: str = ""
    overrides: Sequence[str] = ()
    more_seeds: Sequence[int] = ()
    num_points: int = 1

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The canonical content of the cell, which its id hashes; if refused, its words."""
        if self.error:
            return {"overrides": list(self.overrides)}
        return identity_of(self.config, self.choices)

    @cached_property
    def id(self) -> str:
        """The id of the cell: a readable slug and a hash of its identity."""
        _ = self.sources  # of the same moment
        return id_of(self.config, self.choices, self.identity)

    @cached_property
    def sources(self) -> dict[str, str]:
        """The digest of each of the user's own source files that the id counts, by path."""
        return sources_of(self.config)

    @property
    def title(self) -> str:
        """Its norm, sizes and other words: `norm=batch batch_size=32 norm_batch_size=2 epochs=3`.

        Independent of the other cells of the command; leaves out the study, folders and seeds.
        """
        named = {"norm": self.choices["norm"], **self.sizes}
        typed = {text.lstrip("+").partition("=")[0]: text for text in self.overrides}
        words = [f"{key}={value}" for key, value in named.items() if value is not None]
        words += [
            text
            for key, text in typed.items()
            if key not in (*named, "trainer") and in_identity(re.split("[/@]", key)[0])
        ]
        return " ".join(words)

    @property
    def sizes(self) -> dict[str, Any]:
        """The three sizes as typed."""
        return {key: self.config[key] for key in SIZES}

    @property
    def lr(self) -> float:
        """The learning rate as typed; `lr_rule` may scale it."""
        return float(self.config["lr"])

    @property
    def seeds(self) -> list[int]:
        """The seeds to train; none if the cell is refused."""
        first, replicas = self.config["seed"], self.config["replicas"]
        return [] if self.error else sorted({*range(first, first + replicas), *self.more_seeds})

    @property
    def study_dir(self) -> Path:
        return Path(self.config["runs_dir"], str(self.config["study"]))

    @property
    def directory(self) -> Path:
        """The folder of the cell in its study."""
        return self.study_dir / self.id


def compose_cells(command: Command) -> list[CellSpec]:
    """Every cell of a command once, with its config and its title.

    Points of the grid with one id are one cell. A cell whose values cannot be trained becomes a row
    of the sweep, and the other cells are trained.

    Raises:
        UserError: the single cell, or every cell of a sweep, is refused; or a word is wrong.
    """
    cells = [command.cell(line) for line in command.lines()]
    if all(cell.error for cell in cells):
        raise UserError(cells[0].error)
    if len({cell.study_dir for cell in cells}) > 1:
        raise UserError("study and runs_dir must be the same in all cells of a command")
    return join_points(cells)


def join_points(cells: Sequence[CellSpec]) -> list[CellSpec]:
    """Each cell once, with the seeds of all of its points and the words that they share."""
    points: dict[Path, list[CellSpec]] = {}
    for cell in cells:
        points.setdefault(cell.directory, []).append(cell)
    return [
        first
        if not others
        else replace(
            first,
            overrides=[
                word for word in first.overrides if all(word in o.overrides for o in others)
            ],
            more_seeds=[seed for other in others for seed in other.seeds],
            num_points=1 + len(others),
        )
        for first, *others in points.values()
    ]


def compose_norms(command: Command) -> dict[str, dict[str, Any]]:
    """The config of each norm of a command of normexp.check, by its name and typed knobs.

    Raises:
        UserError: a key that has no effect on a card, or a norm that does not compose.
    """
    for word in command.overrides:
        key = word.lstrip("+").partition("=")[0]
        has_no_effect = key in ("norm.view", "norm.half_life") or word == "norm=as_built"
        if has_no_effect or key.partition(".")[0] not in ("norm", "eps", "hydra"):
            hint = suggest(key, ["norm", "eps", *OPTIONS["check"]])
            raise UserError(f"{word}: has no effect on a card; {hint or 'it takes a norm and eps'}")
    norms = {}
    for spec in compose_cells(replace(command, multirun=True)):
        if spec.error:
            raise UserError(spec.error)
        knobs = [w.lstrip("+").removeprefix("norm.") for w in spec.overrides]
        knobs = [w for w in knobs if not w.startswith(("norm=", "_target_=", "hydra"))]
        norms[" ".join([spec.choices["norm"], *knobs])] = spec.config
    return norms


# --- Who trains it --------------------------------------------------------------------------------

# Variables of torchrun and of srun: number of processes, index of this process, and a variable that
# only a started process has. (SLURM also sets the first two in a batch script.)
VARIABLES = (("WORLD_SIZE", "RANK", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"))


def started_processes() -> tuple[int, int]:
    """The rank of this process, and how many torchrun or srun has started; (0, 1) without them."""
    for size, index, proof in VARIABLES:
        if proof in os.environ and index in os.environ:
            return int(os.environ[index]), int(os.environ.get(size, 1))
    return 0, 1


def check_processes(cells: Sequence[CellSpec], words: Sequence[str]) -> int | None:
    """The rank of this process; None if it is alone.

    Raises:
        UserError: torchrun or srun has not started a process for each device of the only cell.
    """
    rank, started = started_processes()
    for trainer in (cell.config["trainer"] for cell in cells if not cell.error):
        devices, num_nodes = trainer["devices"], trainer["num_nodes"]
        if devices * num_nodes != started:
            remedy = f"type torchrun --nnodes {num_nodes} --nproc-per-node {devices} "
            raise UserError(
                f"trainer.devices={devices}, trainer.num_nodes={num_nodes}: needs as many "
                f"processes, and this command has {started}; "
                + (
                    f"{remedy}-m normexp.train {join(words[1:])}"
                    if devices * num_nodes > 1
                    else "drop torchrun or srun"
                )
            )
    if started > 1 and len(cells) > 1:
        raise UserError(f"{len(cells)} cells in one torchrun or srun: start one cell each")
    return rank if started > 1 else None
