"""Rules that turn measurements into findings, each with one sentence of cause and the remedy.

A term of the gap has a cost if it exceeds the tolerance and what its standard error explains
(two-sided t test at 1 %). Terms that are no mistake by themselves must also be a tenth of the
largest term.
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

CAUSES = {  # cause and remedy of a term
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


def find(measured: Measurement) -> list[Finding]:
    """All findings: values that are not finite, then by cost, then findings without a cost."""
    findings = [*_averages(measured), *_terms(measured), *_evaluation(measured)]
    findings.sort(key=lambda finding: -finding.cost.value if finding.cost else math.inf)
    return [*_not_finite(measured), *findings]


def _finding(
    measured: Measurement,
    kind: str,
    paths: Iterable[str],
    cause: str,
    remedy: str,
    *,
    term: str | None = None,
) -> Finding:
    """A finding whose cause names the modules at these paths."""
    names = tuple(path or ROOT for path in dict.fromkeys(paths))
    cause = cause.replace("{names}", name_some(names)).replace("{size}", str(measured.group_size))
    return Finding(kind, cause, remedy, names, term, measured.cost(term) if term else None)


def _not_finite(measured: Measurement) -> Iterator[Finding]:
    paths: list[str] = []
    for path, site in measured.active.items():
        if not all(moments.isfinite().all() for moments in site.running):
            paths.append(path)
    if paths:
        yield _finding(
            measured,
            "not_finite",
            paths,
            "running state of {names} holds NaN or infinity, which stays in an average for ever",
            f"find the batch, then reset_running_stats() and {RECOMPUTE}",
        )
    elif not math.isfinite(measured.gap.value):
        yield _finding(
            measured,
            "not_finite",
            (),
            "the loss is not finite, so the gap has no terms",
            "look for the first batch whose loss is NaN or infinite",
        )


def _averages(measured: Measurement) -> Iterator[Finding]:
    cost = measured.cost("averages")
    finding = partial(_finding, measured, term="averages")
    paths: dict[str, list[str]] = defaultdict(list)  # by state
    for path, row in measured.rows.items():
        paths[row.state].append(path)
    if paths["momentum 0"]:
        yield finding(
            "stale_averages",
            paths["momentum 0"],
            "running averages of {names} have momentum 0, so training never moves them",
            f"set momentum=0.1, then {RECOMPUTE}",
        )
    if paths["never updated"]:
        yield finding(
            "never_updated",
            paths["never updated"],
            "running averages of {names} are at mean 0, variance 1: never moved, saved or loaded",
            f"load them too (only buffers and parameters are saved), or {RECOMPUTE}",
        )
    if cost is None:
        return
    if paths["initial"]:
        rows = [measured.rows[path] for path in paths["initial"]]
        row = max(rows, key=lambda row: row.initial_share or 0)
        yield finding(
            "initial_values",
            paths["initial"],
            f"running averages of {{names}} are {row.initial_share:.1%} initial values (mean 0, "
            f"variance 1): {row.updates} updates at momentum {row.momentum:g}",
            f"train longer, raise momentum (the weight of the new value), or {RECOMPUTE}",
        )
    if paths["used twice"]:
        yield finding(
            "used_twice",
            paths["used twice"],
            "{names} run several times in one forward, and their averages mix all of its inputs",
            "give each use a norm of its own, or join the inputs into one batch",
        )
    if paths["averaged"]:
        yield from _distant_averages(measured, paths["averaged"])


def _distant_averages(measured: Measurement, paths: list[str]) -> Iterator[Finding]:
    """Stale averages if their distance from the moments of batches exceeds chance, else noisy."""
    rows = {path: measured.rows[path] for path in paths}
    typical = median(max(row.mean_distance, row.var_distance) for row in rows.values())
    farthest = max(row.largest_distance for row in rows.values())
    momentum = max(row.momentum or 0.1 for row in rows.values())  # torch's, if none is named
    # The standard deviation by chance of running minus precise, in those between batches.
    noise = math.sqrt(momentum / (2 - momentum) + 1 / len(measured.sizes))
    moments = {measured.active[path]: measured.moments[path] for path in paths}
    typical_of_batch, farthest_of_batch = of_single_batches(moments)
    most = 2.5 * farthest_of_batch * noise
    least = min(most, 0.3 * farthest)
    paths = [path for path in paths if rows[path].largest_distance >= least]
    paths.sort(key=lambda path: -rows[path].largest_distance)
    finding = partial(_finding, measured, term="averages")
    if typical > 1.5 * typical_of_batch * noise or farthest > most:
        yield finding(
            "stale_averages",
            paths,
            "running averages do not belong to these weights and inputs: a typical channel is "
            f"{typical:.2g} standard deviations between batches off, the farthest {farthest:.2g}, "
            "most at {names}. Either the weights have moved on, or the preprocessing is another",
            f"if the inputs are those of training, {RECOMPUTE}; else mend the preprocessing",
        )
    elif len(rows) == len(measured.rows):
        yield finding(
            "noisy_averages",
            paths,
            "running averages are as far from the statistics of all samples as averages over "
            f"batches of {{size}} at momentum {momentum:g} come",
            "pool the moments of many batches (precise statistics), or lower momentum",
        )


def _terms(measured: Measurement) -> Iterator[Finding]:
    acting = innermost(filter(measured.parts.acts_in_training, measured.parts.calls))
    acting = [p for p in acting if not is_within(p, *measured.active, *measured.unknown)]
    paths = {"not_analysed": [*measured.unknown], "rest": acting}
    least = 0.1 * max(abs(term.value) for term in measured.terms.values())
    for term, (cause, remedy) in CAUSES.items():
        cost = measured.cost(term)
        if cost is not None and cost.value >= least:
            modules = paths.get(term, [*measured.active])
            yield _finding(
                measured, term, modules, cause if modules else UNEXPLAINED, remedy, term=term
            )


def _evaluation(measured: Measurement) -> Iterator[Finding]:
    parts = measured.parts
    training = parts.evaluation.training
    varies = parts.varies_in_evaluation()
    term = measured.terms["left_in_training"]
    if training and (term.value or term.error or measured.depends_on_batch or varies):
        in_order = [path for path in parts.modules if path in training]
        yield _finding(
            measured,
            "left_in_training",
            [path for path in in_order if not path or path.rpartition(".")[0] not in training],
            "in evaluation, {names} run in training mode (train() of a part was called, or ignores "
            f"its argument), so results depend on the batch{_losses(measured)}",
            "call eval() on the whole model last, and let overridden train(mode) pass the mode on",
            term="left_in_training",
        )
        return
    if measured.depends_on_batch:
        yield _finding(
            measured,
            "depends_on_batch",
            parts.mixing(parts.evaluation),
            "in evaluation the output of a sample depends on the other samples of its batch, at "
            f"{{names}}{_losses(measured)}",
            "use running averages in evaluation, or evaluate in shuffled batches of one size",
        )
    if varies:
        yield _finding(
            measured,
            "varies_in_evaluation",
            (),
            f"in evaluation mode {varies}",
            "update state only if self.training, and pass training=self.training to dropout",
        )


def _losses(measured: Measurement) -> str:
    """The losses of an evaluation at both sizes of its batches, if it depends on them."""
    usual = measured.evaluation
    for size, loss in measured.loss_at_size.items():
        batches = "for single samples" if size == 1 else f"in batches of {size}"
        return (
            f": loss {loss.value:.3g} ± {loss.error:.2g} {batches}, {usual.value:.3g} ± "
            f"{usual.error:.2g} in batches of {max(measured.sizes)}"
        )
    return ""
