"""Slices of the cells of a study: arms against one varying size, all else equal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from normexp.verdicts.arm_at_size import ArmAtSize
from normexp.verdicts.arms import compared_keys, family_of, order_arms, with_arm
from normexp.verdicts.cells import CellRuns, metric_names, settings_key
from normexp.verdicts.family import ALPHA
from normexp.verdicts.metric import PREFERRED, Metric, choose_metric
from normexp.verdicts.waves import drift_of
from normexp.words import format_count

# What is recorded of the environment and named where runs differ in it.
VERSIONS = ("torch", "pytorch-lightning", "torchvision", "numpy", "hydra-core", "python")
VERSIONS += ("code_version",)
AXIS_WORDS = {"norm_batch_size": "norm batch size", "batch_size": "batch size"}


@dataclass(frozen=True, eq=False)
class Slice:
    """Arms along one size, the axis, all else equal.

    title: model, data and other settings that distinguish the slice
    fixed: the other size, in words
    slug: suffix of file names
    lines: each arm at each size that was run. Along norm_batch_size, an arm that does not mix
        samples was trained once, and stands at every size.
    independent: the arms that do not mix samples, along norm_batch_size
    compared_at: the sizes at which arms are compared with each other
    is_main: it compares the arms of the study's roles, with themselves along the sizes, too; others
        compare another setting
    family: equal for slices that share an error rate: one model, data set and budget
    alpha: that error rate
    no_verdict: why no comparison has a verdict; empty if they may
    has_marks: arms that may be the best are marked
    """

    title: str
    fixed: str
    slug: str
    axis: str
    sizes: Sequence[int]
    metric: Metric
    lines: Mapping[str, Mapping[int, ArmAtSize]] = field(repr=False)
    independent: frozenset[str]
    compared_at: Sequence[int]
    is_main: bool = True
    family: Hashable = ()
    alpha: float = ALPHA
    no_verdict: str = ""
    has_marks: bool = True

    @property
    def arm_key(self) -> str:
        """The setting that is compared: `norm`."""
        return self.cells[0].roles.arm

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.fixed}" if self.fixed else self.title

    def at_words(self, size: int) -> str:
        """` at norm batch size 2`; empty where the slice has one size."""
        return f" at {AXIS_WORDS[self.axis]} {size}" if len(self.sizes) > 1 else ""

    @property
    def arms(self) -> list[str]:
        return list(self.lines)

    @property
    def arm_names(self) -> dict[str, str]:
        """By label, the names of the arms."""
        return {cell.arm: cell.arm_name for cell in self.cells}

    @property
    def arms_at_sizes(self) -> list[ArmAtSize]:
        """Each once, by arm and then by size."""
        everywhere = [side for line in self.lines.values() for side in line.values()]
        return list(dict.fromkeys(everywhere))

    @property
    def cells(self) -> list[CellRuns]:
        return [cell for side in self.arms_at_sizes for cell in side.cells]

    def at(self, size: int) -> dict[str, ArmAtSize]:
        """The arms that were run at a size."""
        return {arm: line[size] for arm, line in self.lines.items() if size in line}

    @cached_property
    def has_samples(self) -> bool:
        """True if test samples are recorded; a comparison without any says so."""
        return any(side.outcomes.ndim == 2 for side in self.arms_at_sizes)

    @cached_property
    def drift(self) -> float:
        """Of the differences of its arms along the test text.

        An arm with a run that counts as chance is left out: it differs from others as the text
        does, whatever they are.
        """
        sides = [side for side in self.arms_at_sizes if side.seeds and not side.has_chance_run]
        return drift_of([side.waves for side in sides])

    def drift_between(self, first: ArmAtSize, second: ArmAtSize) -> float:
        """The drift of two arms; with a run that counts as chance, that of their difference."""
        if first.has_chance_run or second.has_chance_run:
            return drift_of([first.waves, second.waves])
        return self.drift

    @property
    def scope(self) -> str:
        """What every number of the slice has in common, in words; and in what its runs differ."""
        words = [self.title, self.fixed]
        words += [cell.budget for cell in self.cells if cell.budget not in self.title]
        words.append(self._tuned_words)
        if searched := sorted({key for cell in self.cells for key in cell.searched}):
            keys = "learning rates" if searched == ["lr"] else " and ".join(searched)
            words.append(f"at the {keys} that one search chose")
        words += [cell.config.get("optim") for cell in self.cells]
        words += self._machine_words
        early = Counter[str]()
        for cell in self.cells:
            early[cell.arm] += sum(run.measured.get("stopped") is not None for run in cell.runs)
        words += [f"ended early: {count} of {arm}" for arm, count in early.items() if count]
        counts = sorted({len(side.seeds) for side in self.arms_at_sizes})
        fewest = f"{counts[0]} to " if len(counts) > 1 else ""
        words.append(f"n = {fewest}{format_count(counts[-1], 'seed')}")
        scope = ", ".join(filter(None, dict.fromkeys(words)))
        if not self.has_samples:
            return (
                f"{scope}; intervals cover the variation of seeds, not the choice of test samples"
            )
        return (
            f"{scope}; intervals of means cover the variation of seeds alone, those of differences "
            "also the choice of test samples"
        )

    @property
    def _tuned_words(self) -> str:
        """`lr=0.1`, `lr=0.1 to 0.3`, `lr tuned over 5`."""
        counts = sorted({len(side.cells) for side in self.arms_at_sizes})
        if counts != [1]:
            by = f" by {self.metric.chosen_by.name}" if self.metric.chosen_by else ""
            return f"{self.cells[0].roles.tuned} tuned over {'-'.join(map(str, counts))}{by}"
        rates = sorted({cell.tuned for cell in self.cells if cell.tuned is not None})
        if not rates:
            return ""
        ends = dict.fromkeys(f"{rate:.3g}" for rate in (rates[0], rates[-1]))
        return f"{self.cells[0].roles.tuned}={' to '.join(ends)}"

    @property
    def _machine_words(self) -> list[str]:
        """The processors, and the versions in which runs differ."""
        environments = [run.part("environment") for cell in self.cells for run in cell.runs]
        words = [found.get("gpu") or found.get("cpu", "") for found in environments]
        for name in VERSIONS:
            versions = sorted(
                {str(environment[name]) for environment in environments if name in environment}
            )
            if len(versions) > 1:
                words.append(f"{name} {' and '.join(versions)}")
        return words


def build_slices(
    cells: Sequence[CellRuns], *, metric: str | Metric | None, tolerance: float | None
) -> list[Slice]:
    """Every slice of the cells; settings without the requested metric are left out.

    First those of the arms of the study, then those of each other setting that was swept.
    """
    keys = compared_keys(cells)
    slices = _slices_of_arms(cells, metric, tolerance)
    others: list[Slice] = []
    for key in keys:
        for slice_ in _slices_of_arms(with_arm(cells, key), metric, tolerance):
            if len(slice_.lines) > 1:
                others.append(replace(slice_, is_main=False))
    elsewhere = {cell.directory for slice_ in others for cell in slice_.cells}
    slices = [one for one in slices if not _is_repeated(one, elsewhere)] + others
    arm_keys = (cells[0].roles.arm, *keys)
    return _with_slugs([replace(one, family=family_of(one.cells[0], arm_keys)) for one in slices])


def _is_repeated(slice_: Slice, elsewhere: Collection[Path]) -> bool:
    """True if it compares nothing and all of its cells stand in another slice."""
    is_alone = len(slice_.lines) == 1 and len(slice_.sizes) == 1
    return is_alone and all(cell.directory in elsewhere for cell in slice_.cells)


def _slices_of_arms(
    cells: Sequence[CellRuns], metric: str | Metric | None, tolerance: float | None
) -> list[Slice]:
    by_settings: dict[Hashable, list[CellRuns]] = {}
    for cell in cells:
        by_settings.setdefault(settings_key(cell), []).append(cell)
    slices = []
    for equal in by_settings.values():
        if not any(cell.runs for cell in equal):
            continue
        wanted = metric.name if isinstance(metric, Metric) else metric
        # If all runs diverged or failed, no metric is available; the report says so.
        available = metric_names(equal) or [wanted or PREFERRED[0]]
        described = choose_metric(available, metric, tolerance)
        if described is not None:
            slices += _slices_of(equal, described)
    return slices


def _slices_of(cells: Sequence[CellRuns], metric: Metric) -> list[Slice]:
    """Slices along the norm batch size and along the batch size, each if it varies.

    A cell that would stand in none of them has a slice of one size.
    """
    cells = _drop_twins(cells)
    mixing = {cell.arm for cell in cells if cell.mixes_samples}
    independent = frozenset(cell.arm for cell in cells) - mixing
    along_norm_batch_size = _along_norm_batch_size(cells, metric, independent)
    slices = [slice_ for slice_ in along_norm_batch_size if len(slice_.sizes) > 1]
    slices += _along_batch_size(cells, metric, independent, slices)
    for slice_ in along_norm_batch_size:
        elsewhere = {cell for other in slices for cell in other.cells}
        if not {*slice_.cells} <= elsewhere:
            slices.append(slice_)
    return slices


def _drop_twins(cells: Sequence[CellRuns]) -> list[CellRuns]:
    """Of equal trainings of an arm that mixes no samples, only the one with the most runs.

    Such an arm may have been asked for at several norm batch sizes; the effective one of all of
    them is the same.
    """
    kept: dict[Hashable, CellRuns] = {}
    for cell in cells:
        place = (cell.arm, cell.tuned, cell.batch_size, cell.norm_batch_size)
        if place not in kept or len(cell.runs) >= len(kept[place].runs):
            kept[place] = cell
    return [cell for cell in cells if cell.mixes_samples or cell in kept.values()]


def _along_norm_batch_size(
    cells: Sequence[CellRuns], metric: Metric, independent: frozenset[str]
) -> list[Slice]:
    """A slice for each batch size, also where the norm batch size does not vary."""
    slices = []
    for size in sorted({cell.batch_size for cell in cells}):
        chosen = [cell for cell in cells if cell.batch_size == size]
        fixed = f"batch size {size}" if size else ""
        norm_sizes = {cell.norm_batch_size for cell in chosen if cell.arm not in independent}
        if len(norm_sizes) == 1 and norm_sizes != {size}:
            fixed += f", norm batch size {norm_sizes.pop()}"
        slices.append(_slice("norm_batch_size", fixed, chosen, metric, independent))
    return slices


def _along_batch_size(
    cells: Sequence[CellRuns],
    metric: Metric,
    independent: frozenset[str],
    along_norm_batch_size: Sequence[Slice],
) -> list[Slice]:
    """Slices with norm batch size = batch size and, if it varies in no other slice, each one."""
    norm_batch_sizes: dict[str, int | None] = {"norm batch size = batch size": None}
    if not along_norm_batch_size:
        for size in sorted({c.norm_batch_size for c in cells if c.arm not in independent}):
            norm_batch_sizes[f"norm batch size {size}"] = size
    slices: list[Slice] = []
    for fixed, size in norm_batch_sizes.items():
        chosen = [
            cell
            for cell in cells
            if cell.arm in independent or cell.norm_batch_size == (size or cell.batch_size)
        ]
        others = (*along_norm_batch_size, *slices)
        is_repeated = any({*chosen} <= {*slice_.cells} for slice_ in others)
        if len({cell.batch_size for cell in chosen}) > 1 and not is_repeated:
            slices.append(_slice("batch_size", fixed, chosen, metric))
    return slices


def _slice(
    axis: str,
    fixed: str,
    cells: Sequence[CellRuns],
    metric: Metric,
    independent: frozenset[str] = frozenset(),
) -> Slice:
    by_arm: dict[str, dict[int, list[CellRuns]]] = {}
    for cell in sorted(cells, key=lambda cell: (getattr(cell, axis), cell.tuned or 0)):
        line = by_arm.setdefault(cell.arm, {})
        line.setdefault(getattr(cell, axis), []).append(cell)
    mixing = {size for arm in by_arm.keys() - independent for size in by_arm[arm]}
    sizes = sorted(mixing) or [cells[0].batch_size]
    lines: dict[str, dict[int, ArmAtSize]] = {}
    for arm in order_arms({cell.arm: cell.arm_name for cell in cells}):
        line = by_arm[arm]
        if arm in independent:
            at_all_sizes = [cell for at_size in line.values() for cell in at_size]
            lines[arm] = dict.fromkeys(sizes, ArmAtSize(arm, at_all_sizes, metric, sizes[0]))
        else:
            lines[arm] = {size: ArmAtSize(arm, line[size], metric, size) for size in line}
    return Slice(
        title=cells[0].title,
        fixed=fixed,
        slug="",
        axis=axis,
        sizes=sizes,
        metric=metric,
        lines=lines,
        independent=independent & lines.keys(),
        compared_at=sizes,
    )


def _with_slugs(slices: Sequence[Slice]) -> list[Slice]:
    """Gives each slice a short unique name for files."""
    if len(slices) == 1:
        return [replace(slices[0], slug="main")]
    named = []
    for number, slice_ in enumerate(slices, start=1):
        words = re.sub(r"[^a-z0-9]+", "_", f"{slice_.title} {slice_.fixed}".lower()).strip("_")
        named.append(replace(slice_, slug=f"{number:02d}_{words[:48].strip('_')}"))
    return named
