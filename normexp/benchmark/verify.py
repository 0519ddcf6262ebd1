"""`python -m normexp.benchmark verify=FOLDER salt=TEXT`: does a submission come again?

It does not trust the folder. It reads the table against itself, computes report.json from it,
measures the contract again, and trains, by the verifier's salt, what the author could not foresee:
a canary of the reference, all runs of one workload, and, if these come again, a few runs at another
width, which are not scored. It runs submitted code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normexp.benchmark.cost import measure_costs
from normexp.benchmark.protocol import OTHER_WIDTHS, WorkloadRecipe
from normexp.benchmark.report import interval_words
from normexp.benchmark.score import Tuned, rank, ratio, tune
from normexp.benchmark.submission import (
    CARD_FILE,
    Submission,
    differences,
    draw,
    is_beside,
    read_submission,
    report_problems,
    source_on_path,
)
from normexp.benchmark.table import Table
from normexp.benchmark.trainings import (
    contract_lines,
    is_dry,
    is_of_norm,
    minutes_words,
    norm_of_words,
    train_grid,
)
from normexp.build import measure_norm
from normexp.errors import FAILED, UserError
from normexp.records.files import read_json
from normexp.stats.interval import Interval
from normexp.stats.ratio import as_ratio

COST_ROUNDS = 10
SAME_BYTES = 0.05  # another torch may keep other tensors
WIDTH_SEEDS = 4
WIDTH_RATES = 3  # around the rate that was chosen


@dataclass(frozen=True, eq=False)
class Plan:
    """What a verification trains, by its salt.

    width_recipe: a workload at another width, with the study and the number of seeds there
    """

    workload: str
    width_recipe: WorkloadRecipe
    width_seed: int


def verify(reference: Table, overrides: Sequence[str], options: dict[str, Any]) -> int:
    """Exit code: 0 if all comes again, 1 otherwise; lists what does not.

    Words that are left, such as workers=2, go to the trainings, which they leave the same. The
    runs are kept below runs_dir, for this submission and salt, so that the same command resumes.

    Raises:
        UserError: no submission, or one of other rules.
    """
    submission, problems = read_submission(Path(options["verify"]))
    _check(submission, reference)
    problems += report_problems(submission, reference)
    if not is_beside(submission, reference):
        time = submission.table.about["time"]
        print(f"Made beside another reference table, of {time}: its groups are not compared.")
    plan = make_plan(options["salt"], submission, reference)
    _print_plan(plan, submission, reference)
    if problems:
        return _verdict(submission.norm, problems)
    print("The records of the folder agree with its report.")
    if is_dry(overrides):
        return 0
    # Of its own, so that no run of somebody else is taken for one that came again.
    number = draw(options["salt"], submission, "folder") % 16**8
    runs_dir = Path(options["runs_dir"]) / f"verification-{number:08x}"
    problems = _canary_problems(plan, reference, runs_dir, overrides)
    if problems:
        print("This machine or this code does not repeat the reference; nothing else was trained.")
        return _verdict(submission.norm, problems)
    print("canary: it comes again")
    recipe = reference.recipes[plan.workload]
    claimed = [cell for cell in submission.table.cells if cell.recipe == plan.workload]
    with source_on_path(submission):
        problems = [*_contract_problems(submission), *_cost_problems(plan, submission)]
        words = [*submission.words, *overrides]
        experiment = f"{submission.benchmark}/{plan.workload}"
        _, again = train_grid(experiment, recipe, runs_dir, words, submission.norm)
        print(f"trained again: {plan.workload}, {len(claimed)} cells")
        problems += differences(claimed, again)
        if not problems:
            print(_at_other_width(plan, submission, reference, runs_dir, overrides))
    return _verdict(submission.norm, problems)


def _check(submission: Submission, reference: Table) -> None:
    for word in submission.words:
        if not is_of_norm(word):
            raise UserError(f"verify: {word} is no word of a norm, and an entry sets nothing else")
    if submission.benchmark != reference.about["benchmark"]:
        raise UserError(f"verify: made for {submission.benchmark}; give reference=...")
    unknown = [
        name
        for name in submission.workloads
        if name not in reference.recipes
        or not reference.rates_of(name, reference.recipes[name].reference)
    ]
    if unknown or not submission.workloads:
        names = ", ".join(unknown) or "no runs"
        raise UserError(f"verify: the reference has no complete runs for it: {names}")


def make_plan(salt: str, submission: Submission, reference: Table) -> Plan:
    """The workload that is trained again; a workload, a width and seeds for the unscored runs."""

    def choose(purpose: str, known: Sequence[Any]) -> Any:
        return known[draw(salt, submission, purpose) % len(known)]

    recipe = reference.recipes[choose("width workload", submission.workloads)]
    width = choose("width", OTHER_WIDTHS[recipe.workload])
    study = f"{recipe.study}_width"
    return Plan(
        choose("workload", submission.workloads),
        replace(recipe, study=study, width=width, num_seeds=WIDTH_SEEDS),
        choose("seed", range(10_000, 100_000)),
    )


def _print_plan(plan: Plan, submission: Submission, reference: Table) -> None:
    """What is trained, and what it costs."""
    cells = [cell for cell in submission.table.cells if cell.recipe == plan.workload]
    runs = sum(len(cell.seeds) for cell in cells)
    recipe = plan.width_recipe
    few = 2 * WIDTH_SEEDS * WIDTH_RATES
    seconds = runs * reference.seconds_per_run(plan.workload)
    more = few * reference.seconds_per_run(recipe.name)
    print(
        f"By the salt: a canary; {plan.workload}, {runs} runs, {minutes_words(seconds)} "
        f"core-minutes; {recipe.name} at model.width={recipe.width} with {submission.norm} and "
        f"{recipe.reference}, {few} runs that are not scored, {minutes_words(more)} core-minutes "
        "at the usual width"
    )


def _canary_problems(
    plan: Plan, reference: Table, runs_dir: Path, overrides: Sequence[str]
) -> list[str]:
    """How the first run of the reference norm differs at its middle rate."""
    recipe = reference.recipes[plan.workload]
    grid = reference.rates_of(plan.workload, recipe.reference)
    claimed = grid[len(grid) // 2]
    words = [f"norm={recipe.reference}", f"lr={claimed.lr:g}", "norm_batch_size=null"]
    words += ["replicas=1", *overrides]
    experiment = f"{reference.about['benchmark']}/{plan.workload}"
    _, again = train_grid(experiment, recipe, runs_dir, words, recipe.reference)
    return [f"canary: {problem}" for problem in differences([claimed], again)]


def _contract_problems(submission: Submission) -> Iterator[str]:
    """Lines of the contract that fail, or that card.json tells otherwise."""
    card = measure_norm(norm_of_words(submission.words), contract_only=True)
    for line in card.failures:
        yield f"contract: {line.name} fails: {line.detail}"
    path = submission.folder / CARD_FILE
    claimed = contract_lines(read_json(path)["cards"][0]) if path.is_file() else {}
    for line in card.lines:
        if claimed.get(line.name) != line.status:
            said = claimed.get(line.name, "missing")
            yield f"{CARD_FILE}: {line.name} is {said}, but {line.status}"


def _cost_problems(plan: Plan, submission: Submission) -> Iterator[str]:
    """Bytes kept that do not come again; prints the step times, which depend on the machine."""
    norm, workload = submission.norm, plan.workload
    words = {norm: submission.words}
    [(_, again)] = measure_costs(submission.benchmark, workload, words, COST_ROUNDS)
    claimed = submission.table.cost_of(workload, norm)
    if claimed is None:
        yield f"{workload}: its cost is missing"
        return
    print(f"{workload}: a step takes {again.step:.2f} times batch's, {claimed.step:.2f} claimed")
    if abs(claimed.kept / again.kept - 1) > SAME_BYTES:
        yield f"{workload}: {claimed.kept:.2f} times batch's bytes kept, now {again.kept:.2f}"


# --- Another width -------------------------------------------------------------------------------


def _at_other_width(
    plan: Plan,
    submission: Submission,
    reference: Table,
    runs_dir: Path,
    overrides: Sequence[str],
) -> str:
    """Trains the norm and the reference at another width; a sentence on both widths."""
    recipe, norm = plan.width_recipe, submission.norm
    standings = rank(reference.with_entry(submission.table), recipe.name)
    places = [standings.of(label) for label in (norm, recipe.reference)] if standings else []
    here, here_of_reference = (place.tuned if place else None for place in places)
    where = f"{recipe.name} at model.width={recipe.width}, not scored"
    if here is None or here_of_reference is None:
        return f"{where}: {norm} has no complete grid"
    tuned = []
    for label, words, usual in (
        (norm, submission.words, here),
        (recipe.reference, [f"norm={recipe.reference}"], here_of_reference),
    ):
        rates = _around(usual)
        words = [*words, f"lr={','.join(f'{rate:g}' for rate in rates)}", "norm_batch_size=null"]
        words += [f"model.width={recipe.width}", f"study={recipe.study}"]
        words += [f"seed={plan.width_seed}", f"replicas={WIDTH_SEEDS}", *overrides]
        experiment = f"{submission.benchmark}/{recipe.name}"
        grid = (experiment, replace(recipe, rates=rates), runs_dir, words, label)
        _, cells = train_grid(*grid, first_seed=plan.width_seed)
        if len(cells) < len(rates):
            return f"{where}: {label} cannot be trained there"
        tuned.append(tune(sorted(cells, key=lambda cell: cell.lr)))
    there, there_of_reference = tuned
    ratio_there = as_ratio(ratio(there, there_of_reference).gap)
    ratio_here = as_ratio(ratio(here, here_of_reference).gap)
    return (
        f"{where}: {norm} has {interval_words(ratio_there)} of {recipe.reference}'s error "
        f"({_level(there)} and {_level(there_of_reference)}; n = {WIDTH_SEEDS}), at the usual "
        f"width {interval_words(ratio_here)} ({_level(here)} and {_level(here_of_reference)})"
        f"{_warning(ratio_there, ratio_here)}"
    )


def _warning(there: Interval, here: Interval) -> str:
    if there.low is None or here.high is None or there.low <= here.high:
        return ""
    return ". It is worse there: was it tuned to the usual width?"


def _around(tuned: Tuned) -> tuple[float, ...]:
    """The chosen rate and its neighbours."""
    place = tuned.rates.index(tuned.rate)
    first = min(max(place - WIDTH_RATES // 2, 0), max(len(tuned.rates) - WIDTH_RATES, 0))
    return tuned.rates[first : first + WIDTH_RATES]


def _level(tuned: Tuned) -> str:
    """`2.4 %` error, or `2.31 bits`."""
    value = tuned.mean.estimate
    assert value is not None
    return f"{100 - value:.1f} %" if tuned.is_accuracy else f"{value:.2f} bits"


def _verdict(norm: str, problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"  {problem}")
    print(f"{norm}: {'not verified' if problems else 'verified'}")
    return FAILED if problems else 0
