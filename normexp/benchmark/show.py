"""The benchmark's report on the terminal: ranking, sensitivity, cost, bars, claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from normexp.benchmark.claims import Tested, Verdict, words_of
from normexp.benchmark.protocol import WorkloadRecipe
from normexp.benchmark.ratio import as_ratio
from normexp.benchmark.report import TITLES, BenchmarkReport, interval_words, words_of_bounds
from normexp.benchmark.score import GROUPS, Overall, Standing, Standings
from normexp.reporting.terminal import open_console, text_table

GROUPS_NOTE = (
    "Groups are what verdicts tell apart (false in at most 5 % of rankings); each interval is of "
    "one comparison (95 %)."
)


def print_report(report: BenchmarkReport) -> None:
    """The rankings, then the claims of the reference, or the standing of an entry."""
    console = open_console()
    console.out(report.title, highlight=False)
    console.out(GROUPS_NOTE, highlight=False)
    if report.overall is not None:
        console.out(f"\n{overall_heading(report.overall)}", highlight=False)
        columns = ("", "all", *(one.recipe.name for one in report.overall.standings))
        _print_groups(console, columns, overall_rows(report.overall))
        console.out(overall_note(report), highlight=False)
    for one in report.standings:
        console.out(f"\n{heading(one)}", highlight=False)
        columns = ("", unit_of(one), f"of {one.reference}'s", "2 against full", "rate")
        _print_groups(console, (*columns, "step", "bytes"), _rows(one))
        for note in notes_of(one):
            console.out(note, highlight=False)
    if report.table.costs:
        console.out(f"\n{cost_note(report)}", highlight=False)
    if report.norm is None:
        _print_claims(report.verdicts)
    else:
        console.out(f"\n{report.sentence}", highlight=False)


def _print_groups(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table whose rows start with the title of their group, shown once above them."""
    table = text_table(columns, [])
    shown = ""
    for title, name, *texts in rows:
        if title != shown:
            table.add_row(title)
        table.add_row(f"  {name}", *texts)
        shown = title
    console.print(table, markup=False)


def overall_heading(overall: Overall) -> str:
    """`Error over 4 workloads, as a ratio to batch's and layer's`."""
    return f"Error over {len(overall.standings)} workloads, as a ratio to {overall.references}"


def overall_note(report: BenchmarkReport) -> str:
    """What the ratios are of, and how many norms are left out."""
    overall = report.overall
    assert overall is not None
    names = {place.norm for one in overall.standings for place in one.places}
    left_out = len(names) - len(overall.places)
    words = ", ".join(f"{one.reference}'s in {one.recipe.name}" for one in overall.standings)
    words = f"Ratios at the long budget, to {words}; all: their geometric mean."
    if left_out:
        those = "norm that is" if left_out == 1 else "norms that are"
        words += f" Left out: {left_out} {those} not ranked in every workload."
    return words


def overall_rows(overall: Overall) -> Iterator[list[str]]:
    """Group, norm, the mean ratio with its interval, and the ratio in each workload."""
    for place in overall.places:
        title = TITLES[place.group].format(reference="the references")
        shown = [known for one in overall.standings if (known := one.of(place.norm)) is not None]
        ratios = [ratio_words(known).partition(" ")[0] for known in shown]
        yield [title, place.norm, ratio_words(place), *ratios]


def heading(one: Standings) -> str:
    """`convnet: error in % at the tuned rate, 18 epochs, n = 8`."""
    recipe = one.recipe
    unit = "error in %" if unit_of(one) == "error" else "bits per byte"
    return f"{recipe.name}: {unit} at the tuned rate, {budget_of(recipe)}, n = {recipe.num_seeds}"


def budget_of(recipe: WorkloadRecipe) -> str:
    """`18 epochs`, or `1,500 steps`."""
    return f"{recipe.epochs:g} epochs" if recipe.epochs else f"{recipe.steps:,} steps"


def unit_of(one: Standings) -> str:
    tuned = next(place.tuned for place in one.places if place.norm == one.reference)
    assert tuned is not None
    return "error" if tuned.is_accuracy else "bits"


def notes_of(one: Standings) -> Iterator[str]:
    """What the order within a group means, and the published bar."""
    if one.bars:
        bars = ", ".join(f"{bar:.2f} at n = {n}" for n, bar in one.bars.items())
        yield f"A ratio is told from 1 in 80 % of studies from {bars}."


def cost_note(report: BenchmarkReport) -> str:
    """What the columns of cost are, and where they were measured."""
    about = report.table.about
    words = "step, bytes: time of a training step and memory for its backward, of batch's on "
    words += about.get("machine", "an unknown machine")
    entry_on = about.get("machine_of_entry")
    if report.norm is not None and entry_on not in (None, about.get("machine")):
        words += f"; {report.norm} on {entry_on}"
    return words


def _rows(one: Standings) -> Iterator[list[str]]:
    """The group of each place, and the texts of its row."""
    for place in one.places:
        cost = ["-", "-"]
        if place.cost is not None:
            cost = [f"{place.cost.step:.2f}", f"{place.cost.kept:.2f}"]
        row = [group_words(one, place), place.norm]
        if place.tuned is None:
            yield [*row, "-", "-", "-", "-", *cost]
            continue
        error = error_words(place).partition(" ")[0]
        yield [*row, error, ratio_words(place), fall_words(place), rate_words(place), *cost]


def group_words(one: Standings, place: Standing) -> str:
    return TITLES[place.group].format(reference=one.reference)


def rate_words(place: Standing) -> str:
    """The rate that is chosen most often; `0.03, edge` at an end of the grid."""
    return f"{place.tuned.rate:g}" + ", edge" * place.tuned.is_at_edge if place.tuned else "-"


def error_words(place: Standing) -> str:
    """`2.7 [2.4, 3.0]`: error in points, or bits per byte."""
    if place.tuned is None:
        return "-"
    return words_of_bounds(*error_bounds(place), digits=2)


def error_bounds(place: Standing) -> tuple[float | None, float | None, float | None]:
    """Estimate, low and high of the error in points, or of bits per byte."""
    assert place.tuned is not None
    shown = place.tuned.mean
    if not place.tuned.is_accuracy:
        return shown.estimate, shown.low, shown.high
    ends = (shown.estimate, shown.high, shown.low)
    first, low, high = (None if x is None else min(max(100 - x, 0.0), 100.0) for x in ends)
    return first, low, high


def ratio_words(place: Standing) -> str:
    if place.ratio is None:
        return "1" if place.group in GROUPS else "-"
    return interval_words(as_ratio(place.ratio.gap))


def fall_words(place: Standing) -> str:
    """Full batch minus norm batch 2, in the unit of the metric."""
    if place.sensitivity is None or place.tuned is None:
        return "-"
    return interval_words(place.sensitivity.gap, digits=1 if place.tuned.is_accuracy else 3)


def _print_claims(verdicts: Iterable[Verdict]) -> None:
    """Each claim with its verdict, the published numbers and ours."""
    console = open_console()
    for verdict in verdicts:
        lines = [f"\n{verdict.claim['statement']}", f"  {verdict.outcome}"]
        lines[-1] += f" ({verdict.reason})" * bool(verdict.reason)
        lines.append(f"  published: {published_words(verdict.claim['published'])}")
        lines += [f"  {line}" for line in comparison_lines(verdict.tested)]
        for beside in verdict.beside:
            if tested := comparison_lines(beside.tested):
                lines += [
                    f"  beside, {beside.declared['what']}:",
                    *(f"    {line}" for line in tested),
                ]
        if "limits" in verdict.claim:
            lines.append(f"  {verdict.claim['limits']}")
        console.out("\n".join(lines), highlight=False)


def comparison_lines(tested: Iterable[Tested]) -> list[str]:
    """A line on each that has runs: `batch minus layer, gpt at the long budget: ...`."""
    known = (one for one in tested if one.outcome != "not testable here")
    return [f"{one.words}: {words_of(one)}" for one in known]


def published_words(numbers: dict[str, Any]) -> str:
    """`batch 32: 23.6, 2: 34.7; group 32: 24.1, 2: 24.1 (ImageNet top-1 error, %)`."""
    parts = [
        f"{name} {', '.join(f'{k}: {v}' for k, v in value.items())}"
        if isinstance(value, dict)
        else f"{name} {value}"
        for name, value in numbers.items()
        if name not in ("unit", "note")
    ]
    note = f"; {numbers['note']}" if "note" in numbers else ""
    return f"{'; '.join(parts)} ({numbers['unit']}{note})"
