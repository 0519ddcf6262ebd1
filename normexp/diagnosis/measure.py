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

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from normexp.batching.copies import copied
from normexp.diagnosis.network import (
    Loss,
    Modes,
    Subject,
    innermost,
    is_within,
    join,
    loss_on,
    num_samples,
    refusing_runs,
    set_modes,
    take,
    tensors_in,
)
from normexp.diagnosis.parts import Parts, differ
from normexp.diagnosis.result import TERMS, Estimate, Losses
from normexp.errors import UserError
from normexp.norms.base import Moments
from normexp.norms.moment_sites import (
    NormSite,
    Population,
    pool_batches,
    watching,
    with_moments,
    write_populations,
)
from normexp.norms.site import named_sites

FEW = 16  # samples on which modules are looked at one by one
LARGEST_SIZE = 32  # samples that share statistics, beyond those of the batches
MOST_GROUPS = 32  # of each size
BETWEEN = ("batch", "share", "precise", "noisy_precise", "running")  # stages

Calls = list[Moments]  # of each call of a site within one forward


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
        terms: what the gap consists of, by the names in `TERMS`.
    """

    def __init__(self, model: nn.Module, batches: list[Any], loss: Loss) -> None:
        self.batches, self.loss = batches, loss
        self.sizes = [num_samples(batch) for batch in batches]
        self.subject = Subject(model)
        first = batches[0] if self.sizes[0] > 1 else join(batches[:2]) or batches[0]
        few = take(first, slice(FEW))
        training, evaluation = self.subject.training, self.subject.evaluation
        with refusing_runs(model):
            self.parts = Parts(self.subject, few, loss, training, learning=True)
            self.evaluated = Parts(self.subject, few, loss, evaluation, learning=False)
        moved = {*self.parts.moved, *self.evaluated.moved}
        named = self.subject.model.named_parameters()
        self.subject.fixed = [p for name, p in named if name not in moved]
        self.active = self.parts.sites()
        self.unknown = self.parts.unknown(self.active)
        self.losses, self.moments = self._measure_stages()
        self.terms = {name: self.term(term.first, term.last) for name, term in TERMS.items()}

    def term(self, first: str, last: str) -> Estimate:
        """What stage `last` costs beyond stage `first`."""
        return self.mean(self.losses[last] - self.losses[first])

    def mean(self, values: Losses) -> Estimate:
        return Estimate.of(values, np.array(self.sizes, dtype=float))

    # --- Stages ----------------------------------------------------------------------------------

    def _measure_stages(self) -> tuple[dict[str, Losses], dict[str, list[Calls]]]:
        subject, losses = self.subject, dict[str, Losses]()
        losses["training"], noisy = self._with_moments(subject.training, learning=True)
        losses["evaluation"], _ = self._with_moments(subject.evaluation)
        losses["quiet"] = losses["evaluation"]
        if subject.silent != subject.evaluation:
            losses["quiet"], _ = self._with_moments(subject.silent)
        if not (self.active or self.unknown):
            return losses | dict.fromkeys(BETWEEN, losses["quiet"]), noisy
        losses["batch"], clean = self._with_moments(self._modes(of_sites=True), learning=True)
        if not self.active:
            return losses | dict.fromkeys(BETWEEN, losses["batch"]), noisy
        losses["share"] = self._with_others(clean, own_share=True)
        losses["precise"] = losses["noisy_precise"] = self._with_others(clean)
        if not np.array_equal(losses["training"], losses["batch"]):
            losses["noisy_precise"] = self._with_others(noisy)
        losses["running"], _ = self._with_moments(self._modes())
        return losses, noisy

    def _modes(self, *, of_sites: bool = False) -> Modes:
        """All in evaluation mode but running state of another kind, and norms where asked."""
        acting = {path for chain in self.unknown.values() for path in chain}
        if of_sites:
            every = self.subject.training
            acting |= {name for site in self.active for name in every if is_within(name, site)}
        return self.subject.silent | {name: self.subject.training[name] for name in acting}

    def _fresh(self, modes: Modes) -> tuple[nn.Module, dict[str, NormSite]]:
        """A copy of the network, and its active sites."""
        model, sites = copied((self.subject.model, self.active), self.subject.fixed)
        return set_modes(model, modes), sites

    def _loss(self, model: nn.Module, batch: Any, *, seed: int = 0, learning: bool) -> float:
        torch.manual_seed(seed)
        with torch.set_grad_enabled(learning):
            return loss_on(model, batch, self.loss).item()

    def _with_moments(
        self, modes: Modes, *, learning: bool = False
    ) -> tuple[Losses, dict[str, list[Calls]]]:
        """The losses of all batches, and the moments of every active site in them."""
        losses, moments = [], {path: list[Calls]() for path in self.active}
        for index, batch in enumerate(self.batches):
            model, sites = self._fresh(modes)
            with watching(list(sites.values())) as seen:
                losses.append(self._loss(model, batch, seed=index, learning=learning))
            for path, site in sites.items():
                moments[path].append([site.pooled(samples) for samples in seen[site]])
        return np.array(losses), moments

    @torch.no_grad()
    def _with_others(self, moments: dict[str, list[Calls]], *, own_share: bool = False) -> Losses:
        """The losses of all batches, where norms use the moments of all other batches."""
        losses = []
        for index, batch in enumerate(self.batches):
            model, sites = self._fresh(self._modes())
            others = {s: _of_others(s, moments[path], index) for path, s in sites.items()}
            write_populations({site: calls[0] for site, calls in others.items()})
            with with_moments(others, own_share=own_share):
                losses.append(self._loss(model, batch, seed=index, learning=False))
        return np.array(losses)

    # --- Beside the gap --------------------------------------------------------------------------

    def left_in_training(self) -> list[str]:
        """Modules in training mode in evaluation, the outermost of each branch."""
        left = [name for name, training in self.subject.evaluation.items() if training]
        return [name for name in left if not name or name.rpartition(".")[0] not in left]

    def acting(self) -> list[str]:
        """The innermost modules, beside those known, that compute otherwise in training."""
        known, calls = [*self.active, *self.unknown], self.parts.calls
        acting = innermost(path for path in calls if self.parts.acts_in_training(path))
        return [p for p in acting if not any(is_within(p, path) for path in known)]

    @cached_property
    def depends_on_batch(self) -> bool:
        """True if a sample's output in evaluation depends on the other samples of its batch."""
        return self.evaluated.mixes("", self.subject.evaluation)

    def loss_at_size(self) -> dict[int, Estimate]:
        """The loss with the statistics of k samples, on up to 32 groups of each size.

        All else is as in evaluation. If that depends on the batch, the evaluation loss in batches
        of k.
        """
        everything, measured = join(self.batches), dict[int, Estimate]()
        if everything is None or not (self.active or self.depends_on_batch):
            return measured
        total = num_samples(everything)
        largest = min(max(LARGEST_SIZE, *self.sizes), total // 4)
        learning, modes = not self.depends_on_batch, self._modes(of_sites=True)
        modes = modes if learning else self.subject.evaluation
        for size in (2**k for k in range(largest.bit_length())):
            count, losses = total // size, []
            try:
                for k in np.unique(np.linspace(0, count - 1, min(count, MOST_GROUPS)).astype(int)):
                    model = self.subject.fresh(modes)
                    for _, site in named_sites(model):  # its groups would be smaller ones
                        site.norm_batch_size = None
                    group = take(everything, slice(k * size, (k + 1) * size))
                    losses.append(self._loss(model, group, learning=learning))
            except UserError:  # one value per channel has no variance
                continue
            measured[size] = Estimate.of(np.array(losses), np.ones(len(losses)))
        return measured

    @torch.no_grad()
    def varies_in_evaluation(self) -> tuple[list[str], bool]:
        """The state that moves the next evaluation, and whether random draws move it."""
        parts, modes, outputs = self.evaluated, self.subject.evaluation, []
        networks = self.subject.fresh(modes), parts.model, self.subject.fresh(modes)
        for network, seed in zip(networks, (0, 0, 1), strict=True):
            torch.manual_seed(seed)
            outputs.append(tensors_in(parts.calls[""](network)))
        first, again, other = outputs
        return parts.moved if differ(first, again) else [], differ(first, other)


def _of_others(site: NormSite, batches: list[Calls], index: int) -> list[Population]:
    """The moments of all batches but one, for each call of a site within a forward."""
    called = [calls for k, calls in enumerate(batches) if calls and k != index]
    called = called or [calls for calls in batches if calls]
    return [
        pool_batches(site, [calls[call] for calls in called if len(calls) > call])
        for call in range(max(map(len, called)))
    ]
