"""Why does a trained network evaluate worse than it trains? See `normexp.diagnose`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.data import Dataset, IterableDataset

from normexp.checks.network import name_some
from normexp.diagnosis.findings import Case, find, row_of
from normexp.diagnosis.measure import Measurement
from normexp.diagnosis.network import FORM, Loss, read_batches, unchanged
from normexp.diagnosis.result import TERMS, Diagnosis, Estimate, Finding, SiteRow
from normexp.errors import UserError

__all__ = ["TERMS", "Diagnosis", "Estimate", "Finding", "SiteRow", "decompose", "diagnose"]


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
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
    if not isinstance(batches, Iterable):
        raise UserError(f"batches is a {type(batches).__name__}, must be a DataLoader; {FORM}")
    with unchanged(model):
        return _conclude(
            Measurement(model, read_batches(batches, max_batches, model), loss), tolerance
        )


def decompose(model: nn.Module, batches: Iterable[Any], loss: Loss) -> dict[str, float]:
    """The loss in training mode, each of the `TERMS`, and the loss in evaluation mode, by name."""
    with unchanged(model):
        seen = Measurement(model, read_batches(batches, None, model), loss)
    training, evaluation = (seen.mean(seen.losses[name]) for name in ("training", "evaluation"))
    terms = {name: term.value for name, term in seen.terms.items()}
    return {"training": training.value, **terms, "evaluation": evaluation.value}


def _conclude(seen: Measurement, tolerance: float | None) -> Diagnosis:
    training, evaluation = (seen.mean(seen.losses[name]) for name in ("training", "evaluation"))
    gap = seen.term("training", "evaluation")
    rows = [row_of(site, seen.moments[site]) for site in seen.active]
    if tolerance is None:
        tolerance = max(0.01, 0.01 * training.value)
    findings = find(Case(seen, gap, rows, tolerance))
    summary = (
        f"Evaluation minus training mode: {gap} (loss {evaluation.value:.4f} and "
        f"{training.value:.4f}; {len(seen.sizes)} batches of {max(seen.sizes)}). "
    )
    first = findings[0] if findings else None
    if first and first.term and first.cost:
        at = f", at {name_some(first.sites)}" if first.sites else ""
        summary += f"Largest term: {TERMS[first.term].words} {first.cost}{at}."
    elif first:
        summary += f"{first.cause[0].upper()}{first.cause[1:]}."
    elif seen.active or seen.without_averages or seen.unknown:
        summary += f"No term exceeds chance and {tolerance:.2g}."
    else:
        summary += "No norm with running averages or batch statistics was found."
    return Diagnosis(
        summary=summary,
        training=training.value,
        evaluation=evaluation.value,
        gap=gap,
        terms=seen.terms,
        findings=findings,
        sites=tuple(rows),
        loss_at_size=seen.loss_at_size(),
        not_analysed=tuple(seen.unknown),
    )
