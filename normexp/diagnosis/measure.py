"""Measures the loss of a network on the same samples, in stages from training to evaluation mode.

The gap is the difference between the first and the last stage, which are the user's own. Each stage
between them changes one thing, on the same batches:

    training        every module as in training, with gradients
    batch           norms as in training, every other module as in evaluation (no dropout)
    share           norms use the moments expected of a training batch that holds the sample:
                    moments of all other batches, in which the sample's own weigh 1 / batch size
    precise         norms use the moments of all other batches (arXiv:2105.07576)
    noisy_precise   these moments as training sees them, behind dropout
    running         norms use their running averages
    quiet           modules with running state of another kind are in evaluation mode too
    evaluation      the model as `eval()` leaves it, without gradients

A term of the gap is the difference between two stages, so the terms add up to the gap. A norm that
runs several times in one forward has moments for each call up to `noisy_precise`.
"""

from __future__ import annotations

import sys
import time
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from normexp.batching.copies import copied
from normexp.diagnosis.network import Loss, is_within, join, num_samples, take
from normexp.diagnosis.parts import SILENT, Modes, Parts, set_modes
from normexp.diagnosis.result import TERMS, Estimate, Losses
from normexp.diagnosis.rows import Calls, row_of
from normexp.errors import UserError
from normexp.norms.moment_sites import (
    NormSite,
    Population,
    Rule,
    of_population,
    pool_batches,
    watching,
    with_moments,
    with_own_share,
    write_populations,
)

FEW = 16  # samples on which modules are looked at one by one
PATIENCE = 10  # seconds without a line of progress


class Measurement:
    """The measurements of one network on some batches.

    Attributes:
        sizes: samples of each batch.
        parts: its modules, as a training forward calls them.
        active: by path, sites with batch statistics in training and running ones in evaluation.
        unknown: by path, modules with running state of another kind, and the paths whose mode
            decides how it acts.
        losses: of each batch, in one stage after the other.
        moments: of each active site in each batch, in training.
        training, evaluation, gap: the mean losses and their difference.
        tolerance: terms below it are no fault, in units of the loss.
        terms: the parts of the gap, by the names in `TERMS`.
        rows: of each active site, by path.
        group_size: the fewest samples that share statistics in training.
        depends_on_batch: a sample's output in evaluation depends on the others of its batch.
    """

    def __init__(
        self, model: nn.Module, batches: list[Any], loss: Loss, tolerance: float | None = None
    ) -> None:
        self.batches = batches
        self.sizes = [num_samples(batch) for batch in batches]
        first = batches[0] if self.sizes[0] > 1 else join(batches[:2]) or batches[0]
        self.parts = Parts(model, take(first, slice(FEW), num_samples(first)), loss)
        self.active = self.parts.sites()
        self.unknown = self.parts.unknown(self.active)
        self.start = time.monotonic()
        self.losses: list[Losses] = []
        self.moments = self._measure_stages()
        self.training = self._mean(self.losses[0])
        self.evaluation = self._mean(self.losses[-1])
        self.gap = self._mean(self.losses[-1] - self.losses[0])
        changes = np.diff(self.losses, axis=0)
        self.terms = dict(zip(TERMS, map(self._mean, changes), strict=True))
        self.rows = {path: row_of(site, self.moments[path]) for path, site in self.active.items()}
        largest = max(self.sizes)
        groups = [site.group_size(largest) for site in self.active.values()]
        self.group_size = min(groups, default=largest)
        self.depends_on_batch = self.parts.mixes("", self.parts.evaluation)
        self.loss_at_size = self._loss_at_size()
        self.tolerance = max(0.01, 0.01 * self.training.value) if tolerance is None else tolerance

    def _mean(self, losses: Losses) -> Estimate:
        return Estimate.of(losses, np.array(self.sizes))

    def exceeds(self, estimate: Estimate) -> bool:
        """True if its size exceeds the tolerance and chance; NaN does not."""
        bound = stats.t.ppf(0.995, len(self.sizes) - 1) * estimate.error
        return bool(abs(estimate.value) > max(self.tolerance, bound))

    def cost(self, name: str) -> Estimate | None:
        """The term, if evaluation is worse by it beyond chance."""
        term = self.terms[name]
        return term if term.value > 0 and self.exceeds(term) else None

    # --- Stages ----------------------------------------------------------------------------------

    def _measure_stages(self) -> dict[str, list[Calls]]:
        """Fills `losses`, and returns the moments of training."""
        parts = self.parts
        in_training = parts.training.training
        norms = {path for path in parts.modules if is_within(path, *self.active)}
        unknown = set().union(*self.unknown.values())
        batch = Modes(in_training & (unknown | norms), learning=True)
        running = Modes(in_training & unknown, learning=False)

        noisy_moments = self._stage(parts.training)
        moments = self._stage(batch)
        self._stage(running, moments, with_own_share)
        self._stage(running, moments)
        self._stage(running, noisy_moments)
        self._stage(running)
        self._stage(SILENT)
        self._stage(parts.evaluation)
        return noisy_moments

    def _stage(
        self,
        modes: Modes,
        moments: dict[str, list[Calls]] | None = None,
        rule: Rule = of_population,
    ) -> dict[str, list[Calls]]:
        """Measures the losses of all batches; returns the moments of every active site in them.

        Given moments of each batch, norms use those of all other batches, by a rule.
        """
        losses = []
        measured = {path: list[Calls]() for path in self.active}
        for index, batch in enumerate(self.batches):
            model, sites = copied((self.parts.model, self.active), self.parts.fixed)
            set_modes(model, modes)
            others = {
                sites[path]: _of_others(sites[path], of_batches, index)
                for path, of_batches in (moments or {}).items()
                if any(of_batches)  # else a model in evaluation never calls it
            }
            with torch.no_grad():
                write_populations({site: calls[0] for site, calls in others.items()})
            with watching([*sites.values()]) as samples, with_moments(others, rule):
                losses.append(self.parts.loss(model, batch, modes, index))
            for path, site in sites.items():
                measured[path].append([site.pooled(call) for call in samples[site]])
        self.losses.append(np.array(losses))
        if time.monotonic() - self.start > PATIENCE:
            count = f"{len(self.losses)} of {len(TERMS) + 1}"
            print(f"diagnose: {count} stages measured", file=sys.stderr)
        return measured

    # --- Beside the gap --------------------------------------------------------------------------

    def _loss_at_size(self) -> dict[int, Estimate]:
        """The loss for single samples, or else for pairs, of an evaluation that mixes samples.

        Over the first and the last sample, or pair, of each batch.
        """
        parts, modes = self.parts, self.parts.evaluation
        for size in (1, 2) if self.depends_on_batch else ():
            losses: list[float] = []
            try:
                for batch, num in zip(self.batches, self.sizes, strict=True):
                    for first in (0, num - size):
                        samples = take(batch, slice(first, first + size), num)
                        losses.append(parts.loss(parts.fresh(modes), samples, modes))
            except UserError:  # one value per channel has no variance
                continue
            return {size: Estimate.of(np.array(losses), np.ones_like(losses))}
        return {}


def _of_others(site: NormSite, batches: list[Calls], index: int) -> list[Population]:
    """The moments of all batches but one, for each call of a site within a forward."""
    others = batches[:index] + batches[index + 1 :]
    calls = zip_longest(*(others if any(others) else batches))  # None in batches with fewer calls
    return [pool_batches(site, [*filter(None, of_call)]) for of_call in calls]
