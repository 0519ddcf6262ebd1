"""What a norm loses along the sizes, in words that follow from the interval of its drop."""

from __future__ import annotations

from dataclasses import dataclass

from normexp.reporting.cells import Cell
from normexp.reporting.metric import Metric
from normexp.reporting.numbers import format_interval, negated
from normexp.reporting.slices import AXIS_WORDS, Line, Slice, align
from normexp.stats import Interval, Sensitivity, batch_size_sensitivity


@dataclass(frozen=True)
class Loss:
    """What one norm loses along the sizes.

    kind: `loses`, `gains`, `holds` (within the tolerance), `unclear`, `no interval`, `no data`,
        `independent` (of the norm batch size, by measurement), `one size` or `invalid`
    """

    norm: str
    kind: str
    text: str
    sensitivity: Sensitivity | None


def describe_losses(part: Slice) -> list[Loss]:
    """One sentence per norm of the slice."""
    return [describe_loss(line, part) for line in part.lines.values()]


def describe_loss(line: Line, part: Slice) -> Loss:
    """The sentence of one norm; its words follow from the interval of the drop."""
    axis, metric = AXIS_WORDS[part.axis], part.metric
    invalid = next((cell.invalid for cell in line.all_cells if cell.invalid), None)
    if invalid:
        return Loss(line.norm, "invalid", f"{line.norm} is not compared: {invalid}.", None)
    if line.independent is not None:
        counts = words_of_n(line.independent, metric, len(line.independent.values(metric)), "seeds")
        text = (
            f"{line.norm} does not depend on the {axis} "
            f"(measured: it does not mix samples; {counts})."
        )
        return Loss(line.norm, "independent", text, None)
    sizes = sorted(line.cells)
    if len(sizes) < 2:
        text = f"{line.norm} was run at one {axis} only ({', '.join(map(str, sizes))})."
        return Loss(line.norm, "one size", text, None)
    values, _ = align(line, sizes, metric)
    found = batch_size_sensitivity(
        values, sizes, higher_is_better=metric.higher_is_better, tolerance=metric.tolerance
    )
    kind, words = loss_words(found.drop, metric)
    where = f"from {axis} {found.reference_size} to {found.smallest_size}"
    counts = words_of_n(line.cells[found.smallest_size], metric, found.drop.n, "seeds")
    lost = lost_words(line.cells[found.reference_size], metric)
    other = f"; at {found.reference_size}: {lost}" if lost else ""
    text = f"{line.norm} {words.format(where=where)} ({counts}{other})."
    return Loss(line.norm, kind, text + _size_words(found, metric, axis), found)


def loss_words(drop: Interval, metric: Metric) -> tuple[str, str]:
    """Kind and words of a drop; `{where}` stands for the sizes."""
    unit = metric.unit
    if drop.estimate is None:
        return "no data", "has no seed that finished at both ends, {where}"
    if drop.low is None or drop.high is None:
        verb = "loses" if drop.estimate >= 0 else "gains"
        amount = f"{abs(drop.estimate):.{metric.digits}f} {unit}".strip()
        return (
            "no interval",
            f"{verb} {amount} {{where}} with too few seeds: no interval, no verdict",
        )
    shown = f"{format_interval(drop, metric.digits)} {unit}".strip()
    if drop.low > 0:
        return "loses", f"loses {shown} {{where}}"
    if drop.high < 0:
        gain = f"{format_interval(negated(drop), metric.digits)} {unit}".strip()
        return "gains", f"gains {gain} {{where}}"
    if max(-drop.low, drop.high) <= metric.tolerance:
        return "holds", f"holds its level within {metric.tolerance_words} {{where}}: loss {shown}"
    return "unclear", f"shows no clear loss {{where}}: {shown}; more seeds would tell"


def _size_words(found: Sensitivity, metric: Metric, axis: str) -> str:
    """At which sizes a loss beyond the tolerance is shown, and at which it is not ruled out."""
    limit = metric.tolerance
    shown = [
        size for size, loss in found.losses.items() if loss.low is not None and loss.low > limit
    ]
    unknown = [
        size
        for size, loss in found.losses.items()
        if size not in shown and (loss.high is None or loss.high > limit)
    ]
    if not shown:
        return ""
    where = f" A loss of more than {metric.tolerance_words} is shown at {axis} {_join(shown)}"
    return where + (f" and not ruled out at {_join(unknown)}." if unknown else ".")


def _join(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def words_of_n(cell: Cell, metric: Metric, n: int, noun: str) -> str:
    """`n = 5 seeds; 2 of 8 diverged, 1 of 8 missing`."""
    lost = lost_words(cell, metric)
    noun = noun[:-1] if n == 1 else noun
    return f"n = {n} {noun}" + (f"; {lost}" if lost else "")


def lost_words(cell: Cell, metric: Metric) -> str:
    """`2 of 8 diverged, 1 of 8 missing`: a number over the others flatters."""
    groups = {
        "diverged": cell.seeds("diverged"),
        "failed": cell.seeds("failed"),
        "missing": cell.missing,
        f"without {metric.name}": set(cell.seeds("finished")) - cell.values(metric).keys(),
    }
    parts = [
        f"{len(seeds)} of {len(cell.expected)} {word}" for word, seeds in groups.items() if seeds
    ]
    return ", ".join(parts)
