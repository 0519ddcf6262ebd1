"""Rules: from measurements to findings, each with one sentence of cause and the remedy.

A term of the gap has a cost if it exceeds the tolerance and what its standard error explains
(two-sided t test at 1 %). Terms that are no mistake by themselves count from a tenth of the largest
term on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch
from scipy import stats
from torch import Tensor

from normexp.checks.network import name_some
from normexp.diagnosis.measure import Measurement
from normexp.diagnosis.network import FEWEST
from normexp.diagnosis.result import Estimate, Finding, SiteRow
from normexp.norms.base import Moments
from normexp.norms.moment_sites import NormSite, averaged_var, distances, pool_batches

ROOT = "the model"
INITIAL_SHARE = 0.1  # weight beyond which initial values are a fault
OF_TERM = {  # cause and remedy of the terms that have one of each
    "rest": (
        "other results of {names} in training than in evaluation make the loss of training lower",
        "compare what is computed there in the two modes (dropout, code that reads self.training, "
        "a norm called as a function)",
    ),
    "small_batch": (
        "the network needs the statistics of its current batch: samples carry information about "
        "each other (sorted or related batches), or training adapted to the noise",
        "shuffle the training data, share statistics among more samples, or use group norm",
    ),
    "own_share": (
        "in training each sample is part of the statistics that normalize it (1 / {size}), in "
        "evaluation it is not",
        "evaluate with the own share (EvalNorm, arXiv:1904.06031; norm=eval_norm), share "
        "statistics among more samples, or use group norm",
    ),
    "dropout_shift": (
        "the averages were taken behind dropout, which evaluation leaves out, so variances differ "
        "(arXiv:1801.05134)",
        "move dropout behind the last batch norm, or recompute the averages with dropout off",
    ),
    "not_analysed": (
        "running state of {names}, which could not be read as mean and variance of an input "
        "(TorchScript, batch norm called as a function, or a norm of another kind), fits these "
        "samples worse than what training uses",
        "recompute this state with the final weights, by forwards in training mode",
    ),
}
UNEXPLAINED = (
    "the loss of training is lower for a reason that no module shows by itself, such as code "
    "between modules that reads self.training"
)
RECOMPUTE = (
    "recompute the averages with the final weights, by forwards over the training data in training "
    "mode (for torch's batch norm, torch.optim.swa_utils.update_bn(train_loader, model))"
)


@dataclass(frozen=True)
class Case:
    """A network's measurements, ready for the rules."""

    seen: Measurement
    rows: Mapping[str, SiteRow]
    tolerance: float

    def exceeds(self, estimate: Estimate) -> bool:
        """True if its size exceeds the tolerance and chance; NaN does not."""
        bound = stats.t.ppf(0.995, len(self.seen.sizes) - 1) * estimate.error
        return bool(abs(estimate.value) > max(self.tolerance, bound))

    def cost(self, term: str) -> Estimate | None:
        """A term by which evaluation is worse."""
        estimate = self.seen.terms[term]
        return estimate if estimate.value > 0 and self.exceeds(estimate) else None


def find(case: Case) -> list[Finding]:
    """All findings: NaN, then those with a cost, the largest first, then the others."""
    found = [*_not_finite(case), *_averages(case), *_of_terms(case), *_evaluation(case)]
    found.sort(key=lambda f: (f.kind != "not_finite", -f.cost.value if f.cost else math.inf))
    return found


def row_of(site: NormSite, batches: Sequence[Sequence[Moments]]) -> SiteRow:
    """The numbers of one site, from its moments in each batch and call."""
    momentum = getattr(site.norm, "momentum", None)
    every = [moments for calls in batches for moments in calls]
    mean, var = site.running
    of_mean, of_var = _distances(site, mean, var, every)
    share = (1 - momentum) ** site.counter if momentum and site.counter else None
    state: Literal["averaged", "initial", "never updated"] = "averaged"
    if bool(((mean == 0) & (var == 1)).all()):
        state = "never updated"
    elif share and share > INITIAL_SHARE:
        state = "initial"
    return SiteRow(
        name=site.name,
        momentum=momentum,
        updates=site.counter,
        initial_share=share,
        mean_distance=_middle(of_mean),
        var_distance=_middle(of_var),
        largest_distance=max((float(d.max()) for d in (of_mean, of_var) if len(d)), default=0.0),
        state=state,
    )


def _distances(
    site: NormSite, mean: Tensor, var: Tensor, moments: Sequence[Moments]
) -> tuple[Tensor, Tensor]:
    """How far mean and variance of each channel are from those of batches."""
    scale = pool_batches(site, list(moments)).var + site.eps
    return (
        distances(mean, [part.mean for part in moments], scale.sqrt()),
        distances(var, [averaged_var(part) for part in moments], scale),
    )


def _middle(values: Tensor) -> float | None:
    return float(values.median()) if len(values) else None


# --- Rules ---------------------------------------------------------------------------------------


def _not_finite(case: Case) -> Iterator[Finding]:
    buffers = case.seen.parts.model.named_buffers()
    bad = [name.rpartition(".")[0] for name, value in buffers if not value.isfinite().all()]
    bad += [path for path in case.rows if not _is_finite(case, path)]
    if bad:
        yield _finding(
            "not_finite",
            bad,
            "running state of {names} holds NaN or infinity: one batch with such a value stays in "
            "a running average for ever",
            f"find the batch, then reset_running_stats() and {RECOMPUTE}",
        )
    elif not math.isfinite(case.seen.gap.value):
        yield _finding(
            "not_finite",
            (),
            "the loss is not finite, so the gap has no terms",
            "look for the first batch whose loss is NaN or infinite",
        )


def _averages(case: Case) -> Iterator[Finding]:
    cost, seen, rows = case.cost("averages"), case.seen, case.rows
    of_averages = partial(_finding, term="averages", cost=cost)
    still = [path for path, row in rows.items() if row.momentum == 0]
    fresh = [path for path, row in rows.items() if row.state == "never updated"]
    if still and (cost or fresh):
        yield of_averages(
            "stale_averages",
            still,
            "running averages of {names} have momentum 0, so training never moves them",
            f"set momentum=0.1, then {RECOMPUTE}",
        )
    if fresh := [path for path in fresh if path not in still]:
        yield of_averages(
            "never_updated",
            fresh,
            "running averages of {names} are at their initial values (mean 0, variance 1): no "
            "forward in training mode has moved them, or they were reset, not saved or not loaded",
            "load them too (print what load_state_dict(..., strict=False) returns; only buffers "
            f"and parameters are saved), or {RECOMPUTE}",
        )
    if cost is None:
        return
    if young := [path for path, row in rows.items() if row.state == "initial"]:
        row = max((rows[path] for path in young), key=lambda row: row.initial_share or 0)
        yield of_averages(
            "initial_values",
            young,
            f"running averages of {{names}} are {row.initial_share:.1%} initial values (mean 0, "
            f"variance 1): {row.updates} updates at momentum {row.momentum:g}",
            f"train longer, raise momentum (the weight of the new value), or {RECOMPUTE}",
        )
    rest = [path for path in rows if path not in (*still, *fresh, *young)]
    if twice := [path for path in rest if max(map(len, seen.moments[path])) > 1]:
        yield of_averages(
            "used_twice",
            twice,
            "{names} run several times in one forward: their averages mix all inputs, while "
            "training normalizes each by its own statistics",
            "give each use a norm of its own, or join the inputs into one batch",
        )
    rest = [path for path in rest if path not in twice]
    if not rest or not all(_is_finite(case, path) for path in rest):
        return
    farthest = max(rows[path].largest_distance for path in rest)
    distance = median(rows[path].distance for path in rest)
    momentum = max(rows[path].momentum or 0 for path in rest)
    # The standard deviation of running minus precise, in those between batches.
    noise = math.sqrt(momentum / (2 - momentum) + 1 / len(seen.sizes))
    typical, extreme = _distances_of_batches(case, rest)
    least = min(2.5 * extreme * noise, 0.3 * farthest)
    far = [path for path in rest if rows[path].largest_distance >= least]
    far.sort(key=lambda path: -rows[path].largest_distance)
    # Averages move with the weights.
    if distance > 1.5 * typical * noise or farthest > 2.5 * extreme * noise:
        yield of_averages(
            "stale_averages",
            far,
            "running averages do not belong to these weights and inputs: a typical channel is "
            f"{distance:.2g} standard deviations between batches off, the farthest {farthest:.2g}, "
            "most at {names}. The weights moved faster than the averages or changed after them, or "
            "these inputs are preprocessed otherwise than in training",
            f"if the inputs are those of training, {RECOMPUTE}; else mend the preprocessing",
        )
    elif len(rest) == len(rows):
        yield of_averages(
            "noisy_averages",
            far,
            "running averages are as far from the statistics of all samples as averages over "
            f"batches of {_group_size(case)} at momentum {momentum:g} come",
            "pool the moments of many batches (precise statistics), lower momentum, or use larger "
            "batches",
        )


def _distances_of_batches(case: Case, paths: Sequence[str]) -> tuple[float, float]:
    """The median and the largest distance of a single batch from all, in standard deviations."""
    apart: list[Tensor] = []
    for path in paths:
        every = [moments for calls in case.seen.moments[path] for moments in calls]
        for one in every[:FEWEST]:
            apart += _distances(case.seen.active[path], one.mean, averaged_var(one), every)
    values = torch.cat(apart)
    return float(values.median()), float(values.max())


def _is_finite(case: Case, path: str) -> bool:
    return all(bool(value.isfinite().all()) for value in case.seen.active[path].running)


def _of_terms(case: Case) -> Iterator[Finding]:
    seen = case.seen
    paths = {"not_analysed": seen.unknown, "rest": seen.acting()}
    largest = max(abs(term.value) for term in seen.terms.values())
    for term, (cause, remedy) in OF_TERM.items():
        cost, sites = case.cost(term), paths.get(term, seen.active)
        if cost is None or cost.value < 0.1 * largest:
            continue
        if term == "rest" and not sites:
            cause = UNEXPLAINED
        cause = cause.replace("{size}", str(_group_size(case)))
        yield _finding(term, sites, cause, remedy, term=term, cost=cost)


def _evaluation(case: Case) -> Iterator[Finding]:
    seen, term = case.seen, case.seen.terms["left_in_training"]
    left, varies = seen.left_in_training(), seen.varies_in_evaluation()
    if left and (term.value or term.error or seen.depends_on_batch or varies):
        yield _finding(
            "left_in_training",
            left,
            "in evaluation, {names} run in training mode (a train() that ignores its argument, or "
            f"a call of train() on a part of the model), so results depend on the batch"
            f"{_at_sizes(case)}",
            "call eval() on the whole model last, and let overridden train(mode) pass the mode on",
            term="left_in_training",
            cost=case.cost("left_in_training"),
        )
        return
    if seen.depends_on_batch:
        yield _finding(
            "depends_on_batch",
            seen.parts.mixing(seen.parts.evaluation),
            "in evaluation the output of a sample depends on the other samples of its batch, at "
            f"{{names}}{_at_sizes(case)}",
            "keep running averages in training and use them in evaluation (batch norm: "
            "track_running_stats=True, training=self.training), or always evaluate in shuffled "
            "batches of the size of training, and say so",
        )
    if varies:
        yield _finding(
            "varies_in_evaluation",
            (),
            f"in evaluation mode {varies}",
            "update state only if self.training, and pass training=self.training to functional "
            "dropout",
        )


# --- Words ---------------------------------------------------------------------------------------


def _finding(
    kind: str,
    paths: Iterable[str],
    cause: str,
    remedy: str,
    *,
    term: str | None = None,
    cost: Estimate | None = None,
) -> Finding:
    """A finding whose cause names the modules at these paths."""
    names = tuple(path or ROOT for path in dict.fromkeys(paths))
    return Finding(kind, cause.replace("{names}", name_some(names)), remedy, names, term, cost)


def _at_sizes(case: Case) -> str:
    """The losses of an evaluation that depends on the size of its batches."""
    sizes = case.seen.loss_at_size
    if not sizes:
        return ""
    size, loss = next(iter(sizes.items()))
    alone = "for single samples" if size == 1 else f"in batches of {size}"
    usual = case.seen.evaluation
    return (
        f": loss {loss.value:.3g} ± {loss.error:.2g} {alone}, {usual.value:.3g} ± "
        f"{usual.error:.2g} in batches of {max(case.seen.sizes)}"
    )


def _group_size(case: Case) -> int:
    """The fewest samples that share statistics in training."""
    largest = max(case.seen.sizes)
    return min((site.group_size(largest) for site in case.seen.active.values()), default=largest)
