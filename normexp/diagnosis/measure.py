"""What is measured of a network: its loss on the same samples, from training to evaluation mode.

Each stage changes one thing of the stage before, on the same batches:

    training        every module as in training
    batch           norms as in training, every other module as in evaluation (no dropout)
    share           norms use the moments expected of a training batch that holds the sample:
                    moments of all other batches, in which the sample's own weigh 1 / batch size
    precise         norms use the moments of all other batches (arXiv:2105.07576)
    noisy_precise   these moments as training sees them, behind dropout
    running         norms use their running averages
    quiet           modules with running state of another kind are in evaluation mode too
    evaluation      the model as `eval()` leaves it

A term of the gap is the difference between two stages, so the terms add up to the gap. A norm that
runs several times in one forward has moments for each call up to `noisy_precise`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normexp.diagnosis.network import (
    Loss,
    Modes,
    evaluation_modes,
    join,
    loss_on,
    num_samples,
    set_modes,
    take,
    training_modes,
)
from normexp.diagnosis.result import TERMS, Estimate, Losses
from normexp.errors import UserError
from normexp.norms.base import Moments
from normexp.norms.moment_sites import (
    NormSite,
    Population,
    can_be_shown,
    find_sites,
    inputs_to,
    pool_batches,
    watching,
    with_moments,
    write_populations,
)
from normexp.norms.site import install_state, named_sites, read_state, write_state

LARGEST_SIZE = 32  # samples that share statistics, beyond those of the batches
MOST_GROUPS = 32  # of each size

Calls = list[Moments]  # of each call of a site within one forward


class Measurement:
    """The measurements of one network on some batches; changes modes and buffers of the model.

    Attributes:
        sizes: samples of each batch.
        active: sites that use batch statistics in training, and running ones in evaluation.
        without_averages: sites that use batch statistics in both modes.
        unknown: by path, the modules whose mode decides how running state of another kind acts.
        losses: of each batch in each stage.
        moments: of each active site in each batch, in training.
        terms: what the gap consists of, by the names in `TERMS`.
    """

    def __init__(self, model: nn.Module, batches: list[Any], loss: Loss) -> None:
        self.model, self.batches, self.loss = model, batches, loss
        self.training, self.evaluation = training_modes(model), evaluation_modes(model)
        self.silent: Modes = dict.fromkeys(self.training, False)
        self.buffers, self.state = dict(model.named_buffers()), read_state(model)
        self.sizes = [num_samples(batch) for batch in batches]
        self.active: list[NormSite] = []
        self.without_averages: list[NormSite] = []
        self.unknown: dict[str, list[nn.Module]] = {}
        self._sort_sites()
        self.losses, self.moments = self._measure_stages()
        self.terms = {name: self.term(term.first, term.last) for name, term in TERMS.items()}

    def term(self, first: str, last: str) -> Estimate:
        """What stage `last` costs beyond stage `first`."""
        return self.mean(self.losses[last] - self.losses[first])

    def mean(self, values: Losses) -> Estimate:
        return Estimate.of(values, np.array(self.sizes, dtype=float))

    def _restore(self) -> None:
        install_state(self.model, self.buffers)
        write_state(self.model, self.state)

    def _changed(self) -> list[str]:
        """Names of the buffers that differ from the model's own."""
        return [
            name
            for name, value in read_state(self.model).items()
            if not torch.allclose(value, self.state[name], 0, 0, value.is_floating_point())
        ]

    @torch.no_grad()
    def _run(self, batch: Any, modes: Modes) -> float:
        """The loss of a batch; the state is restored after it."""
        set_modes(modes)
        try:
            return float(loss_on(self.model, batch, self.loss))
        finally:
            self._restore()

    # --- Sites -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _sort_sites(self) -> None:
        sites = find_sites(self.model)
        set_modes(self.training)
        with inputs_to(sites) as inputs:
            loss_on(self.model, self.batches[0], self.loss)
        moved = self._changed()
        self._restore()
        for site, x in inputs.items():
            if not site.has_averages:
                self.without_averages.append(site)
            elif self._acts_in_training(site, x):
                set_modes(self.silent)
                if can_be_shown(site, x):
                    self.active.append(site)
                else:
                    self.unknown[site.name] = site.modules
                self._restore()
        known = {module for site in sites for module in site.modules}
        paths = dict.fromkeys(name.rpartition(".")[0] for name in moved)
        modules = {path or "the model": self.model.get_submodule(path) for path in paths}
        self.unknown |= {path: [m] for path, m in modules.items() if m not in known}

    def _acts_in_training(self, site: NormSite, x: Tensor) -> bool:
        """True if its output on an input depends on its mode, or a forward moves its state."""
        set_modes(self.training)
        if not site.norm.training:
            return False
        try:
            first = site.entry(x)
            moved = bool(self._changed())
            self._restore()
            set_modes(self.silent)
            return moved or not torch.equal(first, site.entry(x))
        except Exception:  # of foreign code, any kind
            return True
        finally:
            self._restore()

    def _modes(self, *, batch_statistics: bool = False) -> Modes:
        """All in evaluation mode but running state of another kind, and norms where asked."""
        norms = [site.modules for site in self.active] if batch_statistics else []
        acting = [module for modules in (*norms, *self.unknown.values()) for module in modules]
        return self.silent | {module: self.training[module] for module in acting}

    # --- Stages ----------------------------------------------------------------------------------

    def _measure_stages(self) -> tuple[dict[str, Losses], dict[NormSite, list[Calls]]]:
        batch_modes, running_modes = self._modes(batch_statistics=True), self._modes()
        training, noisy = self._with_moments(self.training)
        batch, clean = self._with_moments(batch_modes)
        losses = {"training": training, "batch": batch}
        for name, moments in (("share", clean), ("precise", clean), ("noisy_precise", noisy)):
            if name == "noisy_precise" and np.array_equal(training, batch):
                losses[name] = losses["precise"]
                continue
            losses[name] = np.zeros(len(self.batches))
            for index, part in enumerate(self.batches):
                populations = {s: _of_others(s, moments[s], index) for s in self.active}
                write_populations({site: calls[0] for site, calls in populations.items()})
                with with_moments(populations, own_share=name == "share"):
                    losses[name][index] = self._run(part, running_modes)
        modes = {"running": running_modes, "quiet": self.silent, "evaluation": self.evaluation}
        for name, mode in modes.items():
            losses[name] = np.array([self._run(part, mode) for part in self.batches])
        return losses, noisy

    def _with_moments(self, modes: Modes) -> tuple[Losses, dict[NormSite, list[Calls]]]:
        """The losses of all batches, and the moments of every site in them."""
        losses, moments = [], {site: list[Calls]() for site in self.active}
        for batch in self.batches:
            with watching(self.active) as seen:
                losses.append(self._run(batch, modes))
            for site in self.active:
                moments[site].append([site.pooled(samples) for samples in seen[site]])
        return np.array(losses), moments

    # --- Beside the gap --------------------------------------------------------------------------

    def left_in_training(self) -> list[str]:
        """Modules in training mode in evaluation, the outermost of each branch."""
        left = [name for name, module in self.model.named_modules() if self.evaluation[module]]
        inner = [name for name in left if name and name.rpartition(".")[0] in left]
        return [name or "the model" for name in left if name not in inner]

    def loss_at_size(self) -> dict[int, Estimate]:
        """The loss with the statistics of groups of k samples; on up to 32 groups of each size."""
        everything, measured = join(self.batches), dict[int, Estimate]()
        if everything is None or not (self.active or self.without_averages):
            return measured
        total = num_samples(everything)
        largest = min(max(LARGEST_SIZE, *self.sizes), total // 4)
        modes = self._modes(batch_statistics=True)
        with ExitStack() as changed:
            for _, site in named_sites(self.model):  # its groups would be smaller ones
                changed.callback(setattr, site, "norm_batch_size", site.norm_batch_size)
                site.norm_batch_size = None
            for size in (2**k for k in range(largest.bit_length())):
                count = total // size
                chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_GROUPS)).astype(int))
                try:
                    losses = [
                        self._run(take(everything, k * size, (k + 1) * size), modes) for k in chosen
                    ]
                except UserError:  # one value per channel has no variance
                    continue
                measured[size] = Estimate.of(np.array(losses), np.ones(len(losses)))
        return measured

    @torch.no_grad()
    def varies_in_evaluation(self) -> tuple[list[str], bool]:
        """The buffers that a forward in evaluation mode changes, and whether two losses differ."""
        set_modes(self.evaluation)
        first = float(loss_on(self.model, self.batches[0], self.loss))
        moved = self._changed()
        self._restore()
        second = self._run(self.batches[0], self.evaluation)
        return moved, abs(first - second) > 1e-3 * abs(first) + 1e-6


def _of_others(site: NormSite, batches: list[Calls], index: int) -> list[Population]:
    """The moments of all batches but one, for each call of a site within a forward."""
    called = [calls for k, calls in enumerate(batches) if calls and k != index]
    called = called or [calls for calls in batches if calls]
    return [
        pool_batches(site, [calls[call] for calls in called if len(calls) > call])
        for call in range(max(map(len, called)))
    ]
