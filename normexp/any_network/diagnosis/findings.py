"""Tries the remedies of all causes on copies, and keeps those that lower the loss.

A cause is a finding if its remedy lowers the loss in evaluation mode beyond the tolerance and
chance. Simple remedies come first, and a later one must gain beyond those before it, so no two
findings claim one cost. Causes whose remedies gain only together are one finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from normexp.any_network.diagnosis.causes import (
    RECOMPUTE,
    Cause,
    find_causes,
    gain,
    joined,
    left_in_training,
    losses_by_size,
    mended,
    states,
)
from normexp.any_network.diagnosis.measure import Measurement
from normexp.any_network.diagnosis.parts import SILENT
from normexp.any_network.diagnosis.result import ROOT, Finding, LossEstimate
from normexp.words import name_some


def find(measured: Measurement) -> list[Finding]:
    """All findings: values that are not finite, then by cost, then findings without a cost."""
    if not math.isfinite(measured.gap.value):
        return [_not_finite(measured)]
    findings = [*_tried(measured, [*find_causes(measured)])]
    findings += _evaluation(measured, findings)
    return sorted(findings, key=lambda f: -f.cost.value if f.cost else math.inf)


def _tried(measured: Measurement, causes: list[Cause]) -> Iterator[Finding]:
    """The findings among causes, simple remedies first."""
    found = _found_alone(measured, causes)
    left = [cause for cause in causes if cause.is_mistake and cause not in found]
    left.reverse()  # of two that do the same, the simple one is kept
    needed = _without_idle(measured, left, first=found)[::-1]
    if needed:
        if not measured.costs(gain(measured, [], needed)):  # they gain only after those found
            needed, found = [*found, *needed], []
        found.append(joined(needed))
    for index, cause in enumerate(found):
        cost = _cost(measured, found[:index], cause)
        if measured.costs(cost):
            yield cause.finding(cost)


def _found_alone(measured: Measurement, causes: list[Cause]) -> list[Cause]:
    """Those whose remedy gains by itself and beyond the remedies of those before."""
    found: list[Cause] = []
    for cause in causes:
        if not _counts(measured, cause, _cost(measured, found, cause)):
            continue
        found.append(cause)
        if cause.is_mistake:  # it may be all that was wrong
            found = _without_idle(measured, found)
    return found


def _counts(measured: Measurement, cause: Cause, cost: LossEstimate) -> bool:
    """True for a cost; by design, if it is a tenth of the loss and of the largest term."""
    largest = max(abs(term.value) for term in measured.terms.values())
    least = 0.0 if cause.is_mistake else 0.1 * max(largest, measured.training.value)
    return measured.costs(cost) and cost.value >= least


def _without_idle(
    measured: Measurement, causes: list[Cause], first: Sequence[Cause] = ()
) -> list[Cause]:
    """Leaves out causes whose remedy gains nothing after all other remedies.

    Args:
        first: causes whose remedies come before.
    """
    needed = causes
    for cause in causes:
        others = [other for other in needed if other is not cause]
        if not measured.costs(gain(measured, [*first, *others], [cause])):
            needed = others
    return needed


def _cost(measured: Measurement, found: list[Cause], cause: Cause) -> LossEstimate:
    """What the gap loses by a remedy alone, or after those found, if that is less."""
    gains = gain(measured, [], [cause]), gain(measured, found, [cause])
    return min(gains, key=lambda estimate: estimate.value)


# --- What has no cost ----------------------------------------------------------------------------


def _not_finite(measured: Measurement) -> Finding:
    causes = [*states(measured, measured.evaluated)]
    for cause in causes:
        if cause.kind == "not_finite":
            after = mended(measured.evaluated, causes)
            helps = math.isfinite(measured.mean(after).value)
            remedy = RECOMPUTE if helps else "untried: find the batch whose values were not finite"
            return replace(cause, remedy=remedy).finding(None)
    return Finding(
        "not_finite",
        "the loss is not finite, so the gap has no terms",
        "untried: look for the first batch whose loss is NaN or infinite",
    )


def _evaluation(measured: Measurement, findings: Sequence[Finding]) -> Iterator[Finding]:
    """An evaluation whose results depend on more than the sample."""
    parts = measured.parts
    depends, varies = measured.depends_on_batch, parts.varies(parts.evaluation)
    for cause in left_in_training(measured):
        if depends or varies:
            depends, varies = parts.mixes("", SILENT), parts.varies(SILENT)
            is_told = any(finding.kind == cause.kind for finding in findings)
            if not (depends or varies or is_told):
                yield cause.finding(None)
    if depends:
        places = tuple(path or ROOT for path in parts.mixing(parts.evaluation))
        yield Finding(
            "depends_on_batch",
            "in evaluation the output of a sample depends on the other samples of its batch, at "
            f"{name_some(places)}{losses_by_size(measured)}",
            "untried: use running averages in evaluation, or evaluate in shuffled batches of one "
            "size",
            places,
        )
    if varies:
        yield Finding(
            "varies_in_evaluation",
            f"in evaluation mode {varies}",
            "untried: update state only if self.training, and pass training=self.training to "
            "dropout",
        )
