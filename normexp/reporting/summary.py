"""What a training command prints at its end: results with their spread, and what to type next."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from shlex import join, quote

from normexp.config.outcome import Outcome
from normexp.config.rules import format_count
from normexp.config.spec import CellSpec, study_words
from normexp.records.paths import LOG_FILE, seed_dir
from normexp.records.result import DONE, Result, Status, values_of
from normexp.records.samples import count_samples
from normexp.records.state import shared_words
from normexp.reporting.metric import LOWER, chance_words, is_at_chance
from normexp.reporting.terminal import Footnotes, open_console, text_table

SHOWN = ("test/accuracy", "test/bits_per_byte", "test/loss", "val/accuracy", "val/bits_per_byte")
STATUSES = (
    *(Status.FINISHED, Status.SKIPPED, Status.DIVERGED, Status.REFUSED, Status.FAILED),
    Status.STOPPED,
)
WIDE = 110  # terminal width from which the folder of each cell is shown
# Norms to compare with: for images, and for language models (these do not read future tokens).
OF_IMAGES = ("batch", "layer", "instance", "group")
OF_LANGUAGE = ("batch", "layer", "causal_instance", "causal_group")
MAIN = ("test/accuracy", "test/bits_per_byte", "test/loss")


def print_summary(outcome: Outcome, words: Sequence[str]) -> None:
    """Prints the metrics of one cell over its seeds, its directory, and commands to type next.

    Args:
        words: the typed command, program first.
    """
    if outcome.status is Status.FAILED:
        print(f"failed: {outcome.error}", file=sys.stderr)
    if outcome.status not in DONE:
        return
    console = open_console()
    how = {Status.SKIPPED: "already recorded", Status.FINISHED: "trained"}
    count = format_count(len(outcome.results), "seed")
    console.out(f"\n{outcome.title}: {how[outcome.status]}, n = {count}")
    if outcome.invalid:
        console.out(f"INVALID, every number: {outcome.invalid}")
    rows = []
    for name in shown_metrics(outcome.results):
        values = values_of(outcome.results, name)
        spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"
        mean, least, most = (f"{f(values):.4f}" for f in (statistics.mean, min, max))
        stamp = " INVALID" if outcome.invalid else ""
        rows.append([name + stamp, mean, spread, least, most, str(len(values))])
    if rows:  # unless all have diverged
        heads = ("metric", "mean", "sd over seeds", "lowest", "highest", "n")
        console.print(text_table(heads, rows))
    for result in outcome.results:
        if result.status == Status.DIVERGED:
            console.out(f"seed {result.seed} diverged at step {result.diverged_at_step}")
    for result in outcome.results:
        if result.stopped:
            console.out(f"seed {result.seed} ended at step {result.steps}: {result.stopped}")
    seconds = max(result.timing.get("train_seconds", 0.0) for result in outcome.results)
    steps = outcome.results[0].timing.get("step_ms", 0.0)
    console.out(f"trained in {seconds:.1f} s, {steps:.2f} ms per step of the whole stack")
    console.out(f"run directory: {outcome.directory}")
    for note in notes_on(outcome):
        console.out(note)
    console.out("next:")
    for command in next_commands(outcome, words):
        console.out(f"  {command}")


def notes_on(outcome: Outcome) -> list[str]:
    """Warnings about results: seeds no better than chance, or all runs diverged."""
    notes, chance = [], outcome.description.get("chance_accuracy")
    at_chance = [
        run
        for run in outcome.results
        if is_at_chance(run.metrics.get(MAIN[0]), chance, _num_samples(outcome, run))
    ]
    if chance == 1 and values_of(outcome.results, MAIN[0]):
        notes.append("the test split has one class, so every network is right")
    if chance is not None and at_chance:
        words = chance_words(len(at_chance), len(outcome.results), chance)
        notes.append(f"{words}: no better than always naming the most frequent class; {LOWER}")
    if _status_of(outcome) is Status.DIVERGED:
        lr = outcome.description["lr"]
        notes.append(f"every run diverged; try a smaller lr than {lr:g}, such as lr={_below(lr)}")
    return notes


def _num_samples(outcome: Outcome, run: Result) -> int:
    """Of the test split."""
    return count_samples(seed_dir(outcome.directory, run.seed)) if outcome.directory else 0


def _below(lr: float) -> str:
    return f"{min(lr / 10, 0.1):g}"


def shown_metrics(results: Sequence[Result]) -> list[str]:
    """The metrics that get a row, each followed by its variants with other statistics (`@...`)."""
    names = {name for result in results for name in result.metrics}
    return [name for base in SHOWN for name in sorted(names) if name.partition("@")[0] == base]


def next_commands(outcome: Outcome, words: Sequence[str]) -> list[str]:
    """Commands that repeat the training with other norms and other norm batch sizes.

    The sizes are the smallest above 1, a middle and the largest that divide a device's samples.

    Args:
        words: the typed command, program first; all is kept but the norm and its knobs.
    """
    description = outcome.description
    kept = [word for word in words[1:] if not re.match(r"\+*norm[.=]|(-m|--multirun)$", word)]
    knobs = [word for word in words if re.match(r"\+*norm\.(?!_target_)", word)]
    paths = [re.fullmatch(r"norm(?:\._target_)?=(\w+(?:\.\w+)+)", word) for word in words]
    names = [*(path[1] for path in paths if path), description["norm"]]
    this_norm = [] if knobs else names[:1]  # a list of norms drops knobs
    is_text = any("test/bits_per_byte" in result.metrics for result in outcome.results)
    ours = OF_LANGUAGE if is_text else OF_IMAGES
    norms = list(dict.fromkeys([*this_norm, *ours]))
    lines = [[f"norm={','.join(norms)}", *kept]]
    share = (description["micro_batch_size"] or description["batch_size"]) // description["devices"]
    sizes = [size for size in range(2, share + 1) if share % size == 0]
    if len(sizes) > 1:
        rest = [word for word in kept if not word.startswith("norm_batch_size=")]
        chosen = sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})
        values = ",".join(map(str, chosen))
        lines.append([f"norm={ours[0]},{ours[-1]}", f"norm_batch_size={values}", *rest])
    return [
        *(f"python -m normexp.train -m {join(line)}" for line in lines),
        "python -m normexp.train --help",
    ]


def print_closing_table(cells: Sequence[CellSpec], outcomes: Sequence[Outcome]) -> None:
    """Prints a row per cell of a sweep; grid points that are one cell share a row.

    On a narrow terminal without the cells' folders.
    """
    console = open_console()
    rows = by_cell(cells, outcomes)
    names = {_main_metric(outcome) for outcome in outcomes} - {""}
    metric = names.pop() if len(names) == 1 else ""
    has_place = console.width >= WIDE
    table, footnotes = [], Footnotes()
    has_sizes = any("norm_batch_size=" in cell.title for cell in cells)
    for title, outcome in rows:
        values = values_of(outcome.results, _main_metric(outcome))
        if has_sizes and outcome.description.get("mixes_samples") is False:
            title += " (any norm_batch_size: does not mix samples)"
        shown, count = _shown(outcome, in_header=metric), len(values) if outcome.results else ""
        row = [_status_of(outcome), title, footnotes.mark(shown), str(count)]
        row += [outcome.cell_id] * has_place
        table.append(row)
    heads = ["status", "cell", metric or "result", "n", *["where"] * has_place]
    console.print(text_table(heads, table))
    footnotes.print(console)
    counts = Counter(_status_of(outcome) for _, outcome in rows)
    merged = f" (of {len(cells)} points of the grid, some are one cell)"
    merged = merged if len(rows) < len(cells) else ""
    console.out(", ".join(f"{counts[name]} {name}" for name in STATUSES if counts[name]) + merged)
    for note in _notes_on_rows(rows):
        console.print(note, markup=False)  # wrapped
    for command in commands_to_look(outcomes):
        console.out(f"  {command}")


def _notes_on_rows(rows: Sequence[tuple[str, Outcome]]) -> list[str]:
    """The warnings about the cells of a sweep, each with its cell.

    Of cells that differ in the rate alone, a smaller one is advised once, unless one has trained.
    """
    notes, lowest, trained = list[str](), dict[str, float](), set[str]()
    for title, outcome in rows:
        rest = re.sub(r"(^| )lr=\S+", "", title).strip()
        if _status_of(outcome) is Status.DIVERGED:
            lowest[rest] = min(lowest.get(rest, math.inf), outcome.description["lr"])
        else:
            trained |= {rest} if outcome.results else set()
            notes += [f"{title}: {note}" for note in notes_on(outcome)]
    for rest, lr in lowest.items():
        if rest not in trained:
            cell = f"{rest}: " if rest else ""
            notes.append(f"{cell}every run diverged, from lr={lr:g} up; try lr={_below(lr)}")
    return notes


def by_cell(cells: Sequence[CellSpec], outcomes: Sequence[Outcome]) -> list[tuple[str, Outcome]]:
    """Each distinct cell of a command: the title of its grid points, and its outcome.

    Points that share no word, as sizes without effect, have the title of the outcome. A cell that
    the command trained for one of its points was not skipped.
    """
    rows: dict[tuple[str, str], tuple[list[str], Outcome]] = {}
    for position, (cell, outcome) in enumerate(zip(cells, outcomes, strict=True)):
        key = (str(outcome.directory), outcome.cell_id or str(position))
        titles, known = rows.get(key, ([], outcome))
        shown = outcome if known.status is Status.SKIPPED else known
        rows[key] = ([*titles, cell.title], shown)
    return [(shared_words(titles) or outcome.title, outcome) for titles, outcome in rows.values()]


def _main_metric(outcome: Outcome) -> str:
    return next((name for name in MAIN if values_of(outcome.results, name)), "")


def _shown(outcome: Outcome, *, in_header: str) -> str:
    """The main metric, or why it is missing."""
    name = _main_metric(outcome)
    values = values_of(outcome.results, name)
    label = "" if name == in_header else f"{name} "
    spread = f" (sd {statistics.stdev(values):.4f})" if len(values) > 1 else ""
    parts = [f"{label}{statistics.mean(values):.4f}{spread}"] if values else []
    parts += [re.sub(r" \(see \S+\)$", "", outcome.error)] if outcome.error else []
    diverged = [
        run.diverged_at_step or 0 for run in outcome.results if run.status == Status.DIVERGED
    ]
    stopped = [run.steps for run in outcome.results if run.stopped]
    for end, runs, steps in (
        ("diverged", diverged, sorted(set(diverged))),
        ("ended early", stopped, stopped),
    ):
        if runs:
            where = ", ".join(map(str, steps))
            parts.append(f"{len(runs)} of {len(outcome.results)} {end}, at step {where}")
    shown = "; ".join(parts)
    return f"INVALID {shown}" if outcome.invalid else shown


def _status_of(outcome: Outcome) -> Status:
    """The status of the outcome; `diverged` if all of its runs have diverged."""
    ended = {run.status for run in outcome.results} - {Status.FAILED}
    is_lost = outcome.status in DONE and ended == {Status.DIVERGED}
    return Status.DIVERGED if is_lost else outcome.status


def commands_to_look(outcomes: Sequence[Outcome]) -> list[str]:
    """Commands that show the log of each failure, the status and the report of the study."""
    logs = [
        f"less {quote(str(outcome.directory))}/stacks/*/{LOG_FILE}"
        for outcome in outcomes
        if outcome.status is Status.FAILED and outcome.directory is not None
    ]
    studies = {outcome.directory.parent for outcome in outcomes if outcome.directory is not None}
    where = [join(study_words(study)) for study in sorted(studies)]
    has_more = any(outcome.status not in DONE for outcome in outcomes)
    status = [f"python -m normexp.status {words}" for words in where] if has_more else []
    return [*logs, *status, *(f"python -m normexp.report {words}" for words in where)]
