"""Rules: from measurements to findings, each with one sentence of cause and the remedy.

A term of the gap has a cost if it exceeds the tolerance and what its standard error explains
(two-sided t test at 1 %). Terms that are no mistake by themselves count from a tenth of the gap on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from scipy import stats
from torch import Tensor

from normexp.checks.network import name_some
from normexp.diagnosis.measure import Measurement
from normexp.diagnosis.result import Estimate, Finding, SiteRow
from normexp.norms.base import Moments
from normexp.norms.moment_sites import NormSite, averaged_var, distances, pool_batches

INITIAL_SHARE = 0.01  # weight beyond which initial values are looked at
RECOMPUTE = (
    "recompute the averages with the final weights: torch.optim.swa_utils.update_bn(train_loader, "
    "model)"
)
OF_TERM = {  # cause and remedy of the terms that have one of each
    "rest": (
        "beside the norms found, something acts in training mode alone (dropout, code that reads "
        "self.training, a norm called as a function) and makes the loss lower",
        "compare what these modules compute in the two modes",
    ),
    "small_batch": (
        "the network needs the statistics of its current batch: samples carry information about "
        "each other (sorted or related batches), or training adapted to the noise",
        "shuffle the training data, share statistics among more samples, or use group norm",
    ),
    "own_share": (
        "in training each sample is part of the statistics that normalize it (1 / {sizes}), in "
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
        "{names} keeps running state through no norm found here (batch norm called as a function "
        "on buffers of its own, or a norm of another kind), which fits these samples worse than "
        "what training uses",
        "recompute these buffers with the final weights, by forwards in training mode",
    ),
}
NEVER_UPDATED = {  # by why the averages are at their initial values: cause and remedy
    "momentum": ("have momentum 0, which never moves them", "set momentum=0.1, then " + RECOMPUTE),
    "reset": (
        "were updated and are at their initial values again: they were reset, or a state_dict "
        "brought their counter without the averages",
        "load the buffers too, or " + RECOMPUTE,
    ),
    "not_loaded": (
        "have trained weights, but the averages of a new module: running_mean and running_var "
        "were not in the state_dict, or were loaded with strict=False under other names",
        "load the buffers too (print what load_state_dict(..., strict=False) returns), or "
        + RECOMPUTE,
    ),
    "untrained": (
        "were never updated: no forward pass in training mode has reached them",
        "train the network in training mode, or " + RECOMPUTE,
    ),
}


@dataclass(frozen=True)
class Case:
    """A network's measurements, ready for the rules."""

    seen: Measurement
    gap: Estimate
    rows: Sequence[SiteRow]
    tolerance: float

    def cost(self, estimate: Estimate) -> Estimate | None:
        """The estimate if it exceeds the tolerance and chance; NaN does not."""
        bound = stats.t.ppf(0.995, len(self.seen.sizes) - 1) * estimate.error
        return estimate if estimate.value > max(self.tolerance, bound) else None

    def share(self, term: str) -> Estimate | None:
        """The cost of a term that is a tenth of a gap with a cost, or more."""
        cost, gap = self.cost(self.seen.terms[term]), self.cost(self.gap)
        return cost if cost and gap and cost.value >= 0.1 * gap.value else None


def find(case: Case) -> tuple[Finding, ...]:
    """All findings: NaN, then those with a cost, the largest first, then the others."""
    found = [*_not_finite(case), *_averages(case), *_of_terms(case), *_evaluation(case)]
    found.sort(key=lambda f: (f.kind != "not_finite", -f.cost.value if f.cost else math.inf))
    return tuple(found)


def row_of(site: NormSite, batches: Sequence[Sequence[Moments]]) -> SiteRow:
    """The numbers of one site, from its moments in each batch and call."""
    every = [moments for calls in batches for moments in calls]
    mean, var = site.running
    of_mean, of_var = _distances(site, mean, var, every)
    state: Literal["averaged", "initial", "never updated"] = "averaged"
    if bool(((mean == 0) & (var == 1)).all()):
        state = "never updated"
    elif (share := site.initial_share or 0) > INITIAL_SHARE:
        freed = _distances(site, mean / (1 - share), (var - share) / (1 - share), every)
        before, after = (max(_middle(d) or 0 for d in both) for both in ((of_mean, of_var), freed))
        state = "initial" if after < 0.5 * before else state
    return SiteRow(
        name=site.name,
        momentum=site.momentum,
        updates=site.counter,
        initial_share=site.initial_share,
        mean_distance=_middle(of_mean),
        var_distance=_middle(of_var),
        largest_distance=max((float(d.max()) for d in (of_mean, of_var) if len(d)), default=0.0),
        state=state,
    )


def _distances(
    site: NormSite, mean: Tensor, var: Tensor, moments: Sequence[Moments]
) -> tuple[Tensor, Tensor]:
    """How far mean and variance of each channel are from those of batches."""
    scale = pool_batches(site, list(moments)).var + float(site.norm.eps)
    return (
        distances(mean, [part.mean for part in moments], scale.sqrt()),
        distances(var, [averaged_var(part) for part in moments], scale),
    )


def _middle(values: Tensor) -> float | None:
    return float(values.median()) if len(values) else None


# --- Rules ---------------------------------------------------------------------------------------


def _not_finite(case: Case) -> Iterator[Finding]:
    bad = [name for name, value in case.seen.state.items() if not value.isfinite().all()]
    if bad:
        paths = tuple(dict.fromkeys(name.rpartition(".")[0] or "the model" for name in bad))
        yield Finding(
            "not_finite",
            f"buffers hold NaN or infinity at {name_some(paths)}: one batch with such a value "
            "stays in a running average for ever",
            f"find the batch, then reset_running_stats() and {RECOMPUTE}",
            paths,
        )
    elif modes := [
        m for m in ("training", "evaluation") if not math.isfinite(case.seen.losses[m].sum())
    ]:
        yield Finding(
            "not_finite",
            f"the loss is not finite in {' and '.join(modes)} mode, so the gap has no terms",
            "look for the first batch whose loss is NaN or infinite",
        )


def _averages(case: Case) -> Iterator[Finding]:
    cost, seen = case.cost(case.seen.terms["averages"]), case.seen
    rows = dict(zip(seen.active, case.rows, strict=True))
    groups: dict[str, list[NormSite]] = {}
    for site, row in rows.items():
        if row.state == "never updated":
            groups.setdefault(_why_fresh(site), []).append(site)
    for why, sites in groups.items():
        cause, remedy = NEVER_UPDATED[why]
        cause = f"running averages (mean 0, variance 1) of {_names(sites)} {cause}"
        yield Finding("never_updated", cause, remedy, _paths(sites), "averages", cost)
    if cost is None:
        return
    rest = {site: row for site, row in rows.items() if row.state == "averaged"}
    if young := {site: row for site, row in rows.items() if row.state == "initial"}:
        row = max(young.values(), key=lambda row: row.initial_share or 0)
        yield Finding(
            "initial_values",
            f"running averages are {row.initial_share:.1%} initial values (mean 0, variance 1) at "
            f"{_names(young)}: {row.updates} updates at momentum {row.momentum:g}",
            f"{RECOMPUTE}, train longer, or raise momentum (in torch, the weight of the new value)",
            *(_paths(young), "averages", cost),
        )
    twice = [site for site in rest if max(map(len, seen.moments[site])) > 1]
    if twice:
        yield Finding(
            "used_twice",
            f"{_names(twice)} run several times in one forward: their averages mix all inputs, "
            "while training normalizes each by its own statistics",
            "give each use a norm of its own, or join the inputs into one batch",
            *(_paths(twice), "averages", cost),
        )
    rest = {site: row for site, row in rest.items() if site not in twice}
    if not rest or any(not value.isfinite().all() for site in rest for value in site.running):
        return
    farthest = max(row.largest_distance for row in rest.values())
    distance = median(row.distance for row in rest.values())
    momentum = max(row.momentum or 0 for row in rest.values())
    # The standard deviation of running minus precise, in those between batches.
    noise = math.sqrt(momentum / (2 - momentum) + 1 / len(seen.sizes))
    least = min(8 * noise, 0.3 * farthest)
    far = [site for site, row in rest.items() if row.largest_distance >= least]
    worst = sorted(far, key=lambda site: -rest[site].largest_distance)
    # The median of |z| is 0.67; averages move with the weights, and have heavy tails.
    if distance > 1.5 * 0.67 * noise or farthest > 8 * noise:
        yield Finding(
            "stale_averages",
            "running averages do not belong to these weights and inputs: a typical channel is "
            f"{distance:.2g} standard deviations between batches off, the farthest {farthest:.2g}, "
            f"most at {_names(worst)}. The weights moved faster than the averages or changed after "
            "them, or these inputs are preprocessed otherwise than in training",
            f"if the inputs are those of training, {RECOMPUTE}; else mend the preprocessing",
            *(_paths(worst), "averages", cost),
        )
    elif not (groups or young or twice):
        yield Finding(
            "noisy_averages",
            f"running averages are as far from the statistics of all samples as averages over "
            f"batches of {_group_sizes(case)} at momentum {momentum:g} come",
            "pool the moments of many batches (precise statistics), lower momentum, or use larger "
            "batches",
            *(_paths(worst), "averages", cost),
        )


def _why_fresh(site: NormSite) -> str:
    if site.counter:
        return "momentum" if site.momentum == 0 else "reset"
    weights = [getattr(site.norm, name, None) for name in ("weight", "bias")]
    is_trained = any(isinstance(w, Tensor) and len(w.unique()) > 1 for w in weights)
    return "not_loaded" if is_trained else "untrained"


def _of_terms(case: Case) -> Iterator[Finding]:
    seen, unknown = case.seen, tuple(case.seen.unknown)
    sites = {"rest": (), "not_analysed": unknown}
    for term, (cause, remedy) in OF_TERM.items():
        if cost := case.cost(seen.terms[term]) if term == "dropout_shift" else case.share(term):
            if term == "own_share" and not any(s.pools_samples for s in seen.active):
                cause = "in training each sample has statistics of its own, in evaluation averages"
                remedy = "set track_running_stats=False, so that both modes use the sample's"
            cause = cause.format(sizes=_group_sizes(case), names=name_some(unknown))
            yield Finding(term, cause, remedy, sites.get(term, _paths(seen.active)), term, cost)


def _evaluation(case: Case) -> Iterator[Finding]:
    seen, term = case.seen, case.seen.terms["left_in_training"]
    left, (moved, is_random) = seen.left_in_training(), seen.varies_in_evaluation()
    if left and (term.value or term.error or moved or is_random):
        yield Finding(
            "left_in_training",
            f"in evaluation, {name_some(left)} {'is' if len(left) == 1 else 'are'} in training "
            "mode, so results depend on the batch: a train() that ignores its argument, or a call "
            "of train() on a part of the model",
            "call eval() on the whole model last, and let overridden train(mode) pass the mode on",
            *(tuple(left), "left_in_training", case.cost(term)),
        )
    elif moved or is_random:
        parts = [f"a forward changes {name_some(moved)}"] if moved else []
        parts += ["two forwards of one batch differ"] if is_random else []
        yield Finding(
            "varies_in_evaluation",
            f"in evaluation mode {' and '.join(parts)}",
            "update buffers only if self.training, and pass training=self.training to functional "
            "dropout",
        )
    if sites := seen.without_averages:
        yield Finding(
            "without_averages",
            f"{_names(sites)} keep no running averages (track_running_stats=False), so evaluation "
            "uses the statistics of its own batches: results depend on their size and order",
            "evaluate at the batch size of training, shuffled; or set track_running_stats=True and "
            "recompute",
            _paths(sites),
        )


# --- Words ---------------------------------------------------------------------------------------


def _group_sizes(case: Case) -> str:
    largest = max(case.seen.sizes)
    sizes = sorted({site.group_size(largest) for site in case.seen.active})
    return " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else str(largest)


def _paths(sites: Sequence[NormSite] | Mapping[NormSite, SiteRow]) -> tuple[str, ...]:
    return tuple(site.name for site in sites)


def _names(sites: Sequence[NormSite] | Mapping[NormSite, SiteRow]) -> str:
    return name_some(_paths(sites))
