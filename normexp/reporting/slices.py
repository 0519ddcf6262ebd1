"""Slices of the cells of a study: norms against one varying size, all else equal."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from normexp.reporting.cells import settings_key
from normexp.reporting.metric import PREFERRED, Metric, choose_metric, describe_metric
from normexp.reporting.model import CellRow, Slice, metric_names
from normexp.reporting.style import order_norms


def build_slices(
    cells: Sequence[CellRow], *, metric: str | None, tolerance: float | None
) -> list[Slice]:
    """Every slice of the cells; settings without the requested metric are left out."""
    panels: dict[Hashable, list[CellRow]] = {}
    for cell in cells:
        panels.setdefault(settings_key(cell), []).append(cell)
    slices = []
    for panel in panels.values():
        available, rule = metric_names(panel), _rule_of(panel)
        preferred = rule.get("metrics", PREFERRED)
        name = choose_metric(available, metric, preferred)
        if not available:  # all diverged or failed, which is worth reporting too
            name = metric or PREFERRED[0]
        if name is not None:
            is_given = name != (choose_metric(available, None, preferred) or name)
            described = describe_metric(name, tolerance, rule)
            slices += [
                replace(part, is_metric_given=is_given) for part in _slices_of(panel, described)
            ]
    return _with_slugs(slices)


def _rule_of(cells: Sequence[CellRow]) -> Mapping[str, Any]:
    """The rule of the margin that was declared for all of the cells; empty if none was."""
    rules = [cell.rule for cell in cells]
    return rules[0] if all(rule == rules[0] for rule in rules) else {}


def _slices_of(cells: Sequence[CellRow], metric: Metric) -> list[Slice]:
    """Slices along the norm batch size and along the batch size, each if it varies."""
    independent = {cell.norm for cell in cells} - {c.norm for c in cells if c.mixes_samples}
    mixing = [cell for cell in cells if cell.norm not in independent] or cells
    sizes = {
        size: _sorted(cell.norm_batch_size for cell in mixing if cell.batch_size == size)
        for size in _sorted(cell.batch_size for cell in mixing)
    }

    def along_norm_batch_size(batch_size: int, along: Sequence[int]) -> Slice:
        points = [
            (size, cell)
            for cell in cells
            if cell.batch_size == batch_size
            for size in (along if cell.norm in independent else [cell.norm_batch_size])
        ]
        fixed = f"batch size {batch_size}"
        return _slice("norm_batch_size", fixed, along, points, metric, frozenset(independent))

    slices = [along_norm_batch_size(size, along) for size, along in sizes.items() if len(along) > 1]
    alone = [cell for cell in cells if cell.norm in independent]
    is_full = [cell for cell in cells if cell.norm_batch_size == cell.batch_size]
    ways = {"norm batch size = batch size": {*alone, *is_full}}
    if not slices:
        for size in _sorted(cell.norm_batch_size for cell in mixing):
            same = [cell for cell in cells if cell.norm_batch_size == size]
            ways[f"norm batch size {size}"] = {*alone, *same}
    seen: list[set[CellRow]] = []
    for fixed, chosen in ways.items():
        along = _sorted(cell.batch_size for cell in chosen)
        if len(along) > 1 and not any(chosen <= earlier for earlier in seen):
            points = [(cell.batch_size, cell) for cell in cells if cell in chosen]
            slices.append(_slice("batch_size", fixed, along, points, metric, frozenset()))
            seen.append(chosen)
    return slices or [
        along_norm_batch_size(size, sizes.get(size) or [size])
        for size in _sorted(cell.batch_size for cell in cells)
    ]


def _sorted(sizes: Iterable[int]) -> list[int]:
    return sorted(set(sizes))


def _slice(
    axis: str,
    fixed: str,
    sizes: Sequence[int],
    points: Sequence[tuple[int, CellRow]],
    metric: Metric,
    independent: frozenset[str],
) -> Slice:
    """points: each size with a cell that stands there; several rates of one norm at one size."""
    order = {norm: place for place, norm in enumerate(order_norms(c.norm for _, c in points))}
    placed: dict[tuple[str, int], list[CellRow]] = {}
    for size, cell in sorted(points, key=lambda point: (order[point[1].norm], point[0])):
        placed.setdefault((cell.norm, size), []).append(cell)
    lines: dict[str, dict[int, CellRow]] = {}
    for (norm, size), rates in placed.items():
        lines.setdefault(norm, {})[size] = _best(rates, metric)
    cells = dict.fromkeys(cell for rates in placed.values() for cell in rates)
    return Slice(
        title=next(iter(cells)).title,
        fixed=fixed,
        slug="",
        axis=axis,
        sizes=sizes,
        metric=metric,
        lines=lines,
        independent=frozenset(norm for norm in lines if norm in independent),
        rates={place: rates for place, rates in placed.items() if len(rates) > 1},
        values={cell: cell.values(metric) for cell in cells},
    )


def _best(cells: Sequence[CellRow], metric: Metric) -> CellRow:
    """The best on validation, never on test: the fewest runs lost, then the best mean."""
    selection = describe_metric(metric.selection_name)
    sign = 1 if metric.higher_is_better else -1

    def score(cell: CellRow) -> tuple[int, float]:
        values = list(cell.values(selection).values())
        return cell.lost, -sign * float(np.mean(values)) if values else math.inf

    return min(cells, key=score)


def _with_slugs(slices: Sequence[Slice]) -> list[Slice]:
    """Gives each slice a short unique name for files."""
    if len(slices) == 1:
        return [replace(slices[0], slug="main")]
    named = []
    for number, part in enumerate(slices, start=1):
        words = re.sub(r"[^a-z0-9]+", "_", f"{part.title} {part.fixed}".lower()).strip("_")
        named.append(replace(part, slug=f"{number:02d}_{words[:48].strip('_')}"))
    return named
