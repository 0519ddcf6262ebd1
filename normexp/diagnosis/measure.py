"""What is measured of a network: its loss on the same samples, from training to evaluation mode.

The gap is the difference of the first and the last stage, which are the user's own. The stages
between change one thing each, on the same batches:

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

from contextlib import ExitStack
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from normexp.batching.copies import copied
from normexp.checks.network import name_some
from normexp.checks.probe import unlike
from normexp.diagnosis.network import (
    Loss,
    innermost,
    is_within,
    join,
    num_samples,
    take,
)
from normexp.diagnosis.parts import Modes, Parts, differ, set_modes
from normexp.diagnosis.result import TERMS, Estimate, Losses, SiteRow
from normexp.diagnosis.rows import Calls, row_of
from normexp.errors import UserError
from normexp.norms.moment_sites import (
    NormSite,
    Population,
    pool_batches,
    watching,
    with_moments,
    write_populations,
)

FEW = 16  # samples on which modules are looked at one by one
MOST_GROUPS = 32  # small batches in which an evaluation is measured
BETWEEN = ("batch", "share", "precise", "noisy_precise", "running")  # stages


class Measurement:
    """The measurements of one network on some batches.

    Attributes:
        sizes: samples of each batch.
        parts: its modules, as a training forward calls them.
        active: by path, sites with batch statistics in training and running ones in evaluation.
        unknown: by path, modules with running state of another kind, and the paths whose mode
            decides how it acts.
        losses: of each batch in each stage.
        moments: of each active site in each batch, in training.
        training, evaluation, gap: the mean losses and their difference.
        tolerance: smaller terms are no fault, in units of the loss.
        terms: what the gap consists of, by the names in `TERMS`.
    """

    def __init__(
        self, model: nn.Module, batches: list[Any], loss: Loss, tolerance: float | None = None
    ) -> None:
        self.batches, self.loss = batches, loss
        self.sizes = [num_samples(batch) for batch in batches]
        first = batches[0] if self.sizes[0] > 1 else join(batches[:2]) or batches[0]
        self.parts = Parts(model, take(first, slice(FEW), num_samples(first)), loss)
        self.active = self.parts.sites()
        self.unknown = self.parts.unknown(self.active)
        self.losses: dict[str, Losses] = {}
        self.moments = self._measure_stages()
        self.training = self.mean(self.losses["training"])
        self.evaluation = self.mean(self.losses["evaluation"])
        self.gap = self.term("training", "evaluation")
        self.tolerance = max(0.01, 0.01 * self.training.value) if tolerance is None else tolerance
        self.terms = {name: self.term(term.first, term.last) for name, term in TERMS.items()}

    def term(self, first: str, last: str) -> Estimate:
        """What stage `last` costs beyond stage `first`."""
        return self.mean(self.losses[last] - self.losses[first])

    def exceeds(self, estimate: Estimate) -> bool:
        """True if its size exceeds the tolerance and chance; NaN does not."""
        bound = stats.t.ppf(0.995, len(self.sizes) - 1) * estimate.error
        return bool(abs(estimate.value) > max(self.tolerance, bound))

    def cost(self, name: str) -> Estimate | None:
        """A term by which evaluation is worse."""
        term = self.terms[name]
        return term if term.value > 0 and self.exceeds(term) else None

    def mean(self, losses: Losses) -> Estimate:
        return Estimate.of(losses, np.array(self.sizes, dtype=float))

    # --- Stages ----------------------------------------------------------------------------------

    def _measure_stages(self) -> dict[str, list[Calls]]:
        """Fills `losses`, and returns the moments of training."""
        parts, losses = self.parts, self.losses
        others = {path for chain in self.unknown.values() for path in chain}
        norms = {p for p in parts.modules if is_within(p, *self.active)}
        noisy = self._stage("training", parts.training)
        self._stage("quiet", parts.silent)
        self._stage("evaluation", parts.evaluation)
        if not (norms or others):
            losses |= dict.fromkeys(BETWEEN, losses["quiet"])
            return noisy
        clean = self._stage("batch", self._training_only(others | norms, learning=True))
        if not norms:
            losses |= dict.fromkeys(BETWEEN, losses["batch"])
            return noisy
        running = self._training_only(others, learning=False)
        self._stage("share", running, clean, own_share=True)
        self._stage("precise", running, clean)
        self._stage("noisy_precise", running, noisy)
        self._stage("running", running)
        return noisy

    def _training_only(self, paths: set[str], *, learning: bool) -> Modes:
        """These modules as in training, all others in evaluation mode."""
        training = self.parts.training.training
        modes = {path: training[path] and path in paths for path in training}
        return Modes(modes, learning)

    def _stage(
        self,
        stage: str,
        modes: Modes,
        moments: dict[str, list[Calls]] | None = None,
        *,
        own_share: bool = False,
    ) -> dict[str, list[Calls]]:
        """Measures the losses of all batches; the moments of every active site in them.

        Given moments of each batch, norms use those of all other batches.
        """
        losses, seen = [], {path: list[Calls]() for path in self.active}
        for index, batch in enumerate(self.batches):
            model, sites = copied((self.parts.model, self.active), self.parts.fixed)
            set_modes(model, modes)
            with ExitStack() as contexts:
                samples = contexts.enter_context(watching(list(sites.values())))
                if moments:
                    others = {s: _of_others(s, moments[path], index) for path, s in sites.items()}
                    with torch.no_grad():
                        write_populations({site: calls[0] for site, calls in others.items()})
                    contexts.enter_context(with_moments(others, own_share=own_share))
                losses.append(self.parts.loss(model, batch, self.loss, modes, index))
            for path, site in sites.items():
                seen[path].append([site.pooled(call) for call in samples[site]])
        self.losses[stage] = np.array(losses)
        return seen

    # --- Beside the gap --------------------------------------------------------------------------

    @cached_property
    def rows(self) -> dict[str, SiteRow]:
        """Of each active site."""
        return {path: row_of(site, self.moments[path]) for path, site in self.active.items()}

    def left_in_training(self) -> list[str]:
        """Modules in training mode in evaluation, the outermost of each branch."""
        left = [name for name, training in self.parts.evaluation.training.items() if training]
        return [name for name in left if not name or name.rpartition(".")[0] not in left]

    def acting(self) -> list[str]:
        """The innermost modules, beside those known, that compute otherwise in training."""
        known, calls = [*self.active, *self.unknown], self.parts.calls
        acting = innermost(path for path in calls if self.parts.acts_in_training(path))
        return [p for p in acting if not is_within(p, *known)]

    @cached_property
    def depends_on_batch(self) -> bool:
        """True if a sample's output in evaluation depends on the other samples of its batch."""
        return self.parts.mixes("", self.parts.evaluation)

    @cached_property
    def loss_at_size(self) -> dict[int, Estimate]:
        """The loss of an evaluation that depends on the batch, of single samples if it has one."""
        everything, total = join(self.batches), sum(self.sizes)
        if everything is None or not self.depends_on_batch:
            return {}
        modes, parts = self.parts.evaluation, self.parts
        for size in (1, 2):
            count, losses = total // size, []
            try:
                for k in np.linspace(0, count - 1, min(count, MOST_GROUPS)).astype(int):
                    group = take(everything, slice(k * size, (k + 1) * size), total)
                    losses.append(parts.loss(parts.fresh(modes), group, self.loss, modes))
            except UserError:  # one value per channel has no variance
                continue
            return {size: Estimate.of(np.array(losses), np.ones(len(losses)))}
        return {}

    def varies_in_evaluation(self) -> str:
        """What makes two evaluations of one batch differ."""
        parts, modes = self.parts, self.parts.evaluation
        first, call = parts.outputs("", modes), parts.calls[""]
        if differ(first, parts.run(parts.evaluated, call, modes)):
            return f"a forward changes {name_some(unlike(parts.evaluated, parts.model))}"
        other = parts.run(parts.fresh(modes), call, modes, seed=1)
        return "two forwards of one batch differ" if differ(first, other) else ""


def _of_others(site: NormSite, batches: list[Calls], index: int) -> list[Population]:
    """The moments of all batches but one, for each call of a site within a forward."""
    called = [calls for k, calls in enumerate(batches) if calls and k != index]
    called = called or [calls for calls in batches if calls]
    return [
        pool_batches(site, [calls[call] for calls in called if len(calls) > call])
        for call in range(max(map(len, called)))
    ]
