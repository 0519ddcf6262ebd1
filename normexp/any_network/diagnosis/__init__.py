"""Why does a trained network evaluate worse than it trains? See `normexp.diagnose`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from normexp.any_network.diagnosis.batches import Loss, read_batches
from normexp.any_network.diagnosis.findings import find
from normexp.any_network.diagnosis.measure import Measurement
from normexp.any_network.diagnosis.recompute import recompute_averages
from normexp.any_network.diagnosis.result import (
    ROOT,
    TERMS,
    Diagnosis,
    Finding,
    LossEstimate,
    SiteRow,
)
from normexp.errors import UserError
from normexp.training.batching.draws import keeping_random_state
from normexp.words import name_some

__all__ = ["TERMS", "Diagnosis", "LossEstimate", "Finding", "SiteRow"]
__all__ += ["decompose", "diagnose", "recompute_averages"]


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
    model = getattr(model, "_orig_mod", model)  # inside torch.compile
    if isinstance(loss, type):
        raise UserError(f"loss={loss.__name__} is a class; pass an instance, {loss.__name__}()")
    with keeping_random_state(model):
        measured = Measurement(model, read_batches(batches, max_batches, model), loss, tolerance)
        findings = find(measured)
    return Diagnosis(
        summary=" ".join(_sentences(measured, findings)),
        training=measured.training.value,
        evaluation=measured.evaluation.value,
        gap=measured.gap,
        terms=measured.terms,
        findings=tuple(findings),
        sites=tuple(measured.rows.values()),
        loss_at_size=measured.loss_at_size,
        not_analysed=tuple(path or ROOT for path in measured.unknown),
    )


def decompose(model: nn.Module, batches: Iterable[Any], loss: Loss) -> dict[str, float]:
    """The loss in training mode, each of the `TERMS`, and the loss in evaluation mode, by name."""
    diagnosis = diagnose(model, batches, loss)
    terms = {name: term.value for name, term in diagnosis.terms.items()}
    return {"training": diagnosis.training, **terms, "evaluation": diagnosis.evaluation}


def _sentences(measured: Measurement, findings: Sequence[Finding]) -> Iterator[str]:
    """The gap, the terms that exceed chance, and findings that explain no term."""
    yield (
        f"Evaluation minus training mode: {measured.gap} (loss {measured.evaluation.value:.4f} and "
        f"{measured.training.value:.4f}; {len(measured.sizes)} batches of {max(measured.sizes)})."
    )
    places = {f.term: f", at {name_some(f.sites)}" for f in findings if f.sites}
    largest = [name for name, term in measured.terms.items() if measured.exceeds(term)]
    largest.sort(key=lambda name: -abs(measured.terms[name].value))
    terms = [f"{TERMS[name]} {measured.terms[name]}{places.get(name, '')}" for name in largest]
    if terms:
        yield f"Largest term{'s' if len(terms) > 1 else ''} beyond chance: {'; '.join(terms)}."
    elif not findings:
        yield f"No term is both beyond chance and above {measured.tolerance:.2g}."
    for finding in findings:
        if finding.cost is None:
            yield f"{finding.cause[0].upper()}{finding.cause[1:]}."
