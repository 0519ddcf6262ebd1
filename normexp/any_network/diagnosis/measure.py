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
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import nn

from normexp.any_network.diagnosis.batches import Loss, first_samples
from normexp.any_network.diagnosis.parts import SILENT, Modes, Parts, is_within, set_modes
from normexp.any_network.diagnosis.recompute import run_in_training, write_values
from normexp.any_network.diagnosis.result import TERMS, Losses, LossEstimate, SiteRow
from normexp.any_network.diagnosis.rows import Calls, row_of
from normexp.errors import UserError
from normexp.norms.moment_sites import (
    MomentSite,
    Population,
    averaged,
    of_population,
    pool_batches,
    watching,
    with_moments,
    with_own_share,
    write_populations,
)
from normexp.norms.samples import count_samples, take_samples
from normexp.training.batching.copies import copied

PATIENCE = 10  # seconds without a line of progress


class Source(NamedTuple):
    """Which moments of the other batches take the place of running averages.

    Attributes:
        behind_dropout: as training sees them; else with dropout off.
        by_call: those of each call of a norm within a forward; else all calls together.
        first: averaged with the norm's momentum as training does, from this batch on; else pooled.
    """

    behind_dropout: bool = False
    by_call: bool = False
    first: int | None = None


@dataclass(frozen=True)
class Setup:
    """How a copy of the network is run on a batch.

    Attributes:
        averages: what takes their place, by the path of a site; elsewhere they stay.
        own_share: the sample's own moments weigh as much as in training.
        moves_state: running state of another kind is moved first, by forwards in training mode.
    """

    modes: Modes
    averages: frozenset[tuple[str, Source]] = frozenset()
    own_share: bool = False
    moves_state: bool = False

    def in_training(self, paths: Iterable[str]) -> Setup:
        """The same, with the modules of these paths, and no others, in training mode."""
        return replace(self, modes=Modes(frozenset(paths), self.modes.learning))

    def averaging(self, sources: Mapping[str, Source]) -> Setup:
        """The same, with other moments at some sites."""
        averages = {**dict(self.averages), **sources}
        return replace(self, averages=frozenset(averages.items()))


class Measurement:
    """The measurements of one network on some batches.

    Attributes:
        sizes: samples of each batch.
        parts: its modules, as a training forward calls them.
        active: by path, sites with batch statistics in training and running ones in evaluation.
        norms: the paths of all modules in active sites.
        unknown: by path, modules with running state of another kind, and the paths whose mode
            decides how it acts.
        behind_dropout, without: the moments of each active site in each batch, in training mode
            and in the stage `batch`.
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
        self.parts = Parts(model, first_samples(batches), loss)
        self.sizes = [count_samples(batch, self.parts.axis) for batch in batches]
        self.active = self.parts.sites()
        self.norms = {path for path in self.parts.modules if is_within(path, *self.active)}
        self.unknown = self.parts.unknown(self.active)
        self.start = time.monotonic()
        self.rows: dict[str, SiteRow] = {}
        self._losses: dict[Setup, Losses] = {}
        stages = self._measure_stages()
        self.evaluated = stages[-1]
        self.training, self.evaluation = self.mean(stages[0]), self.mean(self.evaluated)
        self.gap = self.gain(self.evaluated, stages[0])
        terms = [self.gain(after, before) for before, after in pairwise(stages)]
        self.terms = dict(zip(TERMS, terms, strict=True))
        largest = max(self.sizes)
        groups = [site.group_size(largest) for site in self.active.values()]
        self.group_size = min(groups, default=largest)
        self.depends_on_batch = self.parts.mixes("", self.parts.evaluation)
        self.loss_at_size = self._loss_at_size()
        self.tolerance = max(0.01, 0.01 * self.training.value) if tolerance is None else tolerance

    def _mean(self, losses: Losses) -> LossEstimate:
        return LossEstimate.of(losses, np.array(self.sizes))

    def mean(self, setup: Setup) -> LossEstimate:
        """The loss in a setup."""
        return self._mean(self.losses(setup))

    def gain(self, setup: Setup, other: Setup) -> LossEstimate:
        """How much lower the loss is in another setup."""
        return self._mean(self.losses(setup) - self.losses(other))

    def exceeds(self, estimate: LossEstimate) -> bool:
        """True if its size exceeds the tolerance and chance (t test at 1 %); NaN does not."""
        bound = stats.t.ppf(0.995, len(self.sizes) - 1) * estimate.error
        return bool(abs(estimate.value) > max(self.tolerance, bound))

    def costs(self, estimate: LossEstimate) -> bool:
        return estimate.value > 0 and self.exceeds(estimate)

    # --- Losses ----------------------------------------------------------------------------------

    def _measure_stages(self) -> list[Setup]:
        """The setups of all stages, after the two that give the moments of the others."""
        in_training = self.parts.training.training
        unknown = in_training & set().union(*self.unknown.values())
        batch = Modes(unknown | (in_training & self.norms), learning=True)
        training = Setup(self.parts.training)
        self.behind_dropout = self._measure(training)
        self.without_dropout = self._measure(Setup(batch))
        for path, site in self.active.items():
            moves = self.parts.moved_by_training(site)
            self.rows[path] = row_of(site, self.behind_dropout[path], moves=moves)
        running = Setup(Modes(unknown, learning=False))
        noisy = {path: self.source(path, behind_dropout=True) for path in self.active}
        precise = running.averaging({path: self.source(path) for path in self.active})
        stages = [
            *(training, Setup(batch), replace(precise, own_share=True), precise),
            *(running.averaging(noisy), running, Setup(SILENT), Setup(self.parts.evaluation)),
        ]
        for setup in stages:
            self.losses(setup)
        return stages

    def source(self, path: str, *, behind_dropout: bool = False) -> Source:
        """Pooled moments of each call at a site."""
        return Source(behind_dropout, by_call=max(map(len, self.behind_dropout[path])) > 1)

    def losses(self, setup: Setup) -> Losses:
        """The loss of each batch; each setup is measured once."""
        if setup not in self._losses:
            self._measure(setup)
        return self._losses[setup]

    def _measure(self, setup: Setup) -> dict[str, list[Calls]]:
        """Measures the losses of all batches; returns the moments of every active site in them."""
        losses = []
        measured = {path: list[Calls]() for path in self.active}
        for index, batch in enumerate(self.batches):
            model, sites = copied((self.parts.model, self.active), self.parts.fixed)
            if setup.moves_state:
                write_values(model, self._moved_state)
            set_modes(model, setup.modes)
            with ExitStack() as hooks:
                samples = hooks.enter_context(watching([*sites.values()]))
                self._put_in(setup, sites, index, hooks)
                losses.append(self.parts.loss(model, batch, setup.modes, index))
            for path, site in sites.items():
                measured[path].append([site.pooled(call) for call in samples[site]])
        self._losses[setup] = np.array(losses)
        if time.monotonic() - self.start > PATIENCE:
            print(f"diagnose: {len(self._losses)} passes over the batches", file=sys.stderr)
        return measured

    def _put_in(
        self, setup: Setup, sites: Mapping[str, MomentSite], index: int, hooks: ExitStack
    ) -> None:
        """Replaces the running averages by the moments of a setup."""
        averages: dict[MomentSite, Population] = {}  # written as running moments
        by_input: dict[MomentSite, list[Population]] = {}  # differ by call or by sample
        for path, source in setup.averages:
            calls = self._of_others(path, source, index)
            if calls:
                averages[sites[path]] = calls[0]
            if len(calls) > 1 or (calls and setup.own_share):
                by_input[sites[path]] = calls
        with torch.no_grad():
            write_populations(averages)
        rule = with_own_share if setup.own_share else of_population
        hooks.enter_context(with_moments(by_input, rule))

    def _of_others(self, path: str, source: Source, index: int) -> list[Population]:
        """The moments at a site in all batches but one; none if training never calls the site."""
        site = self.active[path]
        batches = (self.behind_dropout if source.behind_dropout else self.without_dropout)[path]
        others = [calls for number, calls in enumerate(batches) if number != index]
        others = others if any(others) else batches
        if source.first is not None:
            others = others[source.first :] + others[: source.first]
        if source.by_call:
            by_call: list[Calls] = []
            for calls in zip_longest(*others):  # batches with fewer calls have None
                by_call.append([moments for moments in calls if moments is not None])
        else:
            by_call = [[*chain.from_iterable(others)]]
        average = pool_batches if source.first is None else averaged
        return [average(site, moments) for moments in by_call if moments]

    @cached_property
    def _moved_state(self) -> dict[str, Any]:
        return run_in_training(self.parts, {}, self.unknown, self.batches).other_state

    # --- Beside the gap --------------------------------------------------------------------------

    def _loss_at_size(self) -> dict[int, LossEstimate]:
        """The loss for single samples, or else for pairs, of an evaluation that mixes samples.

        Over the first and the last sample, or pair, of each batch.
        """
        parts, modes = self.parts, self.parts.evaluation
        for size in (1, 2) if self.depends_on_batch else ():
            losses: list[float] = []
            try:
                for batch, num in zip(self.batches, self.sizes, strict=True):
                    for first in (0, num - size):
                        some = slice(first, first + size)
                        samples = take_samples(batch, some, num=num, axis=parts.axis)
                        losses.append(parts.loss(parts.fresh(modes), samples, modes))
            except UserError:  # one value per channel has no variance
                continue
            return {size: LossEstimate.of(np.array(losses), np.ones_like(losses))}
        return {}
