"""What commands print of the cells of a study: tables of sweeps, status, dry runs, evaluations.

Imported while training and for --help: without pandas, scipy and altair, and with Hydra only in the
functions that need it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from normexp.training.records.journal import CommandEntry
from normexp.training.records.layout import LOG_FILE, seed_dir
from normexp.training.records.result import ENDED, Result, Status, values_of
from normexp.training.records.samples import count_samples
from normexp.training.records.study import STATES, CellState, Study
from normexp.verdicts.metric import OF_TEST, PREFERRED, is_at_chance, over_seeds
from normexp.verdicts.terminal import open_console, print_rows
from normexp.words import format_count, format_duration

SHORT = 60  # characters: longer texts are printed below their table
Contents = Mapping[int, Mapping[str, Any]]  # the content of evaluation.json, by seed
STATUSES = ("finished", "skipped", "diverged", "refused", "failed", "stopped")
PROGRAM = re.compile("^normexp-")  # a console script
FROM_PYTHON = "normexp.run"  # which takes the words of `python -m normexp.train`


def print_cells(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table of cells, then the words that all titles share, and long texts once each.

    The norm stays in every title, which is the column `cell`.
    """
    at = columns.index("cell")
    shared, titles = without_shared_words([row[at] for row in rows])
    footnotes: dict[str, str] = {}
    shortened = []
    for row, title in zip(rows, titles, strict=True):
        texts = []
        for place, text in enumerate(row):
            if place == at:
                text = title or text
            elif len(text) > SHORT:
                text = footnotes.setdefault(text, f"[{len(footnotes) + 1}]")
            texts.append(text)
        shortened.append(texts)
    print_rows(console, columns, shortened)
    if shared:
        console.print(f"all with {' '.join(shared)}")
    for text, mark in footnotes.items():
        console.print(f"{mark} {text}")


def without_shared_words(titles: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that all of several titles share, except norms, and the titles without them."""
    split = [title.split() for title in titles]
    shared = []
    for word in split[0] if len(split) > 1 else ():
        if not word.startswith("norm=") and all(word in words for words in split):
            shared.append(word)
    return shared, [" ".join(word for word in words if word not in shared) for words in split]


def print_evaluations(
    contents: Contents, title: str, *, why_nothing: str, invalid: str | None
) -> None:
    """Prints a table with a row per kind of evaluation: mean and standard deviation over seeds.

    Args:
        why_nothing: printed if there is no number.
        invalid: why the numbers must not be compared; None if they may.
    """
    names: dict[str, None] = {}
    by_kind: dict[str, dict[str, list[float]]] = {}
    for content in contents.values():
        for kind, metrics in content.items():
            values = by_kind.setdefault(kind, {})
            for name, value in metrics.items():
                names[name] = None
                values.setdefault(name, []).append(value)
    console = open_console()
    if invalid:
        console.print(f"INVALID, every number below: {invalid}")
    if not by_kind:
        console.print(f"{title}: {why_nothing}")
        return
    console.print(f"{title}: n = {format_count(len(contents), 'seed')}, mean (sd over seeds)")
    rows = [
        [kind, *(mean_words(values.get(name, []), len(contents)) for name in names)]
        for kind, values in by_kind.items()
    ]
    print_rows(console, ["evaluation", *names], rows)


def print_summary(state: CellState) -> None:
    """Prints the metrics of one cell over its seeds, its directory, and commands to type next."""
    for error in state.failures:
        print(f"failed: {error}", file=sys.stderr)
    console = open_console()
    ended = [run for run in state.results if run.status in ENDED]
    if not ended:
        return
    settings = ended[0].settings
    how = "already recorded" if state.was_over else "trained"
    n = format_count(len(ended), "seed")
    console.print(f"\n{settings['norm']} on {settings['data']}: {how}, n = {n}")
    if state.invalid:
        console.print(f"INVALID, every number: {state.invalid}")
    rows = _metric_rows(ended, stamp=" INVALID" if state.invalid else "")
    if rows:  # there are none if all runs diverged
        heads = ("metric", "mean", "sd over seeds", "lowest", "highest", "n")
        print_rows(console, heads, rows)
    lines = [*_early_ends(ended), _time_words(ended[0].measured.timing)]
    lines += [f"run directory: {state.directory}", *_warnings_on(state), "next:"]
    console.print("\n".join(lines))
    console.out("\n".join(commands_to_look([state])))


def _metric_rows(ended: Sequence[Result], *, stamp: str) -> list[list[str]]:
    """A row per metric, in the order of PREFERRED, whose last, val/loss, is left out."""
    rows = []
    names = sorted({name for run in ended for name in run.metrics})
    for base in PREFERRED[:-1]:
        for name in names:
            if name.partition("@")[0] == base:
                values = values_of(ended, name)
                mean, spread = over_seeds(values)
                deviation = f"{spread:.4f}" if len(values) > 1 else "-"
                ends = [f"{min(values):.4f}", f"{max(values):.4f}"]
                rows.append([name + stamp, f"{mean:.4f}", deviation, *ends, str(len(values))])
    return rows


def _time_words(timing: Mapping[str, float]) -> str:
    together = int(timing.get("stack_size", 1))
    whose = f"of {together} runs together" if together > 1 else "of a run"
    seconds, step = timing.get("train_seconds", 0.0), timing.get("step_ms", 0.0)
    return f"trained in {seconds:.1f} s, {step:.2f} ms per step {whose}"


def print_closing_table(states: Sequence[CellState]) -> None:
    """Prints a row per cell of a sweep."""
    console = open_console()
    names = {main_metric(state.results) for state in states} - {""}
    metric = names.pop() if len(names) == 1 else ""
    rows = []
    for state in states:
        count = len(values_of(state.results, main_metric(state.results)))
        result = _result_words(state, in_header=metric)
        rows.append([state.status, state.title, result, str(count or "")])
    print_cells(console, ["status", "cell", metric or "result", "n"], rows)
    counts = Counter(state.status for state in states)
    console.print(", ".join(f"{counts[name]} {name}" for name in STATUSES if counts[name]))
    for state in states:
        for warning in _warnings_on(state):
            console.print(f"{state.title}: {warning}")  # wraps
    for command in commands_to_look(states):
        console.out(command)


def commands_to_look(states: Sequence[CellState]) -> list[str]:
    """Commands that show the log of a failure, the status and the report of the study."""
    from normexp.training.config.command import study_words

    begun = [
        state
        for state in states
        if state.states and not state.refused and state.directory.parent.is_dir()
    ]
    logs = [
        seed_dir(state.directory, run.seed) / LOG_FILE
        for state in begun
        for run in state.results
        if run.status is Status.FAILED
    ]
    studies = sorted({shlex.join(study_words(state.directory.parent)) for state in begun})
    lines = [f"  less {shlex.quote(str(log))}" for log in logs[:1]]
    if any(state.status in ("failed", "refused", "stopped") for state in states):
        lines += [f"  python -m normexp.status {words}" for words in studies]
    return lines + [f"  python -m normexp.report {words}" for words in studies]


def _warnings_on(state: CellState) -> list[str]:
    """Warnings about results: seeds no better than chance, or all runs diverged."""
    ended = [run for run in state.results if run.status in ENDED]
    if not ended:
        return []
    warnings, name, measured = [], main_metric(ended), ended[0].measured
    chance = measured.chance.get("iou", measured.chance_accuracy)
    at_chance = 0
    for run in ended:
        num_samples = count_samples(seed_dir(state.directory, run.seed))
        at_chance += is_at_chance(run.metrics.get(name), chance, num_samples)
    if chance is not None and at_chance:
        warnings.append(
            f"{at_chance} of {len(ended)} seeds at chance ({100 * chance:.0f} %): lower its "
            "learning rate, search it, or train longer"
        )
    if all(run.status is Status.DIVERGED for run in ended):
        warnings.append(f"every run diverged; try lr={min(ended[0].settings['lr'] / 10, 0.1):g}")
    return warnings


def main_metric(results: Sequence[Result], metrics: Sequence[str] = OF_TEST) -> str:
    """The metric of the task that stands in one line: accuracy, IoU, or bits per byte."""
    return next((name for name in metrics if values_of(results, name)), "")


def _result_words(state: CellState, *, in_header: str) -> str:
    """The main metric, or why it is missing."""
    name = main_metric(state.results)
    values = values_of(state.results, name)
    words = []
    if values:
        mean = mean_words(values)
        words.append(mean if name == in_header else f"{name} {mean}")
    words += [state.refused] if state.refused else state.failures
    words += _early_ends(state.results)
    return f"INVALID {'; '.join(words)}" if state.invalid else "; ".join(words)


def _early_ends(results: Sequence[Result]) -> list[str]:
    """`seeds 0, 3 diverged at step 40`, `seed 1 ended at step 30: REASON`."""
    ends: dict[str, list[str]] = {}
    for run in results:
        measured = run.measured
        if run.status is Status.DIVERGED:
            words = f"diverged at step {measured.diverged_at_step}"
        elif measured.stopped:
            words = f"ended at step {measured.last_step}: {measured.stopped}"
        else:
            continue
        ends.setdefault(words, []).append(str(run.seed))
    return [
        f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(seeds)} {words}"
        for words, seeds in ends.items()
    ]


def mean_words(values: Sequence[float], num_seeds: int = 0) -> str:
    """`0.9861 (sd 0.0023)`, with ` n=3` if some seeds have no value; `-` without a value."""
    if not values:
        return "-"
    mean, spread = over_seeds(values)
    deviation = f" (sd {spread:.4f})" if len(values) > 1 else ""
    fewer = f" n={len(values)}" if len(values) < num_seeds else ""
    return f"{mean:.4f}{deviation}{fewer}"


# --- Status ---------------------------------------------------------------------------------------


def print_status(study: Study) -> None:
    """Prints a row per cell, the commands so far, and the command to type next."""
    console, rows = open_console(), []
    columns = [state for state in STATES if study.runs[state]]
    for cell in study.cells.values():
        counts = Counter() if cell.refused else Counter(cell.states.values())
        notes = [f"refused: {cell.refused}"] if cell.refused else cell.failures
        for stack in cell.stacks:
            if stack.total and not cell.refused:
                holder = stack.holder or "interrupted"
                notes.append(f"{holder} at step {stack.step} of {stack.total}")
        numbers = [str(counts[state] or "-") for state in columns]
        rows.append([cell.title, *numbers, "; ".join(notes)])
    print_cells(console, ["cell", *columns, ""], rows)
    refused = len(study.refusals)
    cells = format_count(len(study.cells) - refused, "cell")
    counts = ", ".join(f"{study.runs[state]} {state}" for state in columns)
    end = f"; {format_count(refused, 'cell')} refused" if refused else ""
    runs = format_count(study.runs.total(), "run")
    console.print(f"{study.directory}: {runs} of {cells}: {counts}{end}")
    last_times = {_as_typed(command, study): command.time for command in study.commands}
    if last_times:
        console.print("commands so far, with their last time:")
    for line, time in last_times.items():
        console.out(f"  {time}  {line}")
    for line in _commands_to_continue(study):
        console.out(line)


def _commands_to_continue(study: Study) -> list[str]:
    """The commands that finish the study, or that report on a finished one."""
    from normexp.training.config.command import study_words

    if all(state in ENDED for state in study.runs):
        return ["next:", f"  python -m normexp.report {shlex.join(study_words(study.directory))}"]
    lacking = {
        (cell.id, seed)
        for cell in study.cells.values()
        for seed, state in cell.states.items()
        if state not in ENDED and not cell.refused
    }
    commands: dict[str, None] = {}
    for command in study.commands:
        runs = {(cell, seed) for cell, asked in command.cells.items() for seed in asked.seeds}
        if command.searched or runs & lacking:
            commands[f"  {_as_typed(command, study)}"] = None
    purpose = "running now; if that stops" if study.runs[Status.RUNNING] else "to finish"
    return [f"{purpose}, type again:", *commands] if commands else []


def _as_typed(command: CommandEntry, study: Study) -> str:
    """A recorded command, for the study's present folder and name."""
    from normexp.training.config.command import study_words

    program, *words = command.command
    program = "normexp-train" if program == FROM_PYTHON else program
    kept = [word for word in words if not re.match(r"\+*(study|runs_dir)=", word)]
    name = study.directory
    if command.searched:  # the trials are in a study NAME-search
        name = name.with_name(name.name.removesuffix("-search"))
    if name.name != "default" or any(word.startswith("experiment=") for word in kept):
        kept += study_words(name)
    return f"{PROGRAM.sub('python -m normexp.', program)} {shlex.join(kept)}"


# --- Dry runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A cell of a dry run.

    Attributes:
        num_steps: optimizer steps of a run; 0 if it was refused.
        step_seconds: a first estimate of an optimizer step of one run.
        num_stacks: of its missing runs, which several workers can train at once.
    """

    state: CellState
    num_steps: int = 0
    step_seconds: float = 0.0
    num_stacks: int = 0

    @property
    def seconds(self) -> float:
        """The training time of its missing runs, one after another."""
        return self.step_seconds * self.num_steps * len(self.state.missing)


def print_plan(plans: Sequence[Plan], *, num_workers: int, num_points: int) -> None:
    """Prints a row per cell and the totals."""
    console, rows, to_train = open_console(), [], []
    for plan in plans:
        state = plan.state
        if state.refused:
            rows.append([state.title, f"refused: {state.refused}", "", "", ""])
            continue
        if state.missing:
            to_train.append(plan)
        time = format_duration(plan.seconds) if state.missing else "-"
        missing, done = len(state.missing), len(state.states) - len(state.missing)
        rows.append([state.title, str(missing), str(done), f"{plan.num_steps:,}", time])
    print_cells(console, ("cell", "runs to do", "done", "steps", "time"), rows)
    if num_points > len(plans):
        console.print(f"{num_points} points of the grid, {format_count(len(plans), 'cell')}")
    runs = format_count(sum(len(plan.state.missing) for plan in to_train), "run")
    num_stacks = sum(plan.num_stacks for plan in to_train)
    busy = max(1, min(num_workers, num_stacks))
    duration = format_duration(sum(plan.seconds for plan in to_train) / busy)
    console.print(
        f"{runs} of {format_count(len(to_train), 'cell')} to do: about {duration} with "
        f"{format_count(busy, 'worker')}, estimated from a few steps of each (seeds of small "
        "networks train together, which takes less)",
    )
