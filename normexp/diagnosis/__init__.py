"""Why does a trained network evaluate worse than it trains? See `normexp.diagnose`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pytorch_lightning.utilities.seed import isolate_rng
from torch import nn

from normexp.diagnosis.findings import find
from normexp.diagnosis.measure import Measurement
from normexp.diagnosis.network import FORM, Loss, read_batches
from normexp.diagnosis.result import ROOT, TERMS, Diagnosis, Estimate, Finding, SiteRow
from normexp.errors import UserError
from normexp.words import name_some

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
    model = getattr(model, "_orig_mod", model)  # inside torch.compile
    if isinstance(loss, type):
        raise UserError(f"loss={loss.__name__} is a class; pass an instance, {loss.__name__}()")
    if not isinstance(batches, Iterable):
        raise UserError(
            f"batches is a {type(batches).__name__}, must be a DataLoader, as "
            f"torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True); {FORM}"
        )
    with isolate_rng():
        seen = Measurement(model, read_batches(batches, max_batches, model), loss, tolerance)
        findings = find(seen)
    return Diagnosis(
        summary=" ".join(_sentences(seen, findings)),
        training=seen.training.value,
        evaluation=seen.evaluation.value,
        gap=seen.gap,
        terms=seen.terms,
        findings=tuple(findings),
        sites=tuple(seen.rows.values()),
        loss_at_size=seen.loss_at_size,
        not_analysed=tuple(path or ROOT for path in seen.unknown),
    )


def decompose(model: nn.Module, batches: Iterable[Any], loss: Loss) -> dict[str, float]:
    """The loss in training mode, each of the `TERMS`, and the loss in evaluation mode, by name."""
    diagnosis = diagnose(model, batches, loss)
    terms = {name: term.value for name, term in diagnosis.terms.items()}
    return {"training": diagnosis.training, **terms, "evaluation": diagnosis.evaluation}


def _sentences(seen: Measurement, findings: Sequence[Finding]) -> Iterator[str]:
    """The gap, the rows of the table that exceed chance, and findings that are no row."""
    yield (
        f"Evaluation minus training mode: {seen.gap} (loss {seen.evaluation.value:.4f} and "
        f"{seen.training.value:.4f}; {len(seen.sizes)} batches of {max(seen.sizes)})."
    )
    places = {f.term: f", at {name_some(f.sites)}" for f in findings if f.sites}
    largest = [name for name, term in seen.terms.items() if seen.exceeds(term)]
    largest.sort(key=lambda name: -abs(seen.terms[name].value))
    rows = [f"{TERMS[name]} {seen.terms[name]}{places.get(name, '')}" for name in largest]
    if rows:
        yield f"Largest term{'s' if len(rows) > 1 else ''}: {'; '.join(rows)}."
    elif not findings:
        yield f"No term exceeds chance and {seen.tolerance:.2g}."
    for finding in findings:
        if finding.cost is None:
            yield f"{finding.cause[0].upper()}{finding.cause[1:]}."
