"""Why does a trained network evaluate worse than it trains? See `normexp.diagnose`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from normexp.diagnosis.examination import (
    Examination,
    Losses,
    examine_network,
    measure_stages,
    standard_error,
)
from normexp.diagnosis.findings import Case, find, row_of
from normexp.diagnosis.network import Loss, read_batches, unchanged
from normexp.diagnosis.result import (
    TERMS,
    Diagnosis,
    Estimate,
    Finding,
    SiteRow,
    cancelling,
)
from normexp.errors import UserError

__all__ = ["Diagnosis", "Estimate", "Finding", "SiteRow", "cancelling", "decompose", "diagnose"]


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    evaluation_batches: Iterable[Any] | None = None,
    max_batches: int | None = None,
    tolerance: float | None = None,
) -> Diagnosis:
    """See `normexp.diagnose`."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model={model!r}: must be an nn.Module, as normexp.load(...) returns")
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise UserError(
            "batches is a Dataset, which holds single samples; pass "
            "torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    if isinstance(loss, type):
        raise UserError(f"loss={loss.__name__} is a class; pass an instance, {loss.__name__}()")
    if isinstance(batches, Tensor) or not (
        isinstance(batches, Iterable) or hasattr(batches, "__getitem__")
    ):
        raise UserError(
            f"batches is a {type(batches).__name__}, must be pairs (inputs, targets), as a "
            "DataLoader has"
        )
    if tolerance is not None and not tolerance >= 0:
        raise UserError(f"tolerance={tolerance}: must be a number, 0 or more, or None")
    with unchanged(model):
        read = read_batches(batches, max_batches, model)
        others = read_batches(evaluation_batches, max_batches, model) if evaluation_batches else []
        seen = examine_network(model, read, others, loss)
    return _conclude(seen, tolerance)


def decompose(model: nn.Module, batches: Iterable[Any], loss: Loss) -> dict[str, float]:
    """The loss in training mode, each of the `TERMS`, and the loss in evaluation mode, by name."""
    with unchanged(model):
        read = list(batches)
        seen = measure_stages(model, read_batches(read, len(read), model), loss)
    terms = {n: _mean(seen, last) - _mean(seen, first) for n, (first, last, _) in TERMS.items()}
    training, evaluation = _mean(seen, "training"), _mean(seen, "evaluation")
    return {"training": training, **terms, "evaluation": evaluation}


def _mean(seen: Examination, stage: str) -> float:
    return float(np.average(seen.losses[stage], weights=np.array(seen.sizes, dtype=float)))


def _conclude(seen: Examination, tolerance: float | None) -> Diagnosis:
    weights = np.array(seen.sizes, dtype=float)
    losses = seen.losses

    def estimate(values: Losses) -> Estimate:
        return Estimate(float(np.average(values, weights=weights)), standard_error(values, weights))

    training, evaluation = (estimate(losses[name]) for name in ("training", "evaluation"))
    gap = estimate(losses["evaluation"] - losses["training"])
    terms = {
        name: estimate(losses[last] - losses[first]) for name, (first, last, _) in TERMS.items()
    }
    rows = [
        row_of(site, seen.moments.get(site, []), is_active=site in seen.active)
        for site in seen.sites
    ]
    if tolerance is None:
        tolerance = max(0.01, 0.05 * training.value)
    case = Case(seen, terms, gap, rows, tolerance)
    other = None
    if seen.evaluation is not None:
        theirs = np.array(seen.evaluation_sizes, dtype=float)
        mean = float(np.average(seen.evaluation, weights=theirs))
        error = np.hypot(standard_error(seen.evaluation, theirs), evaluation.error)
        other = Estimate(mean - evaluation.value, float(error))
    summary = _summary(case, training, evaluation)
    if other is not None and case.counts(other):
        summary += f" Other data cost {other}: overfitting, or other inputs; no norm explains it."
    return Diagnosis(
        summary=summary,
        training=training.value,
        evaluation=evaluation.value,
        gap=gap,
        terms=terms,
        findings=find(case),
        sites=tuple(rows),
        loss_at_size={k: Estimate(*values) for k, values in seen.loss_at_size.items()},
        acts_in_training=seen.acts_in_training,
        not_analysed=tuple(seen.unknown),
        num_batches=len(seen.sizes),
        batch_size=max(seen.sizes),
        inputs=seen.inputs,
        tolerance=tolerance,
        other_data=other,
        notes=tuple(_notes(case)),
    )


SHORT = {
    "rest": "dropout and other modules",
    "small_batch": "statistics of few samples",
    "own_share": "own share",
    "dropout_shift": "statistics behind dropout",
    "averages": "running averages",
    "not_analysed": "norms not analysed",
    "left_in_training": "modules left in training mode",
}


def _summary(case: Case, training: Estimate, evaluation: Estimate) -> str:
    count, size = len(case.seen.sizes), max(case.seen.sizes)
    on = f"on {count} batches of {size}"
    gap = case.gap
    if not math.isfinite(case.gap.value):
        names = [
            n
            for n, e in (("training", training), ("evaluation", evaluation))
            if not math.isfinite(e.value)
        ]
        return f"The loss is not finite in {' and '.join(names)} mode {on}."
    losses = (
        f"loss {training.value:.4f} in training mode, {evaluation.value:.4f} in evaluation mode"
    )
    if case.has_gap:
        carried = [name for name in case.terms if case.carries(name)]
    else:  # those that have a remedy of their own
        carried = [name for name in ("averages", "dropout_shift") if case.costs(name)]
    carried.sort(key=lambda name: -case.terms[name].value)
    causes = ", ".join(f"{SHORT[name]} {case.terms[name]}" for name in carried)
    if case.has_gap:
        why = f". Carried by {causes}" if causes else ", with no single cause"
        return f"Evaluation mode costs {case.gap} {on} ({losses}){why}."
    if causes:
        return (
            f"Evaluation mode costs no more than training mode {on} ({losses}), but would cost "
            f"less without {causes}."
        )
    if abs(gap.value) <= case.tolerance:
        return f"No gap above {case.tolerance:.2g} between the modes {on} ({losses})."
    if gap.value > 0:
        return f"Evaluation mode costs {gap} {on} ({losses}), which may be chance."
    chance = "" if case.counts(Estimate(-gap.value, gap.error)) else ", which may be chance"
    better = f"{-gap.value:.4f} ± {gap.error:.4f}"
    return f"Evaluation mode is better by {better} {on} ({losses}){chance}."


def _notes(case: Case) -> list[str]:
    seen, notes = case.seen, []
    uncertain = 2 * case.gap.error
    if uncertain > max(case.tolerance, 0.1 * abs(case.gap.value)):
        notes.append(
            f"The gap is known to ± {uncertain:.2g} (two standard errors), the tolerance is "
            f"{case.tolerance:.2g}: more or larger batches, max_batches=..., would tell more."
        )
    if words := cancelling([term.value for term in case.terms.values()]):
        notes.append(f"{words[0].upper()}{words[1:]}.")
    if not (seen.sites or seen.without_averages or seen.unknown):
        notes.append("No norm with running averages or batch statistics was found.")
    if seen.unknown:
        notes.append(f"Not analysed, running state of another kind: {', '.join(seen.unknown)}.")
    if seen.unused:
        names = ", ".join(site.name for site in seen.unused)
        notes.append(f"Not called by the forward: {names}.")
    if seen.fixed:
        notes.append(f"{len(seen.fixed)} norms use fixed statistics in both modes.")
    if seen.updates.problem:
        notes.append(f"One training step could not be examined: {seen.updates.problem}.")
    return notes
