"""What may be wrong with a network, each with a remedy that can be tried on copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from normexp.any_network.diagnosis.measure import Measurement, Setup, Source
from normexp.any_network.diagnosis.parts import is_within
from normexp.any_network.diagnosis.result import ROOT, Finding, LossEstimate
from normexp.words import name_some

RECOMPUTE = "recompute the averages: normexp.recompute_averages(model, batches)"
STATES = {  # kind and cause
    "not finite": ("not_finite", "hold NaN or infinity, which stays in an average for ever"),
    "never updated": ("never_updated", "are at mean 0, variance 1: never moved, saved or loaded"),
}
FAR = 3.0  # standard deviations between batches
NOISE = 3.0  # times the cost of averages taken anew, up to which averages count as noisy
TURNS = 4  # in which averages are taken anew
SWITCHES = {"momentum": 0.1, "track_running_stats": True}  # of torch's norms, with their defaults


@dataclass(frozen=True, eq=False)
class Cause:
    """What may be wrong at the modules of some paths.

    Attributes:
        mend: the setup of an evaluation after the remedy.
        is_mistake: False for what batch norm does by design.
    """

    kind: str
    term: str
    paths: Sequence[str]
    cause: str
    remedy: str
    mend: Callable[[Setup], Setup]
    is_mistake: bool = True

    def finding(self, cost: LossEstimate | None) -> Finding:
        names = tuple(path or ROOT for path in self.paths)
        cause = self.cause.replace("{names}", name_some(names))
        return Finding(self.kind, cause, self.remedy, names, self.term, cost)


def gain(measured: Measurement, before: list[Cause], causes: list[Cause]) -> LossEstimate:
    """How much the loss falls by some remedies, after those `before`."""
    start = mended(measured.evaluated, before)
    return measured.gain(start, mended(start, causes))


def mended(setup: Setup, causes: list[Cause]) -> Setup:
    for cause in causes:
        setup = cause.mend(setup)
    return setup


def joined(causes: list[Cause]) -> Cause:
    """Causes that need each other: the remedy of one alone gains nothing."""
    if len(causes) == 1:
        return causes[0]
    return Cause(
        kind=" and ".join(cause.kind for cause in causes),
        term=causes[0].term,
        paths=[*dict.fromkeys(path for cause in causes for path in cause.paths)],
        cause="; and ".join(cause.finding(None).cause for cause in causes),
        remedy="; and ".join(dict.fromkeys(cause.remedy for cause in causes)),
        mend=lambda setup: mended(setup, causes),
    )


def find_causes(measured: Measurement) -> Iterator[Cause]:
    """Causes that fit what was measured, those with simple remedies first."""
    in_training = [*left_in_training(measured)]
    acting = [*_acting_in_training(measured)]
    yield from in_training
    if measured.active or measured.unknown:
        yield _averages(measured, mended(measured.evaluated, [*in_training, *acting]))
    yield from _used_twice(measured)
    yield from acting
    yield from _statistics(measured)


def left_in_training(measured: Measurement) -> Iterator[Cause]:
    training = measured.parts.evaluation.training
    if training:
        paths = [path for path in measured.parts.modules if path in training]
        yield Cause(
            "left_in_training",
            "left_in_training",
            [path for path in paths if not path or path.rpartition(".")[0] not in training],
            "in evaluation, {names} run in training mode (train() of a part was called, or ignores "
            f"its argument){losses_by_size(measured)}",
            "call eval() on the whole model last, and let overridden train(mode) pass the mode on",
            lambda setup: setup.in_training(setup.modes.training - training),
        )


def _averages(measured: Measurement, start: Setup) -> Cause:
    """Running state that should be recomputed, with what is wrong with it, as far as that costs.

    What is wrong at some sites costs what the gap still loses once all others are recomputed: a
    network broken at one site is sensitive to chance at the others.
    """
    causes = [*states(measured, start)]
    costly: list[Cause] = []
    for cause in causes if len(causes) > 1 else ():
        others = [other for other in causes if other is not cause]
        if measured.costs(gain(measured, others, [cause])):
            costly.append(cause)
    return replace(joined(costly or causes), mend=lambda setup: mended(setup, causes))


def states(measured: Measurement, start: Setup) -> Iterator[Cause]:
    """Running state of all kinds, grouped by what is wrong with it.

    Args:
        start: an evaluation after the remedies of all that hides what averages cost.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for path, row in measured.rows.items():
        groups[row.state].append(path)
    for state, paths in groups.items():
        sources = dict.fromkeys(paths, Source())
        cause = Cause(
            "stale_averages",
            "averages",
            paths,
            "",
            RECOMPUTE,
            lambda setup, sources=sources: setup.averaging(sources),
        )
        yield _explained(measured, start, state, cause)
    if measured.unknown:
        yield Cause(
            "not_analysed",
            "not_analysed",
            [*measured.unknown],
            "running state of {names}, which is no mean and variance of an input, does not fit "
            "these samples",
            RECOMPUTE,
            lambda setup: replace(setup, moves_state=True),
        )


def _farthest(measured: Measurement, paths: Sequence[str]) -> list[str]:
    """Sites whose averages are far from those of batches, in units of the spread of batches."""
    far = {path: measured.rows[path].largest_distance for path in paths}
    least = min(FAR, max(far.values()) / 3)
    return sorted((path for path in paths if far[path] >= least), key=lambda path: -far[path])


def _explained(measured: Measurement, start: Setup, state: str, cause: Cause) -> Cause:
    """Says why averages in a state have to be recomputed."""
    if state == "averaged":
        cause = replace(cause, paths=_farthest(measured, cause.paths))
        return _explained_by_trial(measured, start, cause)
    if state == "held":
        held = "training does not move the running averages of {names}"
        sites = [measured.active[path] for path in cause.paths]
        for name, value in SWITCHES.items():
            if all(measured.parts.moved_by_training(site, **{name: value}) for site in sites):
                held += f": {name} is {getattr(sites[0].norm, name)}"
                remedy = f"{RECOMPUTE}; set {name}={value} before you train on"
                return replace(cause, cause=held, remedy=remedy)
        return replace(cause, cause=held)
    if state == "initial":
        row = max((measured.rows[p] for p in cause.paths), key=lambda row: row.initial_share or 0)
        initial = (
            f"running averages of {{names}} are {row.initial_share:.1%} initial values (mean 0, "
            f"variance 1): {row.updates} updates at momentum {row.momentum:g}"
        )
        return replace(cause, kind="initial_values", cause=initial)
    kind, said = STATES[state]
    return replace(cause, kind=kind, cause=f"running averages of {{names}} {said}")


def _explained_by_trial(measured: Measurement, start: Setup, cause: Cause) -> Cause:
    """Tells averages behind dropout, and noisy ones, from those that do not belong to the weights.

    By trying the moments that training sees, pooled, and averaged in turn as training does.
    """

    def loss(**source: Any) -> float:
        sources = dict.fromkeys(measured.active, Source(**source))
        return measured.mean(start.averaging(sources)).value

    now, precise, noisy = measured.mean(start).value, loss(), loss(behind_dropout=True)
    if now - precise < measured.tolerance:
        return _stale(measured, cause)  # neither explains anything
    num_batches = len(measured.sizes)
    turns = range(0, num_batches, max(1, num_batches // TURNS))
    in_turn = max(loss(behind_dropout=True, first=turn) for turn in turns)
    if noisy - precise > now - noisy:
        return replace(
            cause,
            kind="dropout_shift",
            term="dropout_shift",
            cause="the averages of {names} were taken behind dropout, which evaluation leaves out "
            "(arXiv:1801.05134)",
            remedy=f"{RECOMPUTE}, which leaves dropout out too",
            is_mistake=False,
        )
    if now - noisy < NOISE * (in_turn - noisy):
        return replace(
            cause,
            kind="noisy_averages",
            cause="running averages of {names} are noisy: taken anew in training mode, over "
            f"batches of {measured.group_size} at their momentum, they would still cost "
            f"{in_turn - noisy:.2g}",
            remedy=f"pool the moments of many batches (precise statistics): {RECOMPUTE}",
            is_mistake=False,
        )
    return _stale(measured, cause)


def _stale(measured: Measurement, cause: Cause) -> Cause:
    rows = measured.rows.values()
    typical = median(max(row.mean_distance, row.var_distance) for row in rows)
    farthest = max(row.largest_distance for row in rows)
    return replace(
        cause,
        cause="running averages do not belong to these weights and inputs: a typical channel is "
        f"{typical:.2g} standard deviations between batches off, the farthest {farthest:.2g}, most "
        "at {names}. Either the weights have moved on, or the preprocessing is another",
        remedy=f"if the inputs are those of training, {RECOMPUTE}; else mend the preprocessing",
    )


def _used_twice(measured: Measurement) -> Iterator[Cause]:
    sources = {path: measured.source(path) for path in measured.active}
    sources = {path: source for path, source in sources.items() if source.by_call}
    if sources:
        yield Cause(
            "used_twice",
            "averages",
            [*sources],
            "{names} run several times in one forward, and their averages mix all of its inputs",
            "give each use a norm of its own, and recompute the averages; untried: join the inputs "
            "into one batch",
            lambda setup: setup.averaging(sources),
        )


def _acting_in_training(measured: Measurement) -> Iterator[Cause]:
    if not measured.costs(measured.terms["rest"]):
        return
    parts, others = measured.parts, (*measured.active, *measured.unknown)
    outside = [path for path in parts.calls if not is_within(path, *others)]
    acting = [path for path in outside if parts.acts_by_own_mode(path)]
    if acting:
        yield Cause(
            "rest",
            "rest",
            acting,
            "{names} give other results in evaluation than in training, and a higher loss",
            "compute there in evaluation what training computes, or call train() on these modules "
            "after eval()",
            lambda setup: setup.in_training(setup.modes.training.union(acting)),
        )


def _statistics(measured: Measurement) -> Iterator[Cause]:
    """Statistics of training that no averages replace."""
    paths, norms = [*measured.active], measured.parts.training.training & measured.norms
    sources = {path: measured.source(path) for path in paths}
    if measured.costs(measured.terms["own_share"]):
        yield Cause(
            "own_share",
            "own_share",
            paths,
            f"in training alone, each sample is part (1 / {measured.group_size}) of the statistics "
            "that normalize it (arXiv:1904.06031)",
            "let it be so in evaluation: "
            'model = normexp.replace_norms(model, "eval_norm", inputs), '
            "then normexp.recompute_averages(model, batches); untried: train with group norm",
            lambda setup: replace(setup.averaging(sources), own_share=True),
            is_mistake=False,
        )
    if measured.costs(measured.terms["small_batch"]):
        yield Cause(
            "small_batch",
            "small_batch",
            paths,
            "the network needs the statistics of its current batch: are its samples related "
            "(sorted)?",
            "evaluate in batches as those of training, with train() of these norms after eval(); "
            "untried: train with shuffled samples, statistics of more samples, or group norm",
            lambda setup: setup.in_training(setup.modes.training | norms),
            is_mistake=False,
        )


def losses_by_size(measured: Measurement) -> str:
    """The losses of an evaluation at both sizes of its batches, if it depends on them."""
    usual = measured.evaluation
    for size, loss in measured.loss_at_size.items():
        batches = "for single samples" if size == 1 else f"in batches of {size}"
        return (
            ", so results depend on the batch: "
            f"loss {loss.value:.3g} ± {loss.error:.2g} {batches}, "
            f"{usual.value:.3g} ± {usual.error:.2g} in batches of {max(measured.sizes)}"
        )
    return ""
