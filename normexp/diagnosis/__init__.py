"""Why does a trained network evaluate worse than it trains? See `normexp.diagnose`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.data import Dataset, IterableDataset

from normexp.checks.network import name_some
from normexp.diagnosis.findings import ROOT, Case, find, row_of
from normexp.diagnosis.measure import Measurement
from normexp.diagnosis.network import FORM, Loss, read_batches, unchanged_draws
from normexp.diagnosis.result import TERMS, Diagnosis, Estimate, Finding, SiteRow
from normexp.errors import UserError

SHOWN_TERMS = 3

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
    if isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise UserError(
            "batches is a Dataset, which holds single samples; pass "
            "torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    if isinstance(loss, type):
        raise UserError(f"loss={loss.__name__} is a class; pass an instance, {loss.__name__}()")
    if not isinstance(batches, Iterable):
        raise UserError(f"batches is a {type(batches).__name__}, must be a DataLoader; {FORM}")
    with unchanged_draws(model):
        read = read_batches(batches, max_batches, model)
        return _conclude(Measurement(model, read, loss), tolerance)


def decompose(model: nn.Module, batches: Iterable[Any], loss: Loss) -> dict[str, float]:
    """The loss in training mode, each of the `TERMS`, and the loss in evaluation mode, by name."""
    with unchanged_draws(model):
        seen = Measurement(model, read_batches(batches, None, model), loss)
    training, evaluation = (seen.mean(seen.losses[name]) for name in ("training", "evaluation"))
    terms = {name: term.value for name, term in seen.terms.items()}
    return {"training": training.value, **terms, "evaluation": evaluation.value}


def _conclude(seen: Measurement, tolerance: float | None) -> Diagnosis:
    training, evaluation = (seen.mean(seen.losses[name]) for name in ("training", "evaluation"))
    gap = seen.term("training", "evaluation")
    rows = {
        path: row_of(site, seen.parts.momentum(path, site), seen.moments[path])
        for path, site in seen.active.items()
    }
    if tolerance is None:
        tolerance = max(0.01, 0.01 * training.value)
    case = Case(seen, gap, rows, tolerance, seen.loss_at_size())
    findings = find(case)
    return Diagnosis(
        summary=" ".join(_sentences(case, training, evaluation, findings)),
        training=training.value,
        evaluation=evaluation.value,
        gap=gap,
        terms=seen.terms,
        findings=findings,
        sites=tuple(rows.values()),
        loss_at_size=case.loss_at_size,
        not_analysed=tuple(path or ROOT for path in seen.unknown),
    )


def _sentences(
    case: Case, training: Estimate, evaluation: Estimate, findings: Sequence[Finding]
) -> Iterator[str]:
    """The gap, the rows of the table that exceed chance, and findings that are no row."""
    seen = case.seen
    yield (
        f"Evaluation minus training mode: {case.gap} (loss {evaluation.value:.4f} and "
        f"{training.value:.4f}; {len(seen.sizes)} batches of {max(seen.sizes)})."
    )
    sites = {
        finding.term: f", at {name_some(finding.sites)}" for finding in findings if finding.sites
    }
    if largest := case.largest_terms[:SHOWN_TERMS]:
        rows = (f"{TERMS[name].words} {seen.terms[name]}{sites.get(name, '')}" for name in largest)
        yield f"Largest {'term' if len(largest) == 1 else 'terms'}: {'; '.join(rows)}."
    elif any(term.value or term.error for term in seen.terms.values()):
        yield f"No term exceeds chance and {case.tolerance:.2g}."
    elif not findings:
        yield "Nothing in it acts otherwise in training than in evaluation."
    for finding in findings:
        if finding.cost is None:
            yield f"{finding.cause[0].upper()}{finding.cause[1:]}."
