"""A command and the cells that it asks for, with their ids. Imports neither torch nor Hydra."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import join
from typing import Any

from normexp.batching.sizes import SIZES
from normexp.config.process import started_processes
from normexp.config.rules import in_identity, sees_validations
from normexp.errors import UserError
from normexp.norms.slots import SLOTS


@dataclass(frozen=True)
class Command:
    """A parsed command line of train, tune or check; see `cli.parse_command`.

    Attributes:
        overrides: its `key=value` words, in order.
        multirun: -m was given: train every combination of the values.
        config_dirs: folders with the user's own YAMLs.
        shows_config: --cfg or --info was given: Hydra answers, nothing trains.
    """

    overrides: list[str]
    multirun: bool = False
    config_dirs: list[str] = field(default_factory=list)
    shows_config: bool = False


def config_dir_words(config_dirs: Sequence[str]) -> list[str]:
    """The folders as words of a command line."""
    return [word for folder in config_dirs for word in ("--config-dir", folder)]


def study_words(study_dir: Path) -> list[str]:
    """The words that name a study in any command, quoted where Hydra could not read them."""
    named = {"study": study_dir.name, "runs_dir": str(study_dir.parent)}
    plain = re.compile(r"[\w./ -]+", re.ASCII)
    return [
        f"{key}={value if plain.fullmatch(value) else json.dumps(value, ensure_ascii=False)}"
        for key, value in named.items()
        if (key, value) != ("runs_dir", "runs")
    ]


@dataclass(frozen=True)
class CellSpec:
    """One cell as a command line specifies it.

    Attributes:
        config: the values of all keys; None if it cannot be trained, and `error` says why.
        choices: the choice in each config group, as `compose_cell` returns them; {} if it does not
            compose.
        title: the overrides that distinguish it in its sweep: `norm=batch norm_batch_size=2`.
        overrides: all its typed overrides, one value per key.
        more_seeds: of other points of its grid that are the same cell.
        num_points: of its grid that are this cell.
    """

    config: dict[str, Any] | None
    choices: Mapping[str, str]
    title: str = ""
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
            return {"overrides": list(self.overrides) or [self.title]}
        from normexp.config.identity import identity_of

        return identity_of(self.values, self.choices)

    @cached_property
    def defining(self) -> dict[str, Any]:
        """The values that define the training, as the config has them."""
        from normexp.config.identity import defining_values

        return defining_values(self.values)

    @cached_property
    def id(self) -> str:
        """The id of the cell: a readable slug and a hash of its identity.

        Needs neither torch nor the data: the files that the config names are read instead.
        """
        from normexp.config.identity import cell_id, id_of

        if self.config is None:
            return cell_id(self.identity, [])
        _ = self.sources  # of the same moment
        return id_of(self.values, self.choices, self.identity)

    @cached_property
    def sources(self) -> dict[str, str]:
        """The digest of each of the user's own source files that the id counts, by path."""
        if self.config is None:
            return {}
        from normexp.config.identity import sources_of

        return sources_of(self.values)

    def with_values(self, values: Mapping[str, Any]) -> CellSpec:
        """The same cell with other values, by dotted key: `{"lr": 0.1}`."""
        config = copy.deepcopy(self.values)
        for key, value in values.items():
            *groups, name = key.split(".")
            level = config
            for group in groups:
                level = level[group]
            level[name] = value
        return replace(self, config=config)

    @property
    def values(self) -> dict[str, Any]:
        """The config of a cell that composes."""
        assert self.config is not None, self.error
        return self.config

    @property
    def norm(self) -> NormSpec:
        return norm_of(self.values, self.choices["norm"])

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
        if self.config is None:
            return None
        return Path(self.config["runs_dir"]) / self.config["study"]

    @property
    def directory(self) -> Path:
        """The folder of the cell in its study. The config must compose."""
        assert self.study_dir is not None
        return self.study_dir / self.id


@dataclass(frozen=True)
class NormSpec:
    """A norm as a command asks for it.

    Attributes:
        name: its choice or class; on a card, with the knobs from the command line.
        values: of the group `norm`: its target, its knobs and reserved keys.
        eps: of all norms that have one.
        slots: those of the command, by name, see `norms.slots`; None where it sets none.
    """

    name: str
    values: Mapping[str, Any]
    eps: float
    slots: Mapping[str, Any]


def norm_of(config: Mapping[str, Any], name: str = "") -> NormSpec:
    """The norm of a composed config."""
    slots = {slot: config[slot] for slot in SLOTS}
    return NormSpec(name, config["norm"], config["eps"], slots)


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
        raise UserError(
            f"trainer.devices={devices}, trainer.num_nodes={num_nodes}: needs as many processes, "
            f"and this command has {started}; "
            + (
                f"type torchrun {place} -m normexp.train {join(words[1:])}"
                if devices * num_nodes > 1
                else "drop torchrun or srun"
            )
        )
    if started > 1 and len(cells) > 1:
        raise UserError(f"{len(cells)} cells in one torchrun or srun: start one cell each")
    return rank if started > 1 else None


def title_of(cell: CellSpec) -> str:
    """The norm, the sizes and the typed overrides of a cell.

    For example `norm=batch batch_size=32 norm_batch_size=2 epochs=3`. Independent of the other
    cells of the command; leaves out the study, folders and seeds.
    """
    if cell.config is None:
        words = [text for text in cell.overrides if not _is_left_out(text)]
        if norm := cell.choices.get("norm"):
            words = [f"norm={norm}", *(text for text in words if _key_of(text) != "norm")]
        return " ".join(words) or cell.title
    named = {"norm": cell.choices["norm"], **cell.sizes}
    words = [f"{key}={value}" for key, value in named.items() if value is not None]
    typed = [text for text in cell.overrides if _key_of(text) not in named]
    counted = {"val_every_epochs"} if sees_validations(cell.config) else set()
    typed = [text for text in typed if _key_of(text) in counted or not _is_left_out(text)]
    return " ".join([*words, *typed])


def _key_of(text: str) -> str:
    return text.lstrip("+").partition("=")[0]


def _is_left_out(text: str) -> bool:
    """True if an override sets where, when or how a cell is trained, but not what."""
    key = re.split(r"[/@]", _key_of(text))[0]
    return key == "trainer" or not in_identity(key)


def split_shared_words(titles: Sequence[str]) -> tuple[str, list[str]]:
    """The words that all titles share, and each title without them; norms stay in the titles."""
    rows = [title.split() for title in titles]
    if len(rows) < 2:
        return "", list(titles)
    shared = [
        word
        for word in rows[0]
        if not word.startswith("norm=") and all(word in row for row in rows)
    ]
    rest = [" ".join(word for word in row if word not in shared) for row in rows]
    return " ".join(shared), [text or title for text, title in zip(rest, titles, strict=True)]


def format_duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2 h 05 min`."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def one_line(error: Exception) -> str:
    """The error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
