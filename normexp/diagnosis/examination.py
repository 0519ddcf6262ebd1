"""What is measured of a network: its loss on the same samples, from training to evaluation mode.

Each stage changes one thing of the stage before, on the same batches:

    training        every module as in training
    batch           norms as in training, every other module as in evaluation (no dropout)
    share           norms use the moments expected of a training batch that holds the sample:
                    moments of all other batches, in which the sample's own weigh 1 / batch size
    precise         norms use the moments of all other batches (arXiv:2105.07576)
    noisy_precise   these moments as training sees them, behind dropout
    running         norms use their running averages
    quiet           norms that were not analysed are in evaluation mode too
    evaluation      the model as `eval()` leaves it

A term of the gap is the difference between two stages, so the terms add up to the gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from normexp.diagnosis.network import (
    Loss,
    Modes,
    evaluation_modes,
    inputs_of,
    join,
    loss_on,
    num_samples,
    output_of,
    set_modes,
    take,
    training_modes,
)
from normexp.errors import UserError, first_line
from normexp.norms.moment_sites import (
    NormSite,
    Population,
    Samples,
    can_be_shown,
    distances_of,
    find_sites,
    inputs_to,
    keeps_other_state,
    pool_batches,
    watching,
    with_own_share,
    without_initial,
    write_populations,
)
from normexp.norms.moments import Moments
from normexp.norms.site import named_sites
from normexp.norms.state import install_state, read_state, write_state

STAGES = (
    *("training", "batch", "share", "precise", "noisy_precise", "running", "quiet", "evaluation"),
)
LARGEST_SIZE = 32  # samples that share statistics, beyond those of the batches
MOST_GROUPS = 32  # of each size
MOST_TRIALS = 8  # batches for other values of eps
EPS_FACTORS = (0.01, 10.0, 100.0, 1000.0, 10000.0)
NEAR = 1.0  # standard deviations between batches; nearer averages fit eps as it is
MOST_IN_BACKWARD = 8  # samples

Losses = np.ndarray  # of each batch (B,)


@dataclass(frozen=True)
class Updates:
    """How often each site was called in one training step; `problem` says why that is unknown."""

    forward: dict[str, int]
    backward: dict[str, int]
    problem: str = ""


@dataclass(frozen=True)
class EpsTrial:
    """With another eps: losses with running statistics, and how far these are from training's.

    Attributes:
        distance: of the farthest site, the median over channels; see `sites.distances`.
    """

    losses: Losses
    distance: float


@dataclass(eq=False)
class Examination:
    """The measurements of one network on some batches.

    Attributes:
        sizes: samples of each batch.
        active: sites that use batch statistics in training, and running ones in evaluation.
        fixed: sites that use running moments in both modes.
        without_averages: sites that use batch statistics in both modes.
        unused: sites that the forward does not call.
        unknown: names of modules with running state of another kind.
        left_in_training: names of modules that are in training mode in evaluation.
        losses: of each batch in each of the `STAGES`.
        without_initial: losses with running averages freed from their initial values; None if
            no site still holds more than a hundredth of these.
        evaluation: losses of the evaluation batches; None without.
        moments: of each site in each batch, in training; None where a forward does not call it.
        sample_spread: the variance of sample means in each batch, of the first of `sites` (B, C).
        loss_at_size: mean and standard error of the loss with batch statistics of k samples.
        eps_trials: by the factor on the eps of all norms; 1 is eps as it is.
        acts_in_training: loss that each class of modules adds in training, other than norms.
        inputs: minimum, maximum, mean and standard deviation of the inputs, for both batches.
        mixes, is_random, moved: in evaluation, whether samples see each other, whether two forwards
            differ, and which buffers a forward changes.
    """

    model: nn.Module
    sizes: list[int]
    active: list[NormSite] = field(default_factory=list)
    fixed: list[NormSite] = field(default_factory=list)
    without_averages: list[NormSite] = field(default_factory=list)
    unused: list[NormSite] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    left_in_training: list[str] = field(default_factory=list)
    losses: dict[str, Losses] = field(default_factory=dict)
    without_initial: Losses | None = None
    evaluation: Losses | None = None
    evaluation_sizes: list[int] = field(default_factory=list)
    moments: dict[NormSite, list[Moments | None]] = field(default_factory=dict)
    sample_spread: Tensor | None = None
    loss_at_size: dict[int, tuple[float, float]] = field(default_factory=dict)
    eps_trials: dict[float, EpsTrial] = field(default_factory=dict)
    acts_in_training: dict[str, float] = field(default_factory=dict)
    inputs: dict[str, dict[str, float]] = field(default_factory=dict)
    updates: Updates = field(default_factory=lambda: Updates({}, {}))
    mixes: bool = False
    is_random: bool = False
    moved: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[NormSite]:
        """All sites that are used and have running moments."""
        return [*self.active, *self.fixed]


def examine_network(
    model: nn.Module, batches: list[Any], evaluation_batches: list[Any], loss: Loss
) -> Examination:
    """Measures everything that a diagnosis says; changes modes and buffers of the model."""
    return _Examiner(model, batches, loss).examine(evaluation_batches)


def measure_stages(model: nn.Module, batches: list[Any], loss: Loss) -> Examination:
    """Measures the losses of the stages alone; changes modes and buffers of the model."""
    examiner = _Examiner(model, batches, loss)
    examiner.sort_sites()
    examiner.measure_stages()
    return examiner.result


def standard_error(values: Losses, weights: Losses) -> float:
    """Of the weighted mean of values that are independent from batch to batch."""
    shares, count = weights / weights.sum(), len(values)
    deviations = values - (shares * values).sum()
    return float(np.sqrt((shares**2 * deviations**2).sum() * count / max(count - 1, 1)))


class _Examiner:
    def __init__(self, model: nn.Module, batches: list[Any], loss: Loss) -> None:
        self.model, self.batches, self.loss = model, batches, loss
        self.training, self.evaluation = training_modes(model), evaluation_modes(model)
        self.silent: Modes = dict.fromkeys(self.training, False)
        self.buffers, self.state = dict(model.named_buffers()), read_state(model)
        self.result = Examination(model, [num_samples(batch) for batch in batches])

    def examine(self, evaluation_batches: list[Any]) -> Examination:
        result = self.result
        self.sort_sites()
        self.measure_stages()
        if evaluation_batches:
            result.evaluation = self.losses_of(evaluation_batches, self.evaluation)
            result.evaluation_sizes = [num_samples(batch) for batch in evaluation_batches]
        result.left_in_training = self.modules_left_in_training()
        result.acts_in_training = self.measure_other_modules()
        result.loss_at_size = self.measure_sizes()
        result.eps_trials = self.measure_eps()
        self.check_evaluation()
        result.updates = self.count_updates()
        for name, read in (("batches", self.batches), ("evaluation_batches", evaluation_batches)):
            if read:
                result.inputs[name] = _describe([inputs_of(batch) for batch in read])
        return result

    def restore(self) -> None:
        install_state(self.model, self.buffers)
        write_state(self.model, self.state)

    @torch.no_grad()
    def run(self, batch: Any, modes: Modes) -> float:
        """The loss of a batch; the state is restored after it."""
        set_modes(modes)
        try:
            return float(loss_on(self.model, batch, self.loss))
        finally:
            self.restore()

    def losses_of(self, batches: list[Any], modes: Modes) -> Losses:
        return np.array([self.run(batch, modes) for batch in batches])

    # --- Sites -----------------------------------------------------------------------------------

    @torch.no_grad()
    def sort_sites(self) -> None:
        """Finds which sites use batch statistics in training, and which can be analysed."""
        result, sites = self.result, find_sites(self.model)
        set_modes(self.training)
        with inputs_to(sites) as inputs:
            loss_on(self.model, self.batches[0], self.loss)
        self.restore()
        for site in sites:
            if site not in inputs:
                result.unused.append(site)
            elif not site.has_averages:
                result.without_averages.append(site)
            elif not self.acts_in_training(site, inputs[site]):
                result.fixed.append(site)
            elif self.is_shown(site, inputs[site]):
                result.active.append(site)
            else:
                result.unknown.append(site.name)
        known = {module for site in sites for module in site.modules}
        result.unknown += [
            name
            for name, module in self.model.named_modules()
            if module not in known and keeps_other_state(module) and self.training[module]
        ]

    def acts_in_training(self, site: NormSite, x: Tensor) -> bool:
        """True if its output on an input depends on its mode, or a forward moves its state."""
        set_modes(self.training)
        if not site.norm.training:
            return False
        before = read_state(site.norm)
        try:
            outputs = [site.entry(x)]
            moved = any(not torch.equal(before[n], v) for n, v in read_state(site.norm).items())
            self.restore()
            set_modes(self.silent)
            outputs.append(site.entry(x))
        except Exception:  # of foreign code, any kind
            return True
        finally:
            self.restore()
        return moved or not torch.equal(*outputs)

    def is_shown(self, site: NormSite, x: Tensor) -> bool:
        set_modes(self.silent)
        try:
            return can_be_shown(site, x)
        finally:
            self.restore()

    def modes(self, *, batch_statistics: bool = False, unknown: bool = True) -> Modes:
        """Everything in evaluation mode but norms: the active ones, and those not analysed."""
        modes, result = dict(self.silent), self.result
        active = [module for site in result.active for module in site.modules]
        others = [self.model.get_submodule(name) for name in self.unknown_paths()]
        names = [*(active if batch_statistics else []), *(others if unknown else [])]
        return modes | {module: self.training[module] for module in names}

    def unknown_paths(self) -> list[str]:
        """Paths of all modules inside those that were not analysed."""
        tops = self.result.unknown
        return [
            path
            for path, _ in self.model.named_modules()
            if any(path == top or path.startswith(f"{top}.") for top in tops)
        ]

    # --- Stages ----------------------------------------------------------------------------------

    def measure_stages(self) -> None:
        result, active = self.result, self.result.active
        batch_modes, running_modes = self.modes(batch_statistics=True), self.modes()
        in_training = self.losses_with_moments(self.training, self.batches)
        in_batch = self.losses_with_moments(batch_modes, self.batches)
        result.moments, losses = in_training.moments, result.losses
        result.sample_spread = in_training.spread
        losses["training"], losses["batch"] = in_training.losses, in_batch.losses
        is_noisy = not np.array_equal(losses["training"], losses["batch"])
        rows: dict[str, list[float]] = {"share": [], "precise": [], "noisy_precise": []}
        for index, batch in enumerate(self.batches):
            populations = {site: _of_others(site, in_batch.moments[site], index) for site in active}
            write_populations(populations)
            with with_own_share(populations):
                rows["share"].append(self.run(batch, running_modes))
            write_populations(populations)
            rows["precise"].append(self.run(batch, running_modes))
            if is_noisy:
                write_populations(
                    {site: _of_others(site, result.moments[site], index) for site in active}
                )
                rows["noisy_precise"].append(self.run(batch, running_modes))
        losses |= {name: np.array(values) for name, values in rows.items()}
        if not is_noisy:
            losses["noisy_precise"] = losses["precise"]
        losses["running"] = self.losses_of(self.batches, running_modes)
        losses["quiet"] = self.losses_of(self.batches, self.modes(unknown=False))
        losses["evaluation"] = self.losses_of(self.batches, self.evaluation)
        populations = {site: freed for site in active if (freed := without_initial(site))}
        if populations:
            freed_losses = []
            for batch in self.batches:
                write_populations(populations)
                freed_losses.append(self.run(batch, running_modes))
            result.without_initial = np.array(freed_losses)

    def losses_with_moments(self, modes: Modes, batches: list[Any]) -> _Pass:
        """The losses of batches, and the moments of every site in them."""
        losses, spreads, sites = [], [], self.result.sites
        moments: dict[NormSite, list[Moments | None]] = {site: [] for site in sites}
        for batch in batches:
            with watching(sites) as seen:
                losses.append(self.run(batch, modes))
            for site in sites:
                samples = _of_all_calls(seen, site)
                moments[site].append(None if samples is None else site.pooled(samples))
                if samples is not None and site is sites[0] and len(samples.mean) > 1:
                    spreads.append(samples.mean.flatten(1).var(dim=0))
        return _Pass(np.array(losses), moments, torch.stack(spreads) if spreads else None)

    def modules_left_in_training(self) -> list[str]:
        """Modules in training mode in evaluation, the outermost of each branch."""
        names: list[str] = []
        for name, module in self.model.named_modules():
            is_inside = any(name.startswith(f"{above}.") for above in names)
            if self.evaluation[module] and not is_inside:
                names.append(name or "the model")
        return names

    def measure_other_modules(self) -> dict[str, float]:
        """The loss that each class of modules adds in training mode."""
        result = self.result
        if np.array_equal(result.losses["training"], result.losses["batch"]):
            return {}
        modes, base = self.modes(batch_statistics=True), result.losses["batch"]
        norms = {module for site in find_sites(self.model) for module in site.modules}
        classes: dict[str, list[nn.Module]] = {}
        for module, training in self.training.items():
            if training and module not in norms:
                classes.setdefault(type(module).__name__, []).append(module)
        added: dict[str, float] = {}
        for name, modules in classes.items():
            changed = modes | dict.fromkeys(modules, True)
            if self.run(self.batches[0], changed) != base[0]:
                few = self.losses_of(self.batches[:MOST_TRIALS], changed)
                added[name] = float((few - base[:MOST_TRIALS]).mean())
        return added

    # --- Other sizes and eps ---------------------------------------------------------------------

    def measure_sizes(self) -> dict[int, tuple[float, float]]:
        """The loss with the statistics of groups of k samples; on up to 32 groups of each size."""
        everything = join(self.batches)
        if everything is None or not (self.result.active or self.result.without_averages):
            return {}
        total = num_samples(everything)
        if total != sum(self.result.sizes):
            return {}
        largest = min(max(LARGEST_SIZE, *self.result.sizes), total // 4)
        sizes = [2**k for k in range(largest.bit_length()) if 2**k <= largest]
        modes, measured = self.modes(batch_statistics=True), {}
        with ExitStack() as changed:
            for _, site in named_sites(self.model):  # its groups would be smaller ones
                changed.callback(setattr, site, "norm_batch_size", site.norm_batch_size)
                site.norm_batch_size = None
            for size in sizes:
                count = total // size
                chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_GROUPS)).astype(int))
                try:
                    losses = [
                        self.run(take(everything, k * size, (k + 1) * size), modes) for k in chosen
                    ]
                except UserError:  # one value per channel has no variance
                    continue
                values = np.array(losses)
                measured[size] = float(values.mean()), standard_error(values, np.ones(len(values)))
        return measured

    def measure_eps(self) -> dict[float, EpsTrial]:
        """Whether running averages fit the moments of training when eps is another."""
        sites, few = self.result.sites, self.batches[:MOST_TRIALS]
        if not self.result.active:
            return {}
        eps, trials = {site: site.norm.eps for site in sites}, {}
        for factor in (1.0, *EPS_FACTORS):
            if trials and trials[1.0].distance < NEAR:
                break
            try:
                for site in sites:
                    site.norm.eps = eps[site] * factor
                moments = self.losses_with_moments(self.training, few).moments
                far = [
                    float(values.median())
                    for site in self.result.active
                    for values in distances_of(site, moments[site])
                    if len(values)
                ]
                losses = self.losses_of(few, self.modes())
                trials[factor] = EpsTrial(losses, max(far, default=0.0))
            finally:
                for site in sites:
                    site.norm.eps = eps[site]
        return trials

    # --- Evaluation mode, and one step -----------------------------------------------------------

    @torch.no_grad()
    def check_evaluation(self) -> None:
        """Whether samples see each other, forwards differ, or state moves in evaluation mode."""
        result, batch = self.result, self.batches[0]
        num, set_to = num_samples(batch), self.evaluation
        set_modes(set_to)

        def outputs(part: Any) -> Tensor | None:
            try:
                output, _ = output_of(self.model, part)
            except Exception:  # a part of a batch may not be one
                return None
            values = output if isinstance(output, Mapping | tuple | list) else [output]
            values = list(values.values()) if isinstance(values, Mapping) else values
            tensors = [value for value in values if isinstance(value, Tensor)]
            fits = [t for t in tensors if t.ndim and len(t) == num_samples(part)]
            return fits[0].float() if fits else None

        first, again = outputs(batch), outputs(batch)
        after = read_state(self.model)
        result.moved = [n for n, v in after.items() if not _equal(v, self.state[n])]
        self.restore()
        if first is None or again is None or not first.isfinite().all():
            return
        close = 1e-3 * float(first.abs().max()) + 1e-6
        result.is_random = float((first - again).abs().max()) > close
        half = outputs(take(batch, 0, num // 2)) if num > 1 else None
        self.restore()
        if half is not None and not result.is_random and half.shape[1:] == first.shape[1:]:
            result.mixes = not float((half - first[: len(half)]).abs().max()) <= close

    def count_updates(self) -> Updates:
        """Calls of each site in the forward and in the backward pass of one training step."""
        sites = [*self.result.active]
        counts: list[dict[str, int]] = [{site.name: 0 for site in sites} for _ in range(2)]
        phase = 0

        def count(site: NormSite) -> Callable[..., None]:
            def add(module: nn.Module, *_: Any) -> None:
                counts[phase][site.name] += module.training

            return add

        class Step(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.model = model

            def forward(self, batch: Any, loss: Loss) -> None:
                nonlocal phase
                value = loss_on(self.model, batch, loss)
                phase = 1
                value.backward()

        set_modes(self.training)
        batch = take(self.batches[0], 0, MOST_IN_BACKWARD)
        step = Step(self.model)
        # Stand-ins for the parameters, so that neither their gradients nor their hooks are touched.
        stand_ins = {
            name: value.detach().requires_grad_(value.requires_grad)
            for name, value in step.named_parameters()
        }
        with ExitStack() as hooks:
            for site in sites:
                hooks.callback(site.entry.register_forward_pre_hook(count(site)).remove)
            try:
                with torch.enable_grad():
                    functional_call(step, stand_ins, (batch, self.loss))
            except Exception as error:  # of foreign code, any kind
                return Updates(counts[0], counts[1], f"{type(error).__name__}: {first_line(error)}")
            finally:
                self.restore()
        return Updates(counts[0], counts[1])


@dataclass(frozen=True)
class _Pass:
    losses: Losses
    moments: dict[NormSite, list[Moments | None]]
    spread: Tensor | None


def _of_all_calls(seen: Samples, site: NormSite) -> Moments | None:
    """The moments of the samples of all calls of a site, as those of one; None without a call."""
    calls = seen[site]
    if len(calls) <= 1:
        return calls[0] if calls else None
    counts = [torch.as_tensor(c.count, device=c.mean.device).expand_as(c.mean) for c in calls]
    means, variances = (torch.cat(values) for values in zip(*(c[:2] for c in calls), strict=True))
    return Moments(means, variances, torch.cat(counts).to(means.dtype))


def _of_others(site: NormSite, values: list[Moments | None], index: int) -> Population:
    """The moments of all batches but one."""
    present = [(k, value) for k, value in enumerate(values) if value is not None]
    others = [value for k, value in present if k != index] or [value for _, value in present]
    return pool_batches(site, others)


def _equal(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=0, atol=0, equal_nan=first.is_floating_point())


def _describe(inputs: list[Tensor]) -> dict[str, float]:
    values = torch.cat([x.detach().flatten().double().cpu() for x in inputs])
    if not len(values):
        return {}
    numbers = {"min": values.min(), "max": values.max(), "mean": values.mean(), "std": values.std()}
    return {name: float(number) for name, number in numbers.items()}
