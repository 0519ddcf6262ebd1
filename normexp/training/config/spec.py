"""A cell as a command specifies it: its config, its id, and the seeds to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from normexp.errors import UserError
from normexp.training.config.choices import words_of
from normexp.training.config.groups import OPTIONAL_GROUPS, PARTS
from normexp.training.config.identity import (
    OPTIM_SCHEDULE,
    defining_values,
    id_of,
    identity_of,
    sources_of,
)
from normexp.training.config.keys import KEYS, NO_VALUE, Settings, in_identity
from normexp.training.config.lr_rule import scale_learning_rate
from normexp.training.config.slots import Slots
from normexp.training.config.validate import read_settings
from normexp.training.records.journal import Request
from normexp.training.records.result import flatten, settings_of
from normexp.verdicts.settings import BUDGETS, SIZES


@dataclass(frozen=True)
class CellSpec:
    """One cell as a command line specifies it.

    Attributes:
        config: the values of all keys.
        choices: the choice in each config group, as `compose_cell` returns them.
        error: why it cannot be trained; empty if it can.
        overrides: of its point of the grid, one value per key.
        more_seeds: of other points of its grid that are the same cell.
        num_points: of its grid that are this cell.
    """

    config: dict[str, Any]
    choices: dict[str, str]
    error: str = ""
    overrides: Sequence[Override] = ()
    more_seeds: Sequence[int] = ()
    num_points: int = 1

    @cached_property
    def settings(self) -> Settings:
        """The typed values. Raises UserError for a value that cannot be trained."""
        return read_settings(self.config)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The canonical content of the cell, which its id hashes; if refused, its words."""
        if self.error:
            return {"overrides": [*self.typed.values()]}
        return identity_of(self.config, self.choices, self.settings)

    @property
    def id(self) -> str:
        """The id of the cell: a readable slug and a hash of its identity."""
        return self._id_and_sources[0]

    @property
    def sources(self) -> dict[str, str]:
        """The digest of each of the user's own source files that the id counts, by path."""
        return self._id_and_sources[1]

    @cached_property
    def _id_and_sources(self) -> tuple[str, dict[str, str]]:
        # Read at the same moment: an edit that follows is then seen, see `refuse_edited`.
        sources = sources_of(self.config, self.choices)
        return id_of(self.config, self.choices, self.identity), sources

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of its parts that are not those of shipped choices: `resnet50`, `MyNorm`."""
        names = {}
        for group in (*PARTS, *OPTIONAL_GROUPS):
            content = self.identity.get(group)
            if not isinstance(content, Mapping):
                continue
            if isinstance(self.config[group].get("name"), str):
                names[group] = self.config[group]["name"]
            elif "choice" not in content:
                names[group] = self.choices[group]
        return names

    def scaled_rate(self) -> tuple[float, float | None]:
        """Learning rate and momentum of the optimizer, by `lr_rule`. Raises UserError."""
        settings = self.settings
        if settings.lr_rule == "none":
            return settings.lr, settings.optim.momentum
        return scale_learning_rate(
            settings.lr_rule,
            lr=settings.lr,
            momentum=settings.optim.momentum,
            batch_size=settings.batch_size,
            base_batch_size=settings.base_batch_size,
        )

    @property
    def derived(self) -> dict[str, Any]:
        """The effective values that are known before its data are."""
        settings = self.settings
        derived: dict[str, Any] = settings.sizes.effective()
        budgets = [key for key in BUDGETS if self.config[key] is not None]
        budget = next((key for key in budgets if key != "epochs"), "epochs")  # epochs has a default
        derived[budget] = self.config[budget]
        derived["lr"] = settings.lr
        with suppress(UserError):  # a rule that does not fit the optimizer is refused in training
            derived["lr"], momentum = self.scaled_rate()
            if settings.lr_rule == "momentum_aware":
                derived["optim.momentum"] = momentum
        return derived | self.names

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The settings that its id leaves out, because they have their defaults, by dotted key.

        Without the budget, which is among `derived`. A slot of the norm is what its YAML sets, else
        the default, and a null slot is the norm's.
        """
        values = flatten(defining_values(self.config)) | flatten({"optim": OPTIM_SCHEDULE})
        for key, meaning in KEYS.items():
            if meaning.implied is not NO_VALUE:  # ids, and so these values, leave it out
                values[key] = attrgetter(key)(self.settings)
        for key in ("schedule._target_", "schedule.warmup"):  # named so, or in the id
            values.pop(key, None)
        for slot, default in asdict(Slots()).items():
            of_norm = values.get(f"norm.{slot}")
            values[f"norm.{slot}"] = default if of_norm is None else of_norm
            if values.get(slot) is None:
                values[slot] = values[f"norm.{slot}"]
        left_out = {*flatten(self.identity), *BUDGETS}
        return {
            key: value for key, value in values.items() if value is not None and key not in left_out
        }

    @property
    def typed(self) -> dict[str, str]:
        """Its words as typed, by key."""
        return words_of(self.overrides)

    @property
    def title(self) -> str:
        """Its words, see `words`."""
        return " ".join(self.words)

    @property
    def words(self) -> list[str]:
        """Its norm, sizes and other words: `norm=batch`, `batch_size=32`, `epochs=3`.

        Independent of the other cells of the command; leaves out the study, folders and seeds.
        """
        sizes = {key: self.config[key] for key in SIZES}
        named = {"norm": self.choices["norm"], **sizes}
        words = [f"{key}={value}" for key, value in named.items() if value is not None]
        words += [
            text
            for key, text in self.typed.items()
            if key not in (*named, "trainer") and in_identity(key.partition("@")[0])
        ]
        return words

    @property
    def seeds(self) -> list[int]:
        """The seeds to train; none if the cell is refused."""
        if self.error:
            return []
        first, replicas = self.settings.seed, self.settings.replicas
        return sorted({*range(first, first + replicas), *self.more_seeds})

    @cached_property
    def request(self) -> Request:
        """What its command asks of it."""
        if self.error:
            return Request(self.words, self.seeds)
        settings = settings_of(self.identity, self.derived)
        return Request(self.words, self.seeds, settings, self.defaults)

    @property
    def study_dir(self) -> Path:
        return Path(self.config["runs_dir"], str(self.config["study"]))

    @property
    def directory(self) -> Path:
        """The folder of the cell in its study."""
        return self.study_dir / self.id


def join_points(cells: Sequence[CellSpec]) -> list[CellSpec]:
    """Each cell once, with the seeds of all of its points and the words that they share."""
    points: dict[Path, list[CellSpec]] = {}
    for cell in cells:
        points.setdefault(cell.directory, []).append(cell)
    joined = []
    for first, *others in points.values():
        if others:
            shared = [one for one in first.overrides if all(one in o.overrides for o in others)]
            seeds = [seed for other in others for seed in other.seeds]
            first = replace(first, overrides=shared, more_seeds=seeds, num_points=1 + len(others))
        joined.append(first)
    return joined


def shared_value(cells: Sequence[CellSpec], key: str) -> Any:
    """The value of a key that all cells of a command must share; None without cells.

    Raises:
        UserError: the value varies.
    """
    values = list(dict.fromkeys(cell.config[key] for cell in cells))
    if len(values) > 1:
        shown = ",".join(map(str, values))
        raise UserError(f"{key}={shown}: must be the same in all cells; set {key}=...")
    return values[0] if values else None
