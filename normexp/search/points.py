"""The searches of a command: their space, read from Hydra's sweep grammar, and their points.

All points are known in advance and are the same for every norm: a grid of choices, or the first
points of one scrambled Sobol sequence (Owen, 1998). So a search is a sweep, and a longer search
extends a shorter one.
"""

from __future__ import annotations

import copy
import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from normexp.config.compose import compose_cell, parse_overrides
from normexp.config.grid import expand_overrides, is_searched, read_grid
from normexp.config.place import place_among
from normexp.config.rules import KEYS, either, in_identity, validate_keys
from normexp.config.spec import CellSpec, Command, config_dir_words
from normexp.errors import UserError

Point = Mapping[str, str]  # key to value, as typed on the command line
EDGE = 0.05  # the fraction of an interval at each end that counts as its edge
DIGITS = 4  # significant digits of a value that is drawn from an interval
VALIDATION = ("val/accuracy", "val/bits_per_byte", "val/loss")  # the first that a task has
SCRAMBLE = 0  # seed of the Sobol sequence: every search of a space has the same points
LOGARITHMIC = ("lr",)  # keys whose intervals have a log scale without a tag
DRAWN = 8  # points drawn for each one wanted, since rounded values and choices repeat


@dataclass(frozen=True)
class Choice:
    """`choice(a,b)` or `range(1,4)`: the values as texts, in order."""

    key: str
    texts: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        return self.texts

    def at(self, fraction: float) -> str:
        """The choice at a fraction in [0, 1) of the list."""
        return self.texts[int(fraction * len(self.texts))]

    def is_at_edge(self, text: str) -> bool:
        """True for the least and the greatest of at least three numbers; words have no edge."""
        try:
            numbers = sorted(float(value) for value in self.texts)
            return len(numbers) > 2 and float(text) in (numbers[0], numbers[-1])
        except ValueError:
            return False


@dataclass(frozen=True)
class Range:
    """`interval(low,high)`, both ends included; `log`: uniform in log(x); `whole`: integers."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    @property
    def ends(self) -> tuple[str, ...]:
        return self.text_of(self.low), self.text_of(self.high)

    def at(self, fraction: float) -> str:
        """The value at a fraction in [0, 1) of the interval, on its scale."""
        low, high = self.low, self.high + self.whole  # each integer has an equal share
        if self.log:
            return self.text_of(low * (high / low) ** fraction)
        return self.text_of(low + fraction * (high - low))

    def text_of(self, value: float) -> str:
        """The value as typed: four significant digits, never beyond the ends."""
        if self.whole:
            return str(min(int(value), int(self.high)))
        rounded = float(f"{value:.{DIGITS}g}")
        return repr(min(max(rounded, self.low), self.high))

    def is_at_edge(self, text: str) -> bool:
        """True if a value lies in the outermost 5 % of the interval, on the interval's scale."""
        scale = math.log if self.log else float
        low, high, value = scale(self.low), scale(self.high), scale(float(text))
        return not EDGE <= (value - low) / (high - low) <= 1 - EDGE


Dimension = Choice | Range


@dataclass(frozen=True)
class Space:
    """The dimensions of a search; at least one."""

    dimensions: tuple[Dimension, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(dimension.key for dimension in self.dimensions)

    @property
    def first(self) -> dict[str, str]:
        return {dimension.key: dimension.at(0) for dimension in self.dimensions}

    def points(self, count: int) -> list[dict[str, str]]:
        """At most `count` different points; fewer if the space has fewer.

        All combinations of choices, the first key slowest, if there are no more than `count`;
        otherwise the first different points of the Sobol sequence.
        """
        choices = [d.texts for d in self.dimensions if isinstance(d, Choice)]
        is_grid = len(choices) == len(self.dimensions)
        if is_grid and math.prod(map(len, choices)) <= count:
            rows = itertools.product(*choices)
        else:
            drawn = _sobol(len(self.dimensions), DRAWN * count)
            pairs = (zip(self.dimensions, row, strict=True) for row in drawn)
            rows = [tuple(dimension.at(u) for dimension, u in pair) for pair in pairs]
        unique = list(dict.fromkeys(rows))[:count]
        return [dict(zip(self.keys, row, strict=True)) for row in unique]


def _sobol(num_dimensions: int, count: int) -> list[list[float]]:
    """At least `count` points of one sequence in [0, 1)^d; more points begin with the same ones."""
    from scipy.stats import qmc

    sequence = qmc.Sobol(num_dimensions, scramble=True, rng=SCRAMBLE)
    return sequence.random_base2(math.ceil(math.log2(count))).tolist()


def words_of(point: Point) -> list[str]:
    return [f"{key}={text}" for key, text in point.items()]


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
    if isinstance(value, RangeSweep):  # without the digits of 0.1 + 0.2
        numbers = list(value.range())
        texts = [str(x if isinstance(x, int) else float(f"{x:.12g}")) for x in numbers]
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
    log = "log" in value.tags or key in LOGARITHMIC
    if log and low <= 0:
        raise UserError(f"{text}: a log scale begins above 0, not at {low:g}")
    return Range(key, low, high, log, whole=isinstance(low, int) and isinstance(high, int))


@dataclass(frozen=True)
class Search:
    """One search: a space, and the overrides that all of its points share.

    Attributes:
        fixed: the overrides of every cell, including `grid`.
        grid: the overrides that distinguish this search from the others of the command.
        base: the config at the first value of each key, and the name chosen in each group.
    """

    fixed: tuple[str, ...]
    grid: tuple[str, ...]
    space: Space
    base: DictConfig
    choices: Mapping[str, str]
    config_dirs: tuple[str, ...]

    @property
    def title(self) -> str:
        return " ".join(self.grid) or "search"

    @property
    def study(self) -> str:
        """The study of the search's runs; fresh seeds go to the study that was asked for."""
        return f"{self.base.study}-search"

    @cached_property
    def points(self) -> list[dict[str, str]]:
        return self.space.points(self.base.tune.points)

    def cell(self, point: Point, *, is_report: bool) -> CellSpec:
        """The cell of a point: of the report, or with the seeds and the study of the search."""
        words = words_of(point)
        title = " ".join([*self.grid, *words])
        overrides = (*self.fixed, *words)
        values = parse_overrides(words)
        try:
            if all(value.key_or_group in KEYS for value in values):  # ten times faster
                cfg, choices = copy.deepcopy(self.base), self.choices
                for value in values:
                    OmegaConf.update(cfg, value.key_or_group, value.value())
            else:
                cfg, choices = compose_cell(overrides, self.config_dirs)
        except UserError as error:
            return CellSpec(None, {}, title, str(error), overrides)
        if not is_report:
            tune = self.base.tune
            cfg.study, cfg.seed, cfg.replicas = self.study, tune.first_seed, tune.seeds
            if tune.metric is None or "@" not in tune.metric:
                cfg.evaluate_with = ["running"]
        return CellSpec(cfg, choices, title, overrides=overrides)

    def command(self, point: Point) -> str:
        """The command that trains the report's cell again."""
        words = [word for word in self.fixed if not word.startswith("tune.")]
        line = [*config_dir_words(self.config_dirs), *words, *words_of(point)]
        return f"python -m normexp.train {shlex.join(line)}"


def plan_searches(command: Command) -> list[Search]:
    """The searches of a command, one for each point of its grid. Writes nothing.

    Raises:
        UserError: nothing to search, a value that cannot be used, overlapping seeds.
    """
    grid = read_grid(command.overrides, command.config_dirs)
    searched = [override for override in grid.overrides if is_searched(override)]
    if not searched:
        raise UserError(
            "nothing to search: write lr=interval(1e-3,1) or lr=choice(0.03,0.1,0.3); "
            "a list lr=0.03,0.1 is a search for each"
        )
    for override in grid.overrides:
        key = override.key_or_group
        if override.is_sweep_override() and not in_identity(key) and key != "experiment":
            raise UserError(f"{override.input_line}: {key} cannot be searched; give it one value")
    space = read_space(searched)
    rest = [override for override in grid.overrides if not is_searched(override)]
    lines = [
        [*listed, *line]
        for listed in grid.cells
        for line in expand_overrides(rest, command.config_dirs)
    ]
    shared = set(lines[0]).intersection(*map(set, lines))
    searches = []
    for line in lines:
        base, choices = compose_cell([*line, *words_of(space.first)], command.config_dirs)
        check_settings(base)
        own = tuple(word for word in line if word not in shared)
        search = Search(tuple(line), own, space, base, choices, tuple(command.config_dirs))
        searches.append(search)
    _check_values(searches[0])
    return searches


def _check_values(search: Search) -> None:
    """Composes each choice and each end once, to find a mistake before the first training."""
    for dimension in search.space.dimensions:
        for text in dimension.ends:
            point = search.space.first | {dimension.key: text}
            config, _ = compose_cell([*search.fixed, *words_of(point)], search.config_dirs)
            validate_keys(config, [key for key in search.space.keys if key in KEYS])


def check_settings(config: DictConfig) -> None:
    """Raises UserError for `tune` keys that contradict each other or the report's seeds."""
    validate_keys(config, [key for key in KEYS if key.startswith("tune.")])
    validate_keys(config, ["seed", "replicas", "study", "runs_dir", "evaluate_with"])
    validate_keys(config, ["trainer.devices", "trainer.num_nodes"])
    if place_among(config.trainer.devices * config.trainer.num_nodes) is not None:
        raise UserError(
            "a search starts the processes of each training itself: run normexp.tune without "
            "srun or torchrun"
        )
    tune = config.tune
    name, _, statistics = (tune.metric or "").partition("@")
    kind = statistics.rstrip("0123456789")  # batch32 is a kind of batch
    if kind and kind not in config.evaluate_with:
        raise UserError(f"tune.metric={tune.metric}: needs evaluate_with=[running,{kind}]")
    if name not in ("", *VALIDATION):
        raise UserError(
            f"tune.metric={tune.metric}: nothing is chosen on test or training data; "
            f"try {either(VALIDATION)}"
        )
    search = range(tune.first_seed, tune.first_seed + tune.seeds)
    report = range(config.seed, config.seed + config.replicas)
    if max(search[0], report[0]) <= min(search[-1], report[-1]):
        raise UserError(
            f"the search's seeds {search[0]} to {search[-1]} and the report's {report[0]} to "
            f"{report[-1]} overlap: a result must come from fresh seeds; "
            f"try tune.first_seed={report[-1] + 1}"
        )
