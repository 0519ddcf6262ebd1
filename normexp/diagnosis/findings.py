"""Rules: from measurements to findings, each with one sentence of cause and the remedy.

A term of the gap has a cost if it exceeds the tolerance and what its standard error explains
(two-sided t test at 1 %). Terms that are no mistake by themselves count from a tenth of the gap on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch
from scipy import stats
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from normexp.checks.network import name_some
from normexp.diagnosis.measure import Measurement
from normexp.diagnosis.network import FEWEST
from normexp.diagnosis.result import Estimate, Finding, SiteRow
from normexp.norms.base import Moments
from normexp.norms.moment_sites import NormSite, averaged_var, distances, pool_batches

ROOT = "the model"
INITIAL_SHARE = 0.01  # weight beyond which initial values are looked at
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
NEVER_UPDATED = {  # by why the averages are at their initial values: cause and remedy
    "momentum": ("have momentum 0, which never moves them", "set momentum=0.1, then {recompute}"),
    "reset": (
        "were updated and are at their initial values again: they were reset, or a state_dict "
        "brought their counter without the averages",
        "load the buffers too, or {recompute}",
    ),
    "not_loaded": (
        "have trained weights, but the averages of a new module: they were not in the state_dict, "
        "or were loaded with strict=False under other names",
        "load them too (print what load_state_dict(..., strict=False) returns), or {recompute}",
    ),
    "not_saved": (
        "have trained weights, but the averages of a new module: no state_dict holds them",
        "keep them in persistent buffers (self.register_buffer), then {recompute}",
    ),
    "untrained": (
        "were never updated: no forward pass in training mode has reached them",
        "train the network in training mode, or {recompute}",
    ),
}


@dataclass(frozen=True)
class Case:
    """A network's measurements, ready for the rules."""

    seen: Measurement
    gap: Estimate
    rows: Mapping[str, SiteRow]
    tolerance: float
    loss_at_size: Mapping[int, Estimate]

    def cost(self, estimate: Estimate) -> Estimate | None:
        """The estimate if it exceeds the tolerance and chance; NaN does not."""
        return estimate if estimate.value > 0 and self.exceeds(estimate) else None

    def exceeds(self, estimate: Estimate) -> bool:
        """True if its size exceeds the tolerance and chance."""
        bound = stats.t.ppf(0.995, len(self.seen.sizes) - 1) * estimate.error
        return bool(abs(estimate.value) > max(self.tolerance, bound))

    def share(self, term: str) -> Estimate | None:
        """The cost of a term that is a tenth of a gap with a cost, or half of the largest term."""
        cost, terms = self.cost(self.seen.terms[term]), self.seen.terms.values()
        largest = max(abs(other.value) for other in terms)
        least = 0.1 * self.gap.value if self.cost(self.gap) else 0.5 * largest
        return cost if cost and cost.value >= least else None

    @property
    def recompute(self) -> str:
        """How to get averages that belong to the weights."""
        how = "by forwards over the training data in training mode"
        if all(isinstance(site.norm, _BatchNorm) for site in self.seen.active.values()):
            how = "torch.optim.swa_utils.update_bn(train_loader, model)"
        return f"recompute the averages with the final weights: {how}"

    @property
    def largest_terms(self) -> list[str]:
        """Terms beyond chance, the largest first."""
        terms = self.seen.terms
        found = [name for name, term in terms.items() if self.exceeds(term)]
        return sorted(found, key=lambda name: -abs(terms[name].value))


def find(case: Case) -> tuple[Finding, ...]:
    """All findings: NaN, then those with a cost, the largest first, then the others."""
    found = [*_not_finite(case), *_averages(case), *_of_terms(case), *_evaluation(case)]
    found = [replace(f, sites=tuple(path or ROOT for path in f.sites)) for f in found]
    found.sort(key=lambda f: (f.kind != "not_finite", -f.cost.value if f.cost else math.inf))
    return tuple(found)


def row_of(site: NormSite, momentum: float | None, batches: Sequence[Sequence[Moments]]) -> SiteRow:
    """The numbers of one site, from its moments in each batch and call."""
    every = [moments for calls in batches for moments in calls]
    mean, var = site.running
    of_mean, of_var = _distances(site, mean, var, every)
    state: Literal["averaged", "initial", "never updated"] = "averaged"
    share = (1 - momentum) ** site.counter if momentum and site.counter else None
    if bool(((mean == 0) & (var == 1)).all()):
        state = "never updated"
    elif share is not None and share > INITIAL_SHARE:
        freed = _distances(site, mean / (1 - share), (var - share) / (1 - share), every)
        before, after = (max(_middle(d) or 0 for d in both) for both in ((of_mean, of_var), freed))
        state = "initial" if after < 0.5 * before else state
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
    buffers = case.seen.subject.model.named_buffers()
    bad = [name.rpartition(".")[0] for name, value in buffers if not value.isfinite().all()]
    bad += [path for path in case.seen.active if not _is_finite(case, path)]
    if bad:
        yield Finding(
            "not_finite",
            f"running state holds NaN or infinity at {_names(bad)}: one batch with such a value "
            "stays in a running average for ever",
            f"find the batch, then reset_running_stats() and {case.recompute}",
            tuple(dict.fromkeys(bad)),
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
    cost, seen, rows = case.cost(case.seen.terms["averages"]), case.seen, case.rows
    fresh = [path for path, row in rows.items() if row.state == "never updated"]
    for why, (cause, remedy) in NEVER_UPDATED.items():
        paths = [path for path in fresh if _why_fresh(case, path) == why]
        if not paths:
            continue
        remedy = remedy.format(recompute=case.recompute)
        cause = f"running averages (mean 0, variance 1) of {_names(paths)} {cause}"
        yield Finding("never_updated", cause, remedy, tuple(paths), "averages", cost)
    if cost is None:
        return
    rest = [path for path, row in rows.items() if row.state == "averaged"]
    if young := [path for path, row in rows.items() if row.state == "initial"]:
        row = max((rows[path] for path in young), key=lambda row: row.initial_share or 0)
        yield Finding(
            "initial_values",
            f"running averages are {row.initial_share:.1%} initial values (mean 0, variance 1) at "
            f"{_names(young)}: {row.updates} updates at momentum {row.momentum:g}",
            f"{case.recompute}, train longer, or raise momentum (in torch, the weight of the new "
            "value)",
            *(tuple(young), "averages", cost),
        )
    if twice := [path for path in rest if max(map(len, seen.moments[path])) > 1]:
        yield Finding(
            "used_twice",
            f"{_names(twice)} run several times in one forward: their averages mix all inputs, "
            "while training normalizes each by its own statistics",
            "give each use a norm of its own, or join the inputs into one batch",
            *(tuple(twice), "averages", cost),
        )
    if still := [path for path in rest if rows[path].momentum == 0]:
        yield Finding(
            "stale_averages",
            f"running averages of {_names(still)} have momentum 0, so training has never moved "
            "them",
            f"set momentum=0.1, then {case.recompute}",
            *(tuple(still), "averages", cost),
        )
    rest = [path for path in rest if path not in (*twice, *still)]
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
    worst = tuple(sorted(far, key=lambda path: -rows[path].largest_distance))
    # Averages move with the weights.
    if distance > 1.5 * typical * noise or farthest > 2.5 * extreme * noise:
        yield Finding(
            "stale_averages",
            "running averages do not belong to these weights and inputs: a typical channel is "
            f"{distance:.2g} standard deviations between batches off, the farthest {farthest:.2g}, "
            f"most at {_names(worst)}. The weights moved faster than the averages or changed after "
            "them, or these inputs are preprocessed otherwise than in training",
            f"if the inputs are those of training, {case.recompute}; else mend the preprocessing",
            *(worst, "averages", cost),
        )
    elif not (fresh or young or twice or still):
        yield Finding(
            "noisy_averages",
            f"running averages are as far from the statistics of all samples as averages over "
            f"batches of {_group_sizes(case)} at momentum {momentum:g} come",
            "pool the moments of many batches (precise statistics), lower momentum, or use larger "
            "batches",
            *(worst, "averages", cost),
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


def _why_fresh(case: Case, path: str) -> str:
    site = case.seen.active[path]
    if case.rows[path].momentum == 0:
        return "momentum"
    if site.counter:
        return "reset"
    trained = [p for p in site.entry.parameters() if p.requires_grad]
    if not any(len(p.unique()) > 1 for p in trained):
        return "untrained"
    return "not_loaded" if site.mean in site.norm.state_dict() else "not_saved"


def _of_terms(case: Case) -> Iterator[Finding]:
    seen = case.seen
    for term, (cause, remedy) in OF_TERM.items():
        cost = case.cost(seen.terms[term]) if term == "dropout_shift" else case.share(term)
        if cost is None:
            continue
        paths: Iterable[str] = seen.active
        if term == "own_share" and not any(site.pools_samples for site in seen.active.values()):
            cause = "in training each sample has statistics of its own, in evaluation averages"
            remedy = "set track_running_stats=False, so that both modes use the sample's"
        if term == "not_analysed":
            paths = seen.unknown
        if term == "rest":
            paths = seen.acting()
            cause = cause if paths else UNEXPLAINED
        cause = cause.format(sizes=_group_sizes(case), names=_names(paths))
        yield Finding(term, cause, remedy, tuple(paths), term, cost)


def _evaluation(case: Case) -> Iterator[Finding]:
    seen, term = case.seen, case.seen.terms["left_in_training"]
    left, (moved, is_random) = seen.left_in_training(), seen.varies_in_evaluation()
    if left and (term.value or term.error or seen.depends_on_batch or moved or is_random):
        yield Finding(
            "left_in_training",
            f"in evaluation, {_names(left)} {'is' if len(left) == 1 else 'are'} in training mode "
            "(a train() that ignores its argument, or a call of train() on a part of the model), "
            f"so results depend on the batch{_at_sizes(case)}",
            "call eval() on the whole model last, and let overridden train(mode) pass the mode on",
            *(tuple(left), "left_in_training", case.cost(term)),
        )
        return
    if seen.depends_on_batch:
        paths = seen.evaluated.mixing(seen.subject.evaluation)
        yield Finding(
            "depends_on_batch",
            f"in evaluation the output of a sample depends on the other samples of its batch, at "
            f"{_names(paths)}{_at_sizes(case)}",
            "keep running averages in training and use them in evaluation (batch norm: "
            "track_running_stats=True, training=self.training), or always evaluate in shuffled "
            "batches of the size of training, and say so",
            tuple(paths),
        )
    if moved or is_random:
        parts = [f"a forward changes {name_some(moved)}"] if moved else []
        parts += ["two forwards of one batch differ"] if is_random else []
        yield Finding(
            "varies_in_evaluation",
            f"in evaluation mode {' and '.join(parts)}",
            "update state only if self.training, and pass training=self.training to functional "
            "dropout",
        )


# --- Words ---------------------------------------------------------------------------------------


def _at_sizes(case: Case) -> str:
    """The losses of an evaluation that depends on the size of its batches."""
    sizes = case.loss_at_size
    if not (case.seen.depends_on_batch and sizes):
        return ""
    size, loss = next(iter(sizes.items()))
    alone = "for single samples" if size == 1 else f"in batches of {size}"
    usual = case.seen.mean(case.seen.losses["evaluation"])
    return (
        f": loss {loss.value:.3g} ± {loss.error:.2g} {alone}, {usual.value:.3g} ± "
        f"{usual.error:.2g} in batches of {max(case.seen.sizes)}"
    )


def _group_sizes(case: Case) -> str:
    largest = max(case.seen.sizes)
    sizes = sorted({site.group_size(largest) for site in case.seen.active.values()})
    return " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))) if sizes else str(largest)


def _names(paths: Iterable[str]) -> str:
    return name_some([path or ROOT for path in paths])
