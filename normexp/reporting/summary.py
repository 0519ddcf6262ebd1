"""What training commands and status print: the states of cells, with results and their spread."""

from __future__ import annotations

import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Sequence

from normexp.config.cells import study_words
from normexp.config.words import format_count
from normexp.records.result import (
    ENDED,
    LOG_FILE,
    Result,
    Status,
    count_samples,
    seed_dir,
    values_of,
)
from normexp.records.study import STATES, CellState, CommandEntry, Study
from normexp.reporting.metric import LOWER, chance_words, is_at_chance
from normexp.reporting.terminal import Footnotes, open_console, text_table, titled_table

SHOWN = ("test/accuracy", "test/bits_per_byte", "test/loss", "val/accuracy", "val/bits_per_byte")
MAIN = ("test/accuracy", "test/bits_per_byte", "test/loss")
STATUSES = ("finished", "skipped", "diverged", "refused", "failed", "stopped")
ENTRIES = {"normexp-train": "python -m normexp.train", "normexp-tune": "python -m normexp.tune"}


def print_summary(state: CellState) -> None:
    """Prints the metrics of one cell over its seeds, its directory, and commands to type next."""
    for error in state.failures:
        print(f"failed: {error}", file=sys.stderr)
    console, ended = open_console(), [run for run in state.results if run.status in ENDED]
    if not ended:
        return
    how = "already recorded" if state.was_over else "trained"
    name = f"{ended[0].config['norm']} on {ended[0].config['data']}"
    console.out(f"\n{name}: {how}, n = {format_count(len(ended), 'seed')}")
    if state.invalid:
        console.out(f"INVALID, every number: {state.invalid}")
    rows = []
    for metric in _shown_metrics(ended):
        values = values_of(ended, metric)
        spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "-"
        mean, least, most = (f"{f(values):.4f}" for f in (statistics.mean, min, max))
        stamp = " INVALID" if state.invalid else ""
        rows.append([metric + stamp, mean, spread, least, most, str(len(values))])
    if rows:  # unless all have diverged
        heads = ("metric", "mean", "sd over seeds", "lowest", "highest", "n")
        console.print(text_table(heads, rows))
    for run in ended:
        if run.status == Status.DIVERGED:
            console.out(f"seed {run.seed} diverged at step {run.diverged_at_step}")
        if run.stopped:
            console.out(f"seed {run.seed} ended at step {run.steps}: {run.stopped}")
    timing = ended[0].timing
    seconds, step = timing.get("train_seconds", 0.0), timing.get("step_ms", 0.0)
    console.out(f"trained in {seconds:.1f} s, {step:.2f} ms per step of the whole stack")
    console.out(f"run directory: {state.directory}")
    for line in [*_notes_on(state), "next:", *commands_to_look([state])]:
        console.out(line)


def print_closing_table(states: Sequence[CellState]) -> None:
    """Prints a row per cell of a sweep."""
    console, table, footnotes = open_console(), [], Footnotes()
    names = {_main_metric(state.results) for state in states} - {""}
    metric = names.pop() if len(names) == 1 else ""
    for state in states:
        shown = footnotes.mark(_shown(state, in_header=metric))
        count = len(values_of(state.results, _main_metric(state.results)))
        table.append([state.status, state.title, shown, str(count or "")])
    console.print(titled_table(["status", "cell", metric or "result", "n"], table))
    footnotes.print(console)
    counts = Counter(state.status for state in states)
    console.out(", ".join(f"{counts[name]} {name}" for name in STATUSES if counts[name]))
    for state in states:
        for note in _notes_on(state):
            console.print(f"{state.title}: {note}", markup=False)  # wrapped
    for command in commands_to_look(states):
        console.out(command)


def commands_to_look(states: Sequence[CellState]) -> list[str]:
    """Commands that show the log of a failure, the status and the report of the study."""
    failed = [run for state in states for run in state.results if run.status is Status.FAILED]
    folders = {state.id: state.directory for state in states if state.states and not state.refused}
    logs = [seed_dir(folders[run.cell_id], run.seed) / LOG_FILE for run in failed[:1]]
    where = [
        shlex.join(study_words(study)) for study in sorted({f.parent for f in folders.values()})
    ]
    has_more = any(state.status in ("failed", "refused", "stopped") for state in states)
    status = [f"python -m normexp.status {words}" for words in where] if has_more else []
    lines = [
        *(f"less {shlex.quote(str(log))}" for log in logs),
        *status,
        *(f"python -m normexp.report {words}" for words in where),
    ]
    return [f"  {line}" for line in lines]


def _notes_on(state: CellState) -> list[str]:
    """Warnings about results: seeds no better than chance, or all runs diverged."""
    ended = [run for run in state.results if run.status in ENDED]
    if not ended:
        return []
    config, notes = ended[0].config, []
    chance = config.get("chance_accuracy")
    at_chance = [
        run
        for run in ended
        for accuracy in [run.metrics.get(MAIN[0])]
        if is_at_chance(accuracy, chance, 1)  # else the samples need not be read
        and is_at_chance(accuracy, chance, count_samples(seed_dir(state.directory, run.seed)))
    ]
    if chance is not None and at_chance:
        notes.append(f"{chance_words(len(at_chance), len(ended), chance)}: {LOWER}")
    if all(run.status is Status.DIVERGED for run in ended):
        notes.append(f"every run diverged; try lr={min(config['lr'] / 10, 0.1):g}")
    return notes


def _shown_metrics(results: Sequence[Result]) -> list[str]:
    """The metrics that get a row, each followed by its variants with other statistics (`@...`)."""
    names = {name for result in results for name in result.metrics}
    return [name for base in SHOWN for name in sorted(names) if name.partition("@")[0] == base]


def _main_metric(results: Sequence[Result]) -> str:
    return next((name for name in MAIN if values_of(results, name)), "")


def _shown(state: CellState, *, in_header: str) -> str:
    """The main metric, or why it is missing."""
    name = _main_metric(state.results)
    values = values_of(state.results, name)
    label = "" if name == in_header else f"{name} "
    spread = f" (sd {statistics.stdev(values):.4f})" if len(values) > 1 else ""
    parts = [f"{label}{statistics.mean(values):.4f}{spread}"] if values else []
    parts += [state.refused] if state.refused else state.failures
    if diverged := [run for run in state.results if run.status is Status.DIVERGED]:
        steps = ", ".join(map(str, sorted({run.diverged_at_step or 0 for run in diverged})))
        parts.append(f"{len(diverged)} of {len(state.results)} diverged, at step {steps}")
    if stopped := [str(run.steps) for run in state.results if run.stopped]:
        count = f"{len(stopped)} of {len(state.results)}"
        parts.append(f"{count} ended early, at step {', '.join(stopped)}")
    shown = "; ".join(parts)
    return f"INVALID {shown}" if state.invalid else shown


# --- Status ---------------------------------------------------------------------------------------


def print_status(study: Study) -> None:
    """Prints a row per cell, the commands so far, and the command to type next."""
    console, footnotes, cells = open_console(), Footnotes(), list(study.cells.values())
    states = [state for state in STATES if study.runs[state]]
    rows = []
    for cell in cells:
        counts = Counter(cell.states.values()) if not cell.refused else Counter[Status]()
        notes = [f"refused: {cell.refused}"] if cell.refused else [*cell.failures, *_at_work(cell)]
        shown = "; ".join(map(footnotes.mark, notes))
        rows.append([cell.title, *(str(counts[state] or "-") for state in states), shown])
    console.print(titled_table(["cell", *states, ""], rows))
    footnotes.print(console)
    refused = sum(bool(cell.refused) for cell in cells)
    can_train = format_count(len(cells) - refused, "cell")
    total = f"{format_count(study.runs.total(), 'run')} of {can_train}"
    counts = ", ".join(f"{study.runs[state]} {state}" for state in states)
    end = f"; {format_count(refused, 'cell')} refused" if refused else ""
    console.out(f"{study.directory}: {total}: {counts}{end}")
    typed = {_as_typed(command, study): command.time for command in study.commands}
    lines = [f"  {time}  {line}" for line, time in typed.items()]
    console.out("\n".join(["commands so far, with their last time:", *lines, *_next(study)]))


def _at_work(cell: CellState) -> list[str]:
    """The process that trains a cell, or where it was interrupted."""
    steps = [f"step {stack.step} of {stack.total}" for stack in cell.stacks if stack.total]
    if cell.process:
        return [", ".join([cell.process, *steps])]
    return [f"interrupted at {step}" for step in steps]


def _next(study: Study) -> list[str]:
    """The commands that finish the study, or that report on a finished one."""
    if all(state in ENDED for state in study.runs):
        return ["next:", f"  python -m normexp.report {shlex.join(study_words(study.directory))}"]
    lacking = {
        (cell.id, seed)
        for cell in study.cells.values()
        for seed, state in cell.states.items()
        if state not in ENDED and not cell.refused
    }
    again = [
        f"  {_as_typed(command, study)}"
        for command in study.commands
        if command.searched
        or any((cell, seed) in lacking for cell, one in command.cells.items() for seed in one.seeds)
    ]
    running = study.runs[Status.RUNNING]
    purpose = "running now; if that stops" if running else "to finish"
    return [f"{purpose}, type again:", *dict.fromkeys(again)]


def _as_typed(command: CommandEntry, study: Study) -> str:
    """A recorded command, for the study's present folder and name."""
    program, *words = command.command
    kept = [word for word in words if not re.match(r"\+*(study|runs_dir)=", word)]
    name = study.directory
    if command.searched:  # trials go to a study named after the report's
        name = name.with_name(name.name.removesuffix("-search"))
    if name.name != "default" or any(word.startswith("experiment=") for word in kept):
        kept += study_words(name)
    return f"{ENTRIES.get(program, program)} {shlex.join(kept)}"
