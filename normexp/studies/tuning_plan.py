"""What a command line of normexp.tune asks for: its searches, refused before torch is imported."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, open_dict

from normexp.errors import UserError
from normexp.records.identity import NOT_TRAINING
from normexp.studies.arguments import Arguments, config_dir_words
from normexp.studies.config import compose_cell
from normexp.studies.grid import expand_overrides, with_params
from normexp.studies.outcome import Composed
from normexp.studies.place import place_among
from normexp.studies.tuning_space import Point, Space, is_searched, read_space
from normexp.studies.tuning_storage import storage_path
from normexp.studies.validate import RULES, validate_keys

SPLIT = "val/"  # nothing is chosen on test


@dataclass(frozen=True)
class SearchPlan:
    """One search: a space, and the overrides that stay the same in it.

    Attributes:
        fixed: overrides of every cell, the values of the grid among them.
        grid: those that tell this search from the others of the line.
        base: the config at the low end of the space.
    """

    fixed: tuple[str, ...]
    grid: tuple[str, ...]
    space: Space
    base: DictConfig
    config_dirs: tuple[str, ...]

    @property
    def title(self) -> str:
        return " ".join(self.grid) or "search"

    @property
    def search_study(self) -> str:
        return f"{self.base.study}-search"

    @property
    def search_seeds(self) -> range:
        tune = self.base.tune
        return range(tune.first_seed, tune.first_seed + tune.seeds)

    def overrides(self, point: Point) -> tuple[str, ...]:
        return (*self.fixed, *(f"{key}={text}" for key, text in point.items()))

    def search_cell(self, point: Point, metric: str, thresholds: Mapping[int, float]) -> Composed:
        """The cell of a trial: seeds and study of the search, evaluated with what it needs.

        Args:
            metric: on validation, that counts.
            thresholds: by epoch, what the metric must reach, or the trial ends early.
        """
        tune = self.base.tune
        own = {"study": self.search_study, "seed": tune.first_seed, "replicas": tune.seeds}
        if "@" not in metric:
            own["evaluate_with"] = ["running"]
        if thresholds:
            own["tune"] = {"metric": metric, "thresholds": dict(thresholds)}
        return self._compose(point, own)

    def report_cell(self, point: Point) -> Composed:
        """The cell of fresh seeds at a point."""
        return self._compose(point, {})

    def _compose(self, point: Point, own: Mapping[str, object]) -> Composed:
        title = " ".join([*self.grid, *(f"{key}={text}" for key, text in point.items())])
        overrides = self.overrides(point)
        try:
            cfg, choices = compose_cell(overrides, self.config_dirs)
        except UserError as error:
            return Composed(None, {}, title, str(error), overrides)
        with open_dict(cfg):
            for key, value in own.items():
                cfg[key] = value
        return Composed(cfg, choices, title, overrides=overrides)

    def command(self, point: Point) -> str:
        """The line that repeats the report's cell."""
        words = [word for word in self.overrides(point) if not word.startswith("tune.")]
        return (
            f"python -m normexp.train {shlex.join([*config_dir_words(self.config_dirs), *words])}"
        )


def plan_searches(arguments: Arguments) -> list[SearchPlan]:
    """The searches of a line, one for each point of its grid; nothing is written.

    Raises:
        UserError: nothing to search, a value that cannot be used, overlapping seeds, no Optuna.
    """
    if find_spec("optuna") is None:
        raise UserError("normexp.tune needs the package optuna; pip install 'normexp[tune]'")
    overrides = with_params(arguments.overrides, arguments.config_dirs)
    searched = [override for override in overrides if is_searched(override)]
    if not searched:
        raise UserError(
            "nothing to search: write lr=tag(log,interval(1e-3,1)) or lr=choice(0.03,0.1,0.3); "
            "a list lr=0.03,0.1 is a search for each"
        )
    for override in overrides:
        _refuse_bookkeeping(override)
    space = read_space(searched)
    rest = [override for override in overrides if not is_searched(override)]
    plans = [
        _plan(cell, rest, space, arguments.config_dirs)
        for cell in expand_overrides(rest, arguments.config_dirs)
    ]
    _check_probes(plans[0])
    return plans


def _plan(
    cell: list[str], rest: Sequence[Override], space: Space, config_dirs: Sequence[str]
) -> SearchPlan:
    low = next(space.probes())
    overrides = [*cell, *(f"{key}={text}" for key, text in low.items())]
    base, _ = compose_cell(overrides, config_dirs)
    check_settings(base)
    grid = [text for text, override in zip(cell, rest, strict=True) if override.is_sweep_override()]
    return SearchPlan(tuple(cell), tuple(grid), space, base, tuple(config_dirs))


def _check_probes(plan: SearchPlan) -> None:
    """Composes each end and each choice once, so that a typo is told before the first training."""
    for point in plan.space.probes():
        config, _ = compose_cell(plan.overrides(point), plan.config_dirs)
        validate_keys(config, [key for key in plan.space.keys if key in RULES])


def _refuse_bookkeeping(override: Override) -> None:
    """Several values of what is no part of a training: its seeds, its study, the search itself."""
    head = override.key_or_group.partition(".")[0]
    if override.is_sweep_override() and head in NOT_TRAINING and head != "experiment":
        raise UserError(
            f"{override.input_line}: a search varies what is trained; name one {head} value"
        )


def check_settings(config: DictConfig) -> None:
    """The keys under `tune` against each other and the report's seeds. Raises UserError."""
    validate_keys(config, [key for key in RULES if key.startswith("tune.")])
    validate_keys(config, ["seed", "replicas", "study", "runs_dir"])
    storage_path(config.tune.storage, Path(config.runs_dir))
    validate_keys(config, ["trainer.devices", "trainer.num_nodes"])
    if place_among(config.trainer.devices * config.trainer.num_nodes) is not None:
        raise UserError(
            "a search is one process, which starts those of each training: run normexp.tune "
            "without srun or torchrun"
        )
    tune = config.tune
    if tune.metric is not None and not str(tune.metric).startswith(SPLIT):
        raise UserError(
            f"tune.metric={tune.metric}: nothing is chosen on test or training data; "
            "try val/accuracy, val/bits_per_byte or val/loss"
        )
    search = range(tune.first_seed, tune.first_seed + tune.seeds)
    report = range(config.seed, config.seed + config.replicas)
    if max(search[0], report[0]) <= min(search[-1], report[-1]):
        raise UserError(
            f"the search's seeds {search[0]} to {search[-1]} and the report's {report[0]} to "
            f"{report[-1]} overlap: a result must come from fresh seeds; "
            f"try tune.first_seed={report[-1] + 1}"
        )
