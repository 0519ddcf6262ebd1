"""Rules: from measurements to findings, each with one sentence of cause and the remedy.

A term of the gap has a cost if it exceeds the tolerance and what its standard error explains
(two-sided t test at 1 %). Terms that are no mistake by themselves count from a tenth of the largest
term on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import median

from normexp.diagnosis.measure import Measurement
from normexp.diagnosis.network import innermost, is_within
from normexp.diagnosis.result import ROOT, Finding
from normexp.diagnosis.rows import of_single_batches
from normexp.words import name_some

OF_TERM = {  # cause and remedy of the terms that have one of each
    "rest": (
        "other results of {names} in training than in evaluation make the loss of training lower",
        "compare what is computed there in the two modes: dropout, self.training, functional norms",
    ),
    "small_batch": (
        "the network needs the statistics of its current batch: are its samples related (sorted)?",
        "shuffle the training data, share statistics among more samples, or use group norm",
    ),
    "own_share": (
        "in training alone, each sample is part (1 / {size}) of the statistics that normalize it",
        "evaluate with the own share (norm=eval_norm, arXiv:1904.06031), or use group norm",
    ),
    "dropout_shift": (
        "the averages were taken behind dropout, which evaluation leaves out (arXiv:1801.05134)",
        "move dropout behind the last batch norm, or recompute the averages with dropout off",
    ),
    "not_analysed": (
        "running state of {names}, which could not be read as mean and variance of an input, fits "
        "these samples worse than what training uses",
        "recompute this state with the final weights, by forwards in training mode",
    ),
}
UNEXPLAINED = "the loss of training is lower, and no module shows why (self.training between them?)"
RECOMPUTE = "recompute the averages in training mode (swa_utils.update_bn(train_loader, model))"


def find(seen: Measurement) -> list[Finding]:
    """All findings: NaN, then those with a cost, the largest first, then the others."""
    found = [*_averages(seen), *_of_terms(seen), *_evaluation(seen)]
    found.sort(key=lambda finding: -finding.cost.value if finding.cost else math.inf)
    return [*_not_finite(seen), *found]


def _finding(
    seen: Measurement,
    kind: str,
    paths: Iterable[str],
    cause: str,
    remedy: str,
    *,
    term: str | None = None,
) -> Finding:
    """A finding whose cause names the modules at these paths."""
    names = tuple(path or ROOT for path in dict.fromkeys(paths))
    cause = cause.replace("{names}", name_some(names)).replace("{size}", str(seen.group_size))
    return Finding(kind, cause, remedy, names, term, seen.cost(term) if term else None)


def _not_finite(seen: Measurement) -> Iterator[Finding]:
    bad = []
    for path, site in seen.active.items():
        bad += [path for moments in site.running if not moments.isfinite().all()]
    if bad:
        yield _finding(
            seen,
            "not_finite",
            bad,
            "running state of {names} holds NaN or infinity, which stays in an average for ever",
            f"find the batch, then reset_running_stats() and {RECOMPUTE}",
        )
    elif not math.isfinite(seen.gap.value):
        yield _finding(
            seen,
            "not_finite",
            (),
            "the loss is not finite, so the gap has no terms",
            "look for the first batch whose loss is NaN or infinite",
        )


def _averages(seen: Measurement) -> Iterator[Finding]:
    cost = seen.cost("averages")
    finding = partial(_finding, seen, term="averages")
    paths: dict[str, list[str]] = defaultdict(list)  # by state
    for path, row in seen.rows.items():
        paths[row.state].append(path)
    if still := paths["momentum 0"]:
        yield finding(
            "stale_averages",
            still,
            "running averages of {names} have momentum 0, so training never moves them",
            f"set momentum=0.1, then {RECOMPUTE}",
        )
    if fresh := paths["never updated"]:
        yield finding(
            "never_updated",
            fresh,
            "running averages of {names} are at mean 0, variance 1: never moved, saved or loaded",
            f"load them too (only buffers and parameters are saved), or {RECOMPUTE}",
        )
    if cost is None:
        return
    if young := paths["initial"]:
        row = max((seen.rows[path] for path in young), key=lambda row: row.initial_share or 0)
        yield finding(
            "initial_values",
            young,
            f"running averages of {{names}} are {row.initial_share:.1%} initial values (mean 0, "
            f"variance 1): {row.updates} updates at momentum {row.momentum:g}",
            f"train longer, raise momentum (the weight of the new value), or {RECOMPUTE}",
        )
    if twice := paths["used twice"]:
        yield finding(
            "used_twice",
            twice,
            "{names} run several times in one forward, and their averages mix all of its inputs",
            "give each use a norm of its own, or join the inputs into one batch",
        )
    rows = {path: seen.rows[path] for path in paths["averaged"]}
    if not rows:
        return
    typical = median(max(row.mean_distance, row.var_distance) for row in rows.values())
    farthest = max(row.largest_distance for row in rows.values())
    momentum = max(row.momentum or 0.1 for row in rows.values())  # torch's, if none is named
    # The standard deviation of running minus precise, in those between batches.
    noise = math.sqrt(momentum / (2 - momentum) + 1 / len(seen.sizes))
    moments = {seen.active[path]: seen.moments[path] for path in rows}
    typical_of_one, farthest_of_one = of_single_batches(moments)
    most = 2.5 * farthest_of_one * noise
    least = min(most, 0.3 * farthest)
    far = [path for path, row in rows.items() if row.largest_distance >= least]
    far.sort(key=lambda path: -rows[path].largest_distance)
    # Averages move with the weights.
    if typical > 1.5 * typical_of_one * noise or farthest > most:
        yield finding(
            "stale_averages",
            far,
            "running averages do not belong to these weights and inputs: a typical channel is "
            f"{typical:.2g} standard deviations between batches off, the farthest {farthest:.2g}, "
            "most at {names}. Either the weights have moved on, or the preprocessing is another",
            f"if the inputs are those of training, {RECOMPUTE}; else mend the preprocessing",
        )
    elif len(rows) == len(seen.rows):
        yield finding(
            "noisy_averages",
            far,
            "running averages are as far from the statistics of all samples as averages over "
            f"batches of {{size}} at momentum {momentum:g} come",
            "pool the moments of many batches (precise statistics), or lower momentum",
        )


def _of_terms(seen: Measurement) -> Iterator[Finding]:
    acting = innermost(filter(seen.parts.acts_in_training, seen.parts.calls))
    acting = [path for path in acting if not is_within(path, *seen.active, *seen.unknown)]
    paths = {"not_analysed": [*seen.unknown], "rest": acting}
    least = 0.1 * max(abs(term.value) for term in seen.terms.values())
    for term, (cause, remedy) in OF_TERM.items():
        cost, modules = seen.cost(term), paths.get(term, [*seen.active])
        if cost and cost.value >= least:
            cause = cause if modules else UNEXPLAINED
            yield _finding(seen, term, modules, cause, remedy, term=term)


def _evaluation(seen: Measurement) -> Iterator[Finding]:
    parts, modes = seen.parts, seen.parts.evaluation
    left = [path for path in parts.modules if path in modes.training]
    term, varies = seen.terms["left_in_training"], parts.varies_in_evaluation()
    if left and (term.value or term.error or seen.depends_on_batch or varies):
        yield _finding(
            seen,
            "left_in_training",
            [path for path in left if not path or path.rpartition(".")[0] not in left],
            "in evaluation, {names} run in training mode (train() of a part was called, or ignores "
            f"its argument), so results depend on the batch{_losses(seen)}",
            "call eval() on the whole model last, and let overridden train(mode) pass the mode on",
            term="left_in_training",
        )
        return
    if seen.depends_on_batch:
        yield _finding(
            seen,
            "depends_on_batch",
            parts.mixing(modes),
            "in evaluation the output of a sample depends on the other samples of its batch, at "
            f"{{names}}{_losses(seen)}",
            "use running averages in evaluation, or evaluate in shuffled batches of one size",
        )
    if varies:
        yield _finding(
            seen,
            "varies_in_evaluation",
            (),
            f"in evaluation mode {varies}",
            "update state only if self.training, and pass training=self.training to dropout",
        )


def _losses(seen: Measurement) -> str:
    """Of an evaluation that depends on the size of its batches."""
    for size, loss in seen.loss_at_size.items():
        alone = "for single samples" if size == 1 else f"in batches of {size}"
        usual = seen.evaluation
        return (
            f": loss {loss.value:.3g} ± {loss.error:.2g} {alone}, {usual.value:.3g} ± "
            f"{usual.error:.2g} in batches of {max(seen.sizes)}"
        )
    return ""
