"""Runs grouped into cells, each with the label of its norm and what else was held alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normexp.records.paths import seed_of
from normexp.reporting.metric import Metric
from normexp.reporting.runs import Run, StudyRuns, flatten
from normexp.reporting.style import order_norms

SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")
# Keys that belong to the norm: these may differ between the norms that are compared.
NORM_KEYS = ("norm", "act", "conv", "residual_scale", "placement", "qk_norm")
# Measured, worked out from the sizes, or without any effect on a result.
IGNORED = ("mixes_samples", "leaks_future", "stacked", "log_every", "split")
# Follow from the batch size under some rules (a budget in samples, a half-life): they part cells
# only where they differ at one and the same size.
DERIVED = ("epochs", "num_steps", "optim.momentum")
DERIVED_OF_NORM = "norm.momentum"

Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Cell:
    """All runs of one cell.

    norm: the label of its line: the norm, with the knobs in which it differs from others
    settings: what must be alike for two cells to be compared, as sorted pairs
    norm_batch_size: effective, so never None
    mixes_samples: False where the norm was measured not to look across samples
    expected: the seeds that the study has in any of its cells; those without a readable result are
        missing
    """

    id: str
    study: str
    norm: str
    config: dict[str, Any]
    settings: Settings
    batch_size: int
    micro_batch_size: int
    norm_batch_size: int
    mixes_samples: bool
    runs: tuple[Run, ...]
    expected: tuple[int, ...]

    @property
    def lr(self) -> float | None:
        return self.config.get("lr")

    @property
    def model(self) -> str:
        return str(self.config.get("model", "-"))

    @property
    def data(self) -> str:
        return str(self.config.get("data", "-"))

    @property
    def directory(self) -> Path:
        return self.runs[0].directory.parent

    @property
    def invalid(self) -> str | None:
        """Why no number of this cell may be compared."""
        return next((run.result.invalid for run in self.runs if run.result.invalid), None)

    @property
    def protocol(self) -> str:
        """How a step's samples reach the norm, as a word."""
        if self.norm_batch_size < self.micro_batch_size:
            return "ghost"
        return "accumulated" if self.micro_batch_size < self.batch_size else "full"

    def seeds(self, status: str) -> list[int]:
        return [run.result.seed for run in self.runs if run.result.status == status]

    @property
    def missing(self) -> list[int]:
        return sorted(set(self.expected) - {run.result.seed for run in self.runs})

    def values(self, metric: Metric) -> dict[int, float]:
        """Scaled metric by seed, of finished runs alone: nothing stands in for the others."""
        return {
            run.result.seed: metric.scale * run.result.metrics[metric.name]
            for run in self.runs
            if run.result.status == "finished" and metric.name in run.result.metrics
        }


def build_cells(studies: Sequence[StudyRuns]) -> list[Cell]:
    """The cells of all studies, labelled; several studies are told apart by `norm · study`."""
    cells = [cell for study in studies for cell in _cells_of(study, alone=len(studies) == 1)]
    if len(studies) > 1:
        cells = _without_what_differs_by_study(cells)
    cells = _told_apart(_labelled(_without_derived(cells)))
    places = {norm: place for place, norm in enumerate(order_norms(cell.norm for cell in cells))}
    return sorted(cells, key=lambda c: (places[c.norm], c.batch_size, c.norm_batch_size, c.lr or 0))


def describe_settings(settings: Settings, others: Iterable[Settings]) -> str:
    """The settings by which one group of cells differs from the others, in words."""
    varying = varying_keys([dict(item) for item in {settings, *others}])
    mine = dict(settings)
    names = [str(mine[key]) for key in ("model", "data") if mine.get(key)]
    knobs = [
        f"{key}={mine.get(key)}"
        for key in sorted(varying - {"model", "data"})
        if not key.startswith(("model.", "data."))
    ]
    return ", ".join([" on ".join(names) or "all", *knobs])


def varying_keys(configs: Sequence[Mapping[str, Any]]) -> set[str]:
    """The keys that do not have the same value in all configs; an absent key is a value too."""
    keys = {key for config in configs for key in config}
    return {key for key in keys if len({repr(config.get(key)) for config in configs}) > 1}


def plain_config(run: Run) -> dict[str, Any]:
    """The recorded config, flat; what identity adds stands beside the short names."""
    config = dict(run.result.config)
    identity = config.pop("identity", None)
    inner = flatten(identity) if isinstance(identity, Mapping) else {}
    return {k: v for k, v in inner.items() if k.partition(".")[0] not in SIZES} | flatten(config)


def is_norm_key(key: str) -> bool:
    return key.partition(".")[0] in NORM_KEYS


def _cells_of(study: StudyRuns, *, alone: bool) -> list[Cell]:
    grouped: dict[str, list[Run]] = defaultdict(list)
    for run in study.runs:
        grouped[run.result.cell_id].append(run)
    unreadable = {seed for path in study.unreadable if (seed := seed_of(path)) is not None}
    expected = tuple(sorted({run.result.seed for run in study.runs} | unreadable))
    return [_cell(runs, expected, alone=alone) for runs in grouped.values()]


def _cell(runs: list[Run], expected: tuple[int, ...], *, alone: bool) -> Cell:
    config = plain_config(runs[0])
    batch_size = config["batch_size"]
    micro = config.get("micro_batch_size") or batch_size
    name = str(config.get("norm", "-"))
    if name == "custom":
        name = str(config.get("norm._target_", name)).rpartition(".")[2]
    settings = {key: value for key, value in config.items() if _is_setting(key)}
    return Cell(
        id=runs[0].result.cell_id,
        study=runs[0].study,
        norm=name if alone else f"{name} · {runs[0].study}",
        config=config,
        settings=_as_settings(settings),
        batch_size=batch_size,
        micro_batch_size=micro,
        norm_batch_size=config.get("norm_batch_size") or micro,
        mixes_samples=config.get("mixes_samples") is not False,
        runs=tuple(sorted(runs, key=lambda run: run.result.seed)),
        expected=expected,
    )


def _is_setting(key: str) -> bool:
    if key in SIZES or key == "lr" or is_norm_key(key):
        return False
    return not key.startswith(IGNORED)


def _as_settings(settings: Mapping[str, Any]) -> Settings:
    return tuple(sorted(settings.items(), key=lambda item: item[0]))


def _without_derived(cells: list[Cell]) -> list[Cell]:
    """Drops settings that only follow from the size."""
    dropped = _derived(cells, DERIVED)
    return [
        replace(cell, settings=tuple(p for p in cell.settings if p[0] not in dropped))
        for cell in cells
    ]


def _derived(cells: Sequence[Cell], keys: Iterable[str]) -> set[str]:
    """Those of `keys` that have one value wherever norm, sizes and the other settings are alike."""
    keys = set(keys)
    alike: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        rest = tuple(pair for pair in cell.settings if pair[0] not in keys)
        place = (rest, cell.norm, cell.batch_size, cell.norm_batch_size)
        alike[place].append({key: cell.config.get(key) for key in keys})
    return keys - set().union(*(varying_keys(configs) for configs in alike.values()))


def _labelled(cells: list[Cell]) -> list[Cell]:
    """Adds the knobs in which norms of one name differ: `group num_groups=8`."""
    by_norm: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_norm[cell.norm].append(cell)
    labelled = []
    for same in by_norm.values():
        knobs = [{k: v for k, v in cell.config.items() if is_norm_key(k)} for cell in same]
        varying = sorted(varying_keys(knobs) - _derived(same, [DERIVED_OF_NORM]))
        for cell, own in zip(same, knobs, strict=True):
            words = [f"{key.removeprefix('norm.')}={own.get(key)}" for key in varying]
            labelled.append(replace(cell, norm=" ".join([cell.norm, *words])))
    return [
        cell if not cell.invalid else replace(cell, norm=f"{cell.norm} INVALID")
        for cell in labelled
    ]


def _told_apart(cells: list[Cell]) -> list[Cell]:
    """Adds the protocol where one norm reached one size in two ways (ghost and accumulated)."""
    places: dict[Any, set[str]] = defaultdict(set)
    for cell in cells:
        places[_place(cell)].add(cell.protocol)
    doubled = {place[1] for place, protocols in places.items() if len(protocols) > 1}
    return [
        replace(cell, norm=f"{cell.norm} {cell.protocol}") if cell.norm in doubled else cell
        for cell in cells
    ]


def _place(cell: Cell) -> tuple[Any, ...]:
    size = cell.norm_batch_size if cell.mixes_samples else None
    return cell.settings, cell.norm, cell.batch_size, size, cell.lr


def _without_what_differs_by_study(cells: list[Cell]) -> list[Cell]:
    """Drops settings that only tell the studies apart; they are listed by the comparison."""
    by_study: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        by_study[cell.study].append(dict(cell.settings))
    within = set().union(*(varying_keys(configs) for configs in by_study.values()))
    between = varying_keys([dict(cell.settings) for cell in cells]) - within
    return [
        replace(cell, settings=tuple(p for p in cell.settings if p[0] not in between))
        for cell in cells
    ]
