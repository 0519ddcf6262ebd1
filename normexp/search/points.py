"""The space of a search, read from Hydra's sweep grammar, and its points. No Optuna."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    RangeSweep,
)
from omegaconf import DictConfig, open_dict

from normexp.config.compose import compose_cell
from normexp.config.grid import expand_overrides, is_searched, with_params
from normexp.config.place import place_among
from normexp.config.rules import KEYS, in_identity, validate_keys
from normexp.config.spec import CellSpec, Command, config_dir_words
from normexp.errors import UserError
from normexp.search.storage import storage_path

Point = Mapping[str, str]  # key to value, as typed on the command line
EDGE = 0.05  # the fraction of an interval at each end that counts as its edge
DIGITS = 4  # significant digits of a value that is drawn from an interval


@dataclass(frozen=True)
class Choice:
    """`choice(a,b)` or `range(1,4)`: the values as texts, in order."""

    key: str
    texts: tuple[str, ...]

    def ends(self) -> tuple[str, str]:
        return self.texts[0], self.texts[-1]

    def is_at_edge(self, text: str) -> bool:
        """True for the least and the greatest of at least three numbers; words have no edge."""
        try:
            numbers = sorted(float(value) for value in self.texts)
            return len(numbers) > 2 and float(text) in (numbers[0], numbers[-1])
        except ValueError:
            return False

    def describe(self) -> str:
        return f"{self.key}=choice({','.join(self.texts)})"


@dataclass(frozen=True)
class Range:
    """`interval(low,high)`, both ends included; `log`: uniform in log(x); `whole`: integers."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    def ends(self) -> tuple[str, str]:
        return self.text_of(self.low), self.text_of(self.high)

    def text_of(self, value: float) -> str:
        """Returns the value as typed: four significant digits, never beyond the ends."""
        if self.whole:
            return str(int(value))
        rounded = float(f"{value:.{DIGITS}g}")
        return repr(min(max(rounded, self.low), self.high))

    def is_at_edge(self, text: str) -> bool:
        """True if a value lies in the outermost 5 % of the interval, on the interval's scale."""
        scale = math.log if self.log else float
        low, high, value = scale(self.low), scale(self.high), scale(float(text))
        return not EDGE <= (value - low) / (high - low) <= 1 - EDGE

    def describe(self) -> str:
        inner = f"interval({self.low:g},{self.high:g})"
        inner = f"int({inner})" if self.whole else inner
        return f"{self.key}=tag(log,{inner})" if self.log else f"{self.key}={inner}"


Dimension = Choice | Range


@dataclass(frozen=True)
class Space:
    """The dimensions of a search; at least one."""

    dimensions: tuple[Dimension, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dimension.key for dimension in self.dimensions)

    def num_points(self) -> int | None:
        """The number of points; None if a dimension is an interval."""
        if not all(isinstance(dimension, Choice) for dimension in self.dimensions):
            return None
        return math.prod(len(d.texts) for d in self.dimensions if isinstance(d, Choice))

    def points(self) -> Iterator[dict[str, str]]:
        """Yields every point of a space without intervals; the first key changes slowest."""
        texts = [d.texts for d in self.dimensions if isinstance(d, Choice)]
        yield from (dict(zip(self.keys, point, strict=True)) for point in itertools.product(*texts))

    def probes(self) -> Iterator[dict[str, str]]:
        """Yields the low point, then that point with one key at another choice or its upper end."""
        low = {dimension.key: dimension.ends()[0] for dimension in self.dimensions}
        yield low
        for dimension in self.dimensions:
            others = dimension.texts[1:] if isinstance(dimension, Choice) else dimension.ends()[1:]
            yield from (low | {dimension.key: text} for text in others)

    def edges(self, point: Point) -> list[Dimension]:
        """The dimensions in which a point lies at the edge of the space."""
        return [d for d in self.dimensions if d.is_at_edge(point[d.key])]

    def describe(self) -> str:
        return " ".join(dimension.describe() for dimension in self.dimensions)


def read_space(overrides: Sequence[Override]) -> Space:
    """Reads the space of the searched overrides. Raises UserError for one without values."""
    return Space(tuple(_dimension(override) for override in overrides))


def _dimension(override: Override) -> Dimension:
    value, key, text = override.value(), override.get_key_element(), str(override.input_line)
    assert isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep)
    unknown = sorted(value.tags - {"log"})
    if unknown:
        raise UserError(f"{text}: unknown tag {unknown[0]}; the only tag is log")
    if isinstance(value, IntervalSweep):
        return _interval(value, key, text)
    if value.tags:
        raise UserError(f"{text}: only an interval has a log scale; remove the tag")
    if isinstance(value, RangeSweep):
        texts = [_number_text(number) for number in value.range()]
    else:
        texts = list(override.sweep_string_iterator())
    unique = tuple(dict.fromkeys(texts))
    if len(unique) < 2:
        raise UserError(f"{text}: {len(unique)} values to search; name two or more, or {key}=...")
    return Choice(key, unique)


def _interval(value: IntervalSweep, key: str, text: str) -> Range:
    low, high = value.start, value.end
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{text}: an interval has two ends, interval(low,high)")
    if low >= high:
        raise UserError(f"{text}: low must be below high; try interval({high:g},{low:g})")
    log = "log" in value.tags
    if log and low <= 0:
        raise UserError(f"{text}: a log scale begins above 0, not at {low:g}")
    return Range(key, low, high, log, whole=isinstance(low, int) and isinstance(high, int))


def _number_text(number: float) -> str:
    return str(number) if isinstance(number, int) else repr(float(f"{number:.12g}"))  # no 0.1 + 0.2


SPLIT = "val/"  # nothing is chosen on test


@dataclass(frozen=True)
class SearchPlan:
    """One search: a space, and the overrides that all of its points share.

    Attributes:
        fixed: the overrides of every cell, including `grid`.
        grid: the overrides that distinguish this search from the others of the command.
        base: the config at the low point of the space.
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

    def search_cell(self, point: Point, metric: str, thresholds: Mapping[int, float]) -> CellSpec:
        """Returns the cell of a trial, with the seeds and the study of the search.

        Args:
            metric: the validation metric of the search.
            thresholds: epoch to the value that the metric must reach, or the trial ends early.
        """
        tune = self.base.tune
        own = {"study": self.search_study, "seed": tune.first_seed, "replicas": tune.seeds}
        if "@" not in metric:
            own["evaluate_with"] = ["running"]
        if thresholds:
            own["tune"] = {"metric": metric, "thresholds": dict(thresholds)}
        return self._compose(point, own)

    def report_cell(self, point: Point) -> CellSpec:
        """Returns the cell that trains fresh seeds at a point."""
        return self._compose(point, {})

    def _compose(self, point: Point, own: Mapping[str, object]) -> CellSpec:
        title = " ".join([*self.grid, *(f"{key}={text}" for key, text in point.items())])
        overrides = self.overrides(point)
        try:
            cfg, choices = compose_cell(overrides, self.config_dirs)
        except UserError as error:
            return CellSpec(None, {}, title, str(error), overrides)
        with open_dict(cfg):
            for key, value in own.items():
                cfg[key] = value
        return CellSpec(cfg, choices, title, overrides=overrides)

    def command(self, point: Point) -> str:
        """Returns the command that trains the report's cell again."""
        words = [word for word in self.overrides(point) if not word.startswith("tune.")]
        return (
            f"python -m normexp.train {shlex.join([*config_dir_words(self.config_dirs), *words])}"
        )


def plan_searches(command: Command) -> list[SearchPlan]:
    """Returns the searches of a command, one for each point of its grid. Writes nothing.

    Raises:
        UserError: nothing to search, a value that cannot be used, overlapping seeds, no Optuna.
    """
    if find_spec("optuna") is None:
        raise UserError("normexp.tune needs the package optuna; pip install 'normexp[tune]'")
    overrides = with_params(command.overrides, command.config_dirs)
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
        _plan(cell, rest, space, command.config_dirs)
        for cell in expand_overrides(rest, command.config_dirs)
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
    """Composes each end and each choice once, to find a typo before the first training."""
    for point in plan.space.probes():
        config, _ = compose_cell(plan.overrides(point), plan.config_dirs)
        validate_keys(config, [key for key in plan.space.keys if key in KEYS])


def _refuse_bookkeeping(override: Override) -> None:
    """Raises UserError for several values of a key that does not define the training."""
    key = override.key_or_group
    if override.is_sweep_override() and not in_identity(key) and key != "experiment":
        raise UserError(f"{override.input_line}: {key} cannot be searched; give it one value")


def check_settings(config: DictConfig) -> None:
    """Raises UserError for `tune` keys that contradict each other or the report's seeds."""
    validate_keys(config, [key for key in KEYS if key.startswith("tune.")])
    validate_keys(config, ["seed", "replicas", "study", "runs_dir"])
    storage_path(config.tune.storage, Path(config.runs_dir))
    validate_keys(config, ["trainer.devices", "trainer.num_nodes"])
    if place_among(config.trainer.devices * config.trainer.num_nodes) is not None:
        raise UserError(
            "a search starts the processes of each training itself: run normexp.tune without "
            "srun or torchrun"
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
