"""Rules: from measurements to findings, each with one sentence of cause and the remedy.

A term of the gap counts if it exceeds the tolerance and what its standard error explains (two-sided
t test at 1 %). What costs no loss is at most a note.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from normexp.diagnosis.examination import MOST_TRIALS, Examination, standard_error
from normexp.diagnosis.result import Estimate, Finding, SiteRow
from normexp.norms.moment_sites import (
    INITIAL_SHARE,
    NormSite,
    averaged_var,
    distances_of,
    pool_batches,
)
from normexp.norms.moments import Moments

CHANCE = 1e-4  # of calling random batches sorted
DEAD = 0.1  # variance over eps
MANY = 0.05  # share of the channels of a site
RECOMPUTE = (
    "recompute the averages with the final weights: torch.optim.swa_utils.update_bn(train_loader, "
    "model)"
)


@dataclass(frozen=True)
class Case:
    """A network's measurements, ready for the rules."""

    seen: Examination
    terms: Mapping[str, Estimate]
    gap: Estimate
    rows: Sequence[SiteRow]
    tolerance: float

    def counts(self, estimate: Estimate) -> bool:
        """True if a loss is too large for the tolerance and for chance; NaN counts."""
        bound = stats.t.ppf(0.995, len(self.seen.sizes) - 1) * estimate.error
        return not estimate.value <= max(self.tolerance, bound)

    @property
    def better_eps(self) -> tuple[float, float] | None:
        """The factor on eps that suits these weights and averages better, and the loss it saves.

        Averages were taken under the eps of training. With another one, sites behind the first see
        other inputs, and their averages are far from these.
        """
        trials = self.seen.eps_trials
        noise = max((_noise(row, MOST_TRIALS) for row in self.rows), default=0.0)
        if not trials or trials[1.0].distance < 3 * noise:
            return None
        gains: dict[float, float] = {}
        for factor, trial in trials.items():
            gain = trials[1.0].losses - trial.losses
            estimate = Estimate(float(gain.mean()), standard_error(gain, np.ones(len(gain))))
            nearer = trial.distance < min(3 * noise, trials[1.0].distance / 2)
            if nearer and self.counts(estimate):
                gains[factor] = estimate.value
        best = max(gains, key=lambda factor: gains[factor], default=None)
        return None if best is None else (best, gains[best])

    @property
    def has_gap(self) -> bool:
        return self.counts(self.gap)

    def costs(self, name: str) -> bool:
        """True if a term counts; one that is not a number tells of no cause."""
        return not math.isnan(self.terms[name].value) and self.counts(self.terms[name])

    def carries(self, name: str) -> bool:
        """True if a term counts and is a tenth of the gap or more."""
        return self.has_gap and self.costs(name) and self.terms[name].value >= 0.1 * self.gap.value


def find(case: Case) -> tuple[Finding, ...]:
    """All findings, faults first."""
    rules = (
        _broken_values,
        _never_updated,
        _initial_values,
        _left_in_training,
        _averages,
        _own_share,
        _small_batch,
        _dropout_shift,
        _rest,
        _in_evaluation,
        _eps,
        _channels,
        _without_averages,
        _updates,
        _precision,
        _composition,
        _other_inputs,
        _unknown,
    )
    findings = [finding for rule in rules for finding in rule(case)]
    return tuple(sorted(findings, key=lambda finding: finding.level != "fault"))


# --- Rows ----------------------------------------------------------------------------------------


def row_of(site: NormSite, batches: Sequence[Moments | None], *, is_active: bool) -> SiteRow:
    """The numbers of one site."""
    mean, var = site.running
    present = [batch for batch in batches if batch is not None]
    precise = pool_batches(site, present).var if present else var
    eps, momentum, updates = float(site.norm.eps), site.momentum, site.counter
    is_average = is_active and momentum is not None and 0 < momentum < 1
    moved = (mean != 0) | (var != 1)
    by_mean, by_var = distances_of(site, batches)
    return SiteRow(
        name=site.name,
        kind=type(site.norm).__name__,
        use="batch" if is_active else "fixed",
        channels=len(mean),
        momentum=momentum,
        updates=updates,
        half_life=math.log(0.5) / math.log1p(-momentum) if is_average and momentum else None,
        initial_share=site.initial_share if is_active else None,
        mean_distance=_middle(by_mean),
        var_distance=_middle(by_var),
        largest_distance=max((float(d.max()) for d in (by_mean, by_var) if len(d)), default=None),
        smallest_var=float(precise.min()) / eps if eps > 0 else None,
        dead=int((precise <= DEAD * eps).sum()),
        never_updated=int((~moved).sum()),
    )


def _middle(distances: Tensor) -> float | None:
    return float(distances.median()) if len(distances) else None


# --- Rules ---------------------------------------------------------------------------------------


def _broken_values(case: Case) -> Iterator[Finding]:
    bad = [s for s in case.seen.sites if not all(v.isfinite().all() for v in s.running)]
    if bad:
        yield Finding(
            "not_finite",
            "fault",
            f"running averages hold NaN or infinity at {_names(bad)}: one batch with such a value "
            "stays in an average for ever, and evaluation gives NaN",
            f"find the batch, then reset_running_stats() and {RECOMPUTE}",
            _paths(bad),
        )
    negative = [s for s in case.seen.sites if (s.running[1] < 0).any()]
    if negative:
        yield Finding(
            "negative_variance",
            "fault",
            f"running variances are below 0 at {_names(negative)}",
            RECOMPUTE,
            _paths(negative),
        )
    if not bad and not math.isfinite(case.gap.value):
        yield Finding(
            "loss_not_finite",
            "fault",
            "the loss is not finite in training or evaluation mode, so the gap has no terms",
            "look for the first batch whose loss is NaN or infinite",
        )


def _never_updated(case: Case) -> Iterator[Finding]:
    fresh = [s for s, row in _active(case) if row.never_updated == row.channels]
    groups: dict[str, list[NormSite]] = {}
    for site in fresh:
        groups.setdefault(_why_fresh(site), []).append(site)
    remedies = {
        "not_loaded": (
            "have trained weights, but their averages are those of a new module: running_mean, "
            "running_var were not in the state_dict, or it was loaded with strict=False under "
            "other names",
            "load the buffers too (print what load_state_dict(..., strict=False) returns), or "
            + RECOMPUTE,
        ),
        "momentum": (
            "have momentum 0, which never moves them",
            f"set momentum=0.1, then {RECOMPUTE}",
        ),
        "untrained": (
            "were never updated: no forward pass in training mode has reached them",
            f"train the network in training mode, or {RECOMPUTE}",
        ),
        "reset": (
            "were updated and are at their initial values again: they were reset, or a "
            "state_dict brought their counter without the averages",
            f"load the buffers too, or {RECOMPUTE}",
        ),
    }
    for why, sites in groups.items():
        cause, remedy = remedies[why]
        cost = f"; they cost {case.terms['averages']}" if case.costs("averages") else ""
        yield Finding(
            "never_updated" if why != "not_loaded" else "not_loaded",
            "fault",
            f"running averages (mean 0, variance 1) of {_names(sites)} {cause}{cost}",
            remedy,
            _paths(sites),
        )
    unset = [
        site
        for site, row in _fixed(case)
        if row.never_updated == row.channels and (row.mean_distance or 0) > 3
    ]
    if unset:
        yield Finding(
            "frozen_at_defaults",
            "fault",
            f"{_names(unset)} use fixed statistics that nobody has set (mean 0, variance 1), far "
            "from those of the data",
            "load the statistics of a trained network, or train these norms",
            _paths(unset),
        )


def _why_fresh(site: NormSite) -> str:
    if site.counter:
        return "momentum" if site.momentum == 0 else "reset"
    weights = [getattr(site.norm, name, None) for name in ("weight", "bias")]
    values = [w.detach() for w in weights if isinstance(w, Tensor) and w.numel() > 1]
    is_trained = any(float(w.min()) != float(w.max()) for w in values)
    return "not_loaded" if is_trained else "untrained"


def _is_young(case: Case) -> bool:
    """True if half of what the averages cost, or more, comes from their initial values."""
    freed, running = case.seen.without_initial, case.seen.losses["running"]
    if freed is None or not case.costs("averages"):
        return False
    return not float((running - freed).mean()) < 0.5 * case.terms["averages"].value


def _initial_values(case: Case) -> Iterator[Finding]:
    costs = _is_young(case)
    least = INITIAL_SHARE if costs else 10 * INITIAL_SHARE
    young = [
        (site, row)
        for site, row in _active(case)
        if (row.initial_share or 0) > least and row.never_updated < row.channels
    ]
    if young:
        site, row = max(young, key=lambda pair: pair[1].initial_share or 0)
        cost = f"; they cost {case.terms['averages']}" if costs else ""
        yield Finding(
            "initial_values",
            "fault" if costs else "note",
            f"running averages are {row.initial_share:.1%} initial values (mean 0, variance 1) at "
            f"{_names([s for s, _ in young])}: {row.updates} updates at momentum {row.momentum:g}, "
            f"whose half-life is {row.half_life:.4g} updates{cost}",
            f"{RECOMPUTE}, train longer, or raise momentum (in torch, the weight of the new value)",
            tuple(s.name for s, _ in young),
        )


def _left_in_training(case: Case) -> Iterator[Finding]:
    seen = case.seen
    term = case.terms["left_in_training"]
    acts = term.value or term.error or seen.is_random or seen.mixes or seen.moved
    if not seen.left_in_training or not acts:
        return
    yield Finding(
        "left_in_training",
        "fault",
        f"in evaluation, {_list(seen.left_in_training)} "
        f"{'is' if len(seen.left_in_training) == 1 else 'are'} in training mode ({term} of the "
        "loss on these batches, and results that depend on the batch): a train() that ignores its "
        "argument, or a call of train() on a part of the model",
        "call eval() on the whole model last, and let overridden train(mode) pass the mode on",
        tuple(seen.left_in_training),
    )


def _averages(case: Case) -> Iterator[Finding]:
    if not case.costs("averages"):
        return
    pairs = list(_active(case))
    explained = any(row.never_updated for _, row in pairs) or _is_young(case)
    if (
        not pairs
        or explained
        or case.better_eps
        or any(not v.isfinite().all() for s, _ in pairs for v in s.running)
    ):
        return  # the rules before said why
    far = sorted(pairs, key=lambda pair: -(pair[1].largest_distance or 0))
    farthest = far[0][1].largest_distance or 0
    worst = [site for site, row in far if (row.largest_distance or 0) >= 0.3 * farthest][:3]
    distance = median(_far(row) for _, row in pairs)
    noise = max(_noise(row, len(case.seen.sizes)) for _, row in pairs)
    # The median of |z| is 0.67; averages move with the weights, and have heavy tails.
    is_noise = distance <= 1.5 * 0.67 * noise and farthest <= 8 * noise
    cost = f"precise statistics would save {case.terms['averages']}"
    ratio = min(_averaged_over_precise(site, case.seen.moments[site]) for site, _ in pairs)
    if is_noise and ratio < 0.9:
        yield Finding(
            "biased_averages",
            "fault",
            f"running variances average those of single batches, {ratio:.0%} of the variance over "
            f"all batches at the worst site: batches of {_sizes(case)} leave out the variance "
            f"between batches; {cost}",
            "pool the moments of many batches (normexp's precise statistics, fvcore's "
            "update_bn_stats), use larger batches, or group norm",
            _paths(worst),
        )
    elif is_noise:
        momentum = max(row.momentum or 0 for _, row in pairs)
        yield Finding(
            "noisy_averages",
            "fault",
            f"running averages are as noisy as momentum {momentum:g} makes them: a typical channel "
            f"is {distance:.2g} standard deviations between batches off; {cost}",
            f"{RECOMPUTE}, or lower momentum (in torch, the weight of the new value)",
            _paths(worst),
        )
    else:
        weights = (
            "the weights moved faster than the averages (a high learning rate) or changed after "
            "them (other or averaged weights, folding, another eps)"
        )
        inputs = f"these inputs are preprocessed otherwise than in training{_inputs(case)}"
        recompute = f"if the inputs are those of training, {RECOMPUTE}; else mend the preprocessing"
        first, *others = [_far(row) for _, row in pairs]
        if others and first > 5 * max(others):
            why = f"Probably {inputs}, because only the first norm is far"
        else:
            why = f"Either {weights}, or {inputs}"
        yield Finding(
            "stale_averages",
            "fault",
            f"running averages do not belong to these weights and inputs: a typical channel is "
            f"{distance:.2g} standard deviations between batches off, the farthest {farthest:.2g}, "
            f"most at {_names(worst)}; {cost}. {why}",
            recompute,
            _paths(worst),
        )


def _own_share(case: Case) -> Iterator[Finding]:
    if not case.carries("own_share"):
        return
    if not any(site.pools_samples for site in case.seen.active):
        yield Finding(
            "own_share",
            "fault",
            "in training instance norm uses the statistics of each sample, in evaluation running "
            f"averages; that costs {case.terms['own_share']}",
            "set track_running_stats=False, so that both modes use those of the sample",
            _paths(case.seen.active),
        )
    else:
        sizes = _group_sizes(case)
        yield Finding(
            "own_share",
            "fault",
            f"in training each sample is 1 / {sizes} of the statistics that normalize it, in "
            f"evaluation no part of them; that costs {case.terms['own_share']}",
            "evaluate with the own share (EvalNorm, arXiv:1904.06031; norm=eval_norm), share "
            "statistics among more samples, or use group norm",
        )


def _small_batch(case: Case) -> Iterator[Finding]:
    if case.carries("small_batch"):
        yield Finding(
            "small_batch",
            "fault",
            "the network needs the statistics of its current batch: with statistics expected of a "
            f"batch of {_group_sizes(case)}, it loses {case.terms['small_batch']}. Samples carry "
            "information about each other (sorted or related batches), or training adapted to the "
            "noise",
            "shuffle the training data, share statistics among more samples, or use group norm",
        )


def _dropout_shift(case: Case) -> Iterator[Finding]:
    if case.costs("dropout_shift"):
        kinds = ", ".join(case.seen.acts_in_training) or "modules that act in training alone"
        yield Finding(
            "dropout_shift",
            "fault",
            f"the averages were taken behind {kinds}, which evaluation leaves out, so variances "
            f"differ (arXiv:1801.05134); that costs {case.terms['dropout_shift']}",
            "move dropout behind the last batch norm, or recompute the averages with dropout off",
        )


def _rest(case: Case) -> Iterator[Finding]:
    if case.carries("rest"):
        acting = {k: v for k, v in case.seen.acts_in_training.items() if v < 0}
        names = ", ".join(acting) or "code that reads self.training"
        yield Finding(
            "rest",
            "fault",
            f"not the norms: {names} makes the loss lower in training than in evaluation by "
            f"{case.terms['rest']}",
            f"compare what {names} computes in the two modes",
        )


def _in_evaluation(case: Case) -> Iterator[Finding]:
    seen = case.seen
    if seen.left_in_training and (seen.is_random or seen.moved or seen.mixes):
        return
    if seen.is_random:
        yield Finding(
            "random_in_evaluation",
            "fault",
            "two forwards of one batch in evaluation mode differ: something draws at random",
            "pass training=self.training to functional dropout",
        )
    if seen.moved:
        yield Finding(
            "moved_in_evaluation",
            "fault",
            f"a forward in evaluation mode changes {_list(seen.moved)}",
            "update buffers only if self.training",
        )
    if seen.mixes and not seen.without_averages and not seen.unknown:
        yield Finding(
            "mixes_in_evaluation",
            "fault",
            "in evaluation mode the output of a sample depends on the other samples of its batch, "
            "through no norm found here: batch statistics in a function (batch_norm with "
            "training=True), or in a module that is not registered (in a plain list)",
            "use nn.BatchNorm modules, and nn.ModuleList in place of a list",
        )


def _eps(case: Case) -> Iterator[Finding]:
    seen = case.seen
    if any(row.never_updated == row.channels for _, row in _active(case)):
        return
    if case.better_eps is not None:
        factor, gain = case.better_eps
        eps = float(seen.sites[0].norm.eps)
        yield Finding(
            "eps",
            "fault",
            f"with eps={eps * factor:g} in place of {eps:g} the evaluation loss is lower by "
            f"{gain:.4f}, and running averages fit: the network was probably trained with another "
            "eps, which a state_dict does not hold",
            "set the eps of training on every norm after building the network",
        )
    large = [(s, r) for s, r in _active(case) if _median_var_over_eps(case, s) < 1]
    if large:
        site = large[0][0]
        yield Finding(
            "large_eps",
            "note",
            f"eps={float(site.norm.eps):g} exceeds the variance of most channels at "
            f"{_names([s for s, _ in large])}, so it decides the scale of their outputs",
            "scale the inputs of these norms, or train with a smaller eps",
            tuple(s.name for s, _ in large),
        )


def _channels(case: Case) -> Iterator[Finding]:
    dead = [
        (s, r)
        for s, r in _active(case)
        if r.dead > MANY * r.channels and _median_var_over_eps(case, s) >= 1
    ]
    if dead:
        site, row = max(dead, key=lambda pair: pair[1].dead / pair[1].channels)
        yield Finding(
            "dead_channels",
            "note",
            f"{row.dead} of {row.channels} channels at {site.name} are constant (variance below "
            f"{DEAD:g} eps)"
            + (f", and channels of {len(dead) - 1} more sites" if dead[1:] else ""),
            "check the layer before for dead units; a lower learning rate or another "
            "initialisation avoids them",
            tuple(s.name for s, _ in dead),
        )
    partial = [(s, r) for s, r in _active(case) if 0 < r.never_updated < r.channels]
    if partial:
        site, row = partial[0]
        yield Finding(
            "channels_never_updated",
            "fault" if case.costs("averages") else "note",
            f"{row.never_updated} of {row.channels} channels at {_names([s for s, _ in partial])} "
            "have averages at their initial values (mean 0, variance 1), the others not: they were "
            "added, or loaded from a narrower network",
            RECOMPUTE,
            tuple(s.name for s, _ in partial),
        )


def _without_averages(case: Case) -> Iterator[Finding]:
    sites = case.seen.without_averages
    if sites:
        yield Finding(
            "without_averages",
            "note",
            f"{_names(sites)} keep no running averages (track_running_stats=False), so evaluation "
            "uses the statistics of its own batches: results depend on their size and order",
            "evaluate at the batch size of training, shuffled; or set track_running_stats=True and "
            "recompute",
            _paths(sites),
        )


def _updates(case: Case) -> Iterator[Finding]:
    updates = case.seen.updates
    twice = [s for s in case.seen.active if updates.backward.get(s.name)]
    if twice:
        momentum = twice[0].momentum
        effect = (
            f", so momentum {momentum:g} acts as {1 - (1 - momentum) ** 2:.3g}" if momentum else ""
        )
        yield Finding(
            "updated_twice",
            "note",
            f"the backward pass runs {_names(twice)} again (activation checkpointing), which moves "
            f"their averages twice per step{effect}",
            "set momentum to 1 - sqrt(1 - momentum), or leave norms out of the checkpointed part",
            _paths(twice),
        )
    shared = [s for s in case.seen.active if updates.forward.get(s.name, 0) > 1]
    if shared and case.costs("averages"):
        yield Finding(
            "shared",
            "note",
            f"{_names(shared)} run several times in one forward: their averages mix all inputs, "
            "while training normalizes each by its own statistics",
            "give each use a norm of its own, or join the inputs into one batch",
            _paths(shared),
        )


def _precision(case: Case) -> Iterator[Finding]:
    sites = [
        s for s in case.seen.active if s.norm.running_var.dtype in (torch.float16, torch.bfloat16)
    ]
    if sites:
        dtype, momentum = sites[0].norm.running_var.dtype, sites[0].momentum or 0.1
        lost = torch.finfo(dtype).eps / 2 / momentum
        yield Finding(
            "half_precision",
            "note",
            f"running averages of {_names(sites)} are {str(dtype).removeprefix('torch.')}: in "
            f"training, changes below {lost:.1%} would be rounded away"
            + (", and variances above 65504 overflow" if dtype is torch.float16 else ""),
            "keep norms in float32 (module.float()) and train with autocast",
            _paths(sites),
        )


def _composition(case: Case) -> Iterator[Finding]:
    seen = case.seen
    if seen.sample_spread is None or len(seen.sizes) < 4:
        return
    site = seen.sites[0]
    means = torch.stack([batch.mean for batch in seen.moments[site] if batch is not None])
    expected = seen.sample_spread.mean(dim=0) / (sum(seen.sizes) / len(seen.sizes))
    ratios = (means.var(dim=0) / expected)[expected > 0]
    least = stats.chi2.isf(CHANCE, len(means) - 1) / (len(means) - 1)
    if len(ratios) and float(ratios.median()) > max(2.0, least):
        yield Finding(
            "composition",
            "note",
            f"batches differ {float(ratios.median()):.2g} times as much (variance of means at "
            f"{site.name}) as batches of random samples would: they are sorted or related",
            "diagnose with batches as in training; if they are, shuffle the training data",
            (site.name,),
        )


def _other_inputs(case: Case) -> Iterator[Finding]:
    ours, theirs = (case.seen.inputs.get(k, {}) for k in ("batches", "evaluation_batches"))
    if not ours or not theirs:
        return
    shift = abs(theirs["mean"] - ours["mean"])
    ratio = theirs["std"] / ours["std"] if ours["std"] else 1.0
    if shift > 0.5 * ours["std"] or not 0.5 <= ratio <= 2:
        yield Finding(
            "other_inputs",
            "fault",
            f"inputs of the evaluation batches have mean {theirs['mean']:.3g} and standard "
            f"deviation {theirs['std']:.3g}, those of the batches {ours['mean']:.3g} and "
            f"{ours['std']:.3g}",
            "preprocess both alike: the same scaling, mean and standard deviation",
        )


def _unknown(case: Case) -> Iterator[Finding]:
    if case.seen.unknown and case.costs("not_analysed"):
        yield Finding(
            "not_analysed",
            "note",
            f"{_list(case.seen.unknown)} keep running state of a kind that is not known here, and "
            f"carry {case.terms['not_analysed']}",
            "compare their training and evaluation forwards on one batch",
            tuple(case.seen.unknown),
        )


# --- Words ---------------------------------------------------------------------------------------


def _active(case: Case) -> Iterator[tuple[NormSite, SiteRow]]:
    rows: dict[str, SiteRow] = {row.name: row for row in case.rows}
    yield from ((site, rows[site.name]) for site in case.seen.active)


def _fixed(case: Case) -> Iterator[tuple[NormSite, SiteRow]]:
    rows: dict[str, SiteRow] = {row.name: row for row in case.rows}
    yield from ((site, rows[site.name]) for site in case.seen.fixed)


def _far(row: SiteRow) -> float:
    return max(row.mean_distance or 0, row.var_distance or 0)


def _noise(row: SiteRow, num_batches: int) -> float:
    """The standard deviation of running minus precise, in those between batches."""
    momentum = row.momentum or 0
    return math.sqrt(momentum / (2 - momentum) + 1 / num_batches)


def _averaged_over_precise(site: NormSite, batches: Sequence[Moments | None]) -> float:
    """Median over channels of the mean of batch variances over the variance of all batches."""
    present = [batch for batch in batches if batch is not None]
    precise = pool_batches(site, present).var
    averaged = torch.stack([averaged_var(batch) for batch in present]).mean(dim=0)
    ratios = (averaged / precise)[precise > 0]
    return float(ratios.median()) if len(ratios) else 1.0


def _median_var_over_eps(case: Case, site: NormSite) -> float:
    """Of the channels that are not constant, if there are any."""
    present = [batch for batch in case.seen.moments[site] if batch is not None]
    eps = float(site.norm.eps)
    var = pool_batches(site, present).var
    live = var[var > DEAD * eps]
    return float((live if len(live) else var).median()) / eps if eps > 0 else math.inf


def _group_sizes(case: Case) -> str:
    largest = max(case.seen.sizes)
    sizes = sorted({site.group_size(largest) for site in case.seen.active})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _sizes(case: Case) -> str:
    return _group_sizes(case)


def _inputs(case: Case) -> str:
    numbers = case.seen.inputs.get("batches")
    if not numbers:
        return ""
    return (
        f" (here mean {numbers['mean']:.3g}, standard deviation {numbers['std']:.3g}, from "
        f"{numbers['min']:.3g} to {numbers['max']:.3g})"
    )


def _paths(sites: Sequence[NormSite]) -> tuple[str, ...]:
    return tuple(site.name for site in sites)


def _names(sites: Sequence[NormSite]) -> str:
    return _list([site.name for site in sites])


def _list(names: Sequence[str], most: int = 3) -> str:
    shown, more = ", ".join(names[:most]), len(names) - most
    return f"{shown} and {more} more" if more > 0 else shown
