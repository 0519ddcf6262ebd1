"""The searches of a command: the same points for every norm, each a cell of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hydra.core.override_parser.types import Override

from normexp.errors import UserError
from normexp.training.config.choices import parse_overrides, words_of
from normexp.training.config.command import Command, is_searched
from normexp.training.config.keys import KEYS, VIEW, in_identity, is_read
from normexp.training.config.spec import CellSpec
from normexp.training.config.validate import check_keys
from normexp.training.search.space import Space, read_space
from normexp.verdicts.metric import OF_VALIDATION
from normexp.words import name_some

Point = Mapping[str, str]  # key to value, as typed on the command line


def overrides_of(point: Point) -> list[Override]:
    return parse_overrides([f"{key}={text}" for key, text in point.items()])


@dataclass(frozen=True)
class Search:
    """One search: a space, and the overrides that all of its points share.

    Attributes:
        fixed: the overrides of every cell, including `grid`.
        grid: the words that distinguish this search from the others of the command.
        base: the config at the first value of each key.
    """

    fixed: Sequence[Override]
    grid: tuple[str, ...]
    space: Space
    base: Mapping[str, Any]
    command: Command

    @property
    def title(self) -> str:
        return " ".join(self.grid) or "search"

    @cached_property
    def trials(self) -> list[tuple[Point, CellSpec]]:
        """Each point, with its cell in the study `...-search`; fresh seeds go to the study itself.

        Raises:
            UserError: a value that cannot be used.
        """
        points = self.space.points(self.base["tune"]["points"])
        return [(point, self.cell(point, is_report=False)) for point in points]

    def cell(self, point: Point, *, is_report: bool) -> CellSpec:
        """The cell of a point; unless `is_report`, with the seeds and the study of the search."""
        cell = self.command.cell([*self.fixed, *overrides_of(point)])
        check_keys(cell.config, [key for key in self.space.keys if key in KEYS])
        if is_report:
            return cell
        tune, study = self.base["tune"], f"{self.base['study']}-search"
        changes = {"study": study, "seed": tune["first_seed"], "replicas": tune["seeds"]}
        if "@" not in (tune["metric"] or ""):
            changes |= {"evaluate_with": ["running"], "evaluate_at": None}
        return replace(cell, config=cell.config | changes)


def plan_searches(command: Command) -> list[Search]:
    """The searches of a command, one for each point of its grid. Writes nothing.

    Raises:
        UserError: nothing to search, a value that cannot be used, overlapping seeds.
    """
    overrides = command.grid()
    searched = [override for override in overrides if is_searched(override)]
    if not searched:
        raise UserError(
            "nothing to search: write lr=interval(1e-3,1) or lr=choice(0.03,0.1,0.3); "
            "a list such as lr=0.03,0.1 makes one search for each value"
        )
    for override in overrides:
        key = override.key_or_group
        is_in_no_id = is_read(key) and not in_identity(key) and key != "experiment"
        if override.is_sweep_override() and is_in_no_id:
            raise UserError(f"{override.input_line}: {key} cannot be searched; give it one value")
    space = read_space(searched)
    grid = command.points([override for override in overrides if not is_searched(override)])
    typed = [[*words_of(fixed).values()] for fixed in grid]
    shared = set(typed[0]).intersection(*typed)
    searches = []
    for fixed, words in zip(grid, typed, strict=True):
        base = command.cell([*fixed, *overrides_of(space.first)]).config
        check_settings(base)
        grid_words = tuple(word for word in words if word not in shared)
        search = Search(fixed, grid_words, space, base, command)
        assert search.trials  # composing each finds mistakes before the first training
        searches.append(search)
    return searches


def check_settings(config: Mapping[str, Any]) -> None:
    """Raises UserError for `tune` keys that contradict each other or the report's seeds."""
    others = ("seed", "replicas", "study", "runs_dir", "evaluate_with", "evaluate_at")
    own = [key for key in KEYS if key.startswith(("tune.", "trainer."))]
    check_keys(config, [*own, *others])
    tune = config["tune"]
    metric = tune["metric"]
    name, at, statistics = (metric or OF_VALIDATION[0]).partition("@")
    if VIEW.fullmatch(statistics):
        if statistics not in map(str, config["evaluate_at"] or ()):
            raise UserError(f"tune.metric={metric}: needs evaluate_at=[{statistics}]")
    elif at:
        kind = statistics.rstrip("0123456789")  # batch32 is a kind of batch
        if kind not in config["evaluate_with"]:
            raise UserError(f"tune.metric={metric}: needs evaluate_with=[running,{kind or '...'}]")
    if name not in OF_VALIDATION:
        why = "nothing is chosen on test or training data"
        raise UserError(f"tune.metric={metric}: {why}; try {name_some(OF_VALIDATION)}")
    search = range(tune["first_seed"], tune["first_seed"] + tune["seeds"])
    report = range(config["seed"], config["seed"] + config["replicas"])
    first_shared, last_shared = max(search[0], report[0]), min(search[-1], report[-1])
    if first_shared <= last_shared:
        raise UserError(
            f"the search's seeds {search[0]} to {search[-1]} and the report's {report[0]} to "
            f"{report[-1]} overlap: a result must come from fresh seeds; "
            f"try tune.first_seed={report[-1] + 1}"
        )
