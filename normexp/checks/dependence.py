"""Questions about dependence: on other samples, later positions, padding, scale and shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normexp.batching.replicas import Batch
from normexp.checks.asking import Answer, measured, show, skipped
from normexp.checks.lone_norm import LoneNorm, NormCase, Shape, accepts
from normexp.checks.network import BuiltNetwork, Case, places_where
from normexp.checks.probe import (
    EVERYWHERE,
    MODES,
    REFUSALS,
    TOLERANCE,
    Probe,
    change,
    difference,
    in_float64,
    moves,
    normal,
)
from normexp.checks.sites import EnteredSite, SiteOnMaps, enter_sites, name_some
from normexp.errors import UserError, first_line
from normexp.norms.adapt import EPS_NAMES
from normexp.norms.parts import CONVOLUTIONS
from normexp.norms.site import Site, named_sites, takes_mask

PADDED = (4, 5)  # samples and positions
REAL = (5, 3, 2, 4)  # positions of each sample that are real
SCALES = (4.0, 0.3)
SHIFTS = (3.0, -20.0)
TINY_EPS = 1e-12
SMALL_STD = 1e-3  # its variance, 1e-6, lies below the usual eps
BATCHES = (4, 32)
MANY = 33  # samples, or positions in a row
MAP = (4, 4)  # positions per sample where batches are compared
Z_TOLERANCE = 1e-3  # of z-scores; eps is usually smaller
GAP_STEPS = 60  # training batches, after which 0.2 % is left of a start at momentum 0.1

EXTRA_POSITIONS = 3  # of padding, appended to ask about its amount
FEW_VALUES = 8  # warn of statistics over fewer values
OUTSIDE = "the model outside its norms"

# ---------------------------------------------------------------- the inputs of a norm


def with_many_samples(norm: LoneNorm) -> list[Shape]:
    many = (MANY, *norm.shapes[0][1:])
    return [*norm.shapes, *([many] if accepts(norm.at(many)) else [])]


def with_positions(norm: LoneNorm) -> list[Shape]:
    """Inputs with positions, also with many in a row."""
    short = norm.with_dims(3, 4, 5)
    long = [(*shape[:-1], MANY) for shape in short[:1]]
    return short + [shape for shape in long if accepts(norm.at(shape))]


def texts(norm: LoneNorm) -> list[Shape]:
    return [shape for shape in with_positions(norm) if len(shape) == 3]


def padded_text(norm: LoneNorm) -> list[Shape]:
    shape = (PADDED[0], norm.num_features, PADDED[1])
    return [shape] if shape in norm.shapes else []


# ---------------------------------------------------------------- other samples and channels


def mixes_samples(case: Case, training: bool) -> str | None:
    """Do other samples move an output, a gradient or a running state?"""
    return _first(probe.reads_samples(gradients=training) for probe in case.probes(training))


def pools_channels(case: Case, training: bool) -> str | None:
    """Do other channels move an output or a gradient?"""
    return _first(probe.reads_across(1, gradients=training) for probe in case.probes(training))


def pools_positions(case: NormCase, training: bool) -> str | None:
    """Do other positions move an output or a gradient?"""
    moved = _first(probe.reads_across(2, gradients=training) for probe in case.probes(training))
    # Later positions are other positions, so the two lines agree.
    return moved or (leaks_future(case, training) if len(case.shape) == 3 else None)


def _first(answers: Iterator[str | None]) -> str | None:
    return next((answer for answer in answers if answer is not None), None)


def where_samples_mix(network: BuiltNetwork, training: bool) -> str | None:
    """A norm, or else the model outside of them, that lets samples influence each other."""
    ask = partial(places_where, mixes_samples, training=training)
    site = next(ask(network.stages), None) or next(ask(network.crowded_stages), None)
    if site is not None:
        return name_some(site.names)
    if not mixes_samples(network.whole(network.many_samples), training):
        return None
    bare = network.bare
    return _blame(network, mixes_samples(bare.whole(bare.many_samples), training) is not None)


def _blame(network: BuiltNetwork, bare_does: bool) -> str:
    """Where the fault of a whole network lies if no site shows it by itself.

    Args:
        bare_does: the network without its norms has the fault as well.
    """
    names = [name for site in network.sites for name in site.names]
    return OUTSIDE if bare_does or not names else name_some(names)


def samples_mix(network: BuiltNetwork) -> bool:
    """In training, does a sample depend on other samples?"""
    return network.once(where_samples_mix, True) is not None


def samples_mix_in_evaluation(network: BuiltNetwork) -> bool:
    """In evaluation, does a sample depend on other samples?"""
    return network.once(where_samples_mix, False) is not None


def samples_mix_outside_norms(network: BuiltNetwork) -> str | None:
    """Does anything but the norms mix samples?"""
    if network.once(where_samples_mix, True) != OUTSIDE:
        return None
    return (
        "the model mixes samples outside its norms, or along another axis than the first of a "
        "norm's input; norm_batch_size has no effect there"
    )


def other_first_axis(network: BuiltNetwork) -> str | None:
    """Is the first axis, which sub-batches split, that of samples?

    Window attention, for example, puts windows first.
    """
    count, sizes = len(network.batch["targets"]), network.sizes
    odd = [(name, e.shape[0]) for e in network.sites if e.shape[0] != count for name in e.names]
    if not odd or sizes.norm >= sizes.micro or not samples_mix(network):
        return None
    return (
        f"norm_batch_size={sizes.norm}: {name_some([name for name, _ in odd])} get {odd[0][1]} "
        f"rows for {count} samples, so no sub-batch of samples can be cut; try "
        "norm_batch_size=null"
    )


# ---------------------------------------------------------------- values per statistic


@dataclass(frozen=True, order=True)
class Reach:
    """How many values a statistic pools: of one sample, and of each further one."""

    of_sample: int
    of_others: float

    def num_values(self, group_size: int) -> int:
        """Values in the statistic when `group_size` samples share one."""
        return self.of_sample + round(self.of_others * (group_size - 1))


def reach_of(site: EnteredSite) -> Reach | None:
    """How many values do a site's statistics pool in training? None if it takes no statistic.

    Counts the outputs that an outlier at the first position moves, in two samples and channels;
    cumulative statistics carry the first position to all later ones. If only the outlier's own
    output moves, the input is rescaled: a statistic over one value gives the same (x - x) or
    x / |x| again, while a norm without statistics changes. Changes are relative to what the sign
    of the input moves, as a bias or a large running variance may hide the input in the output.
    """
    probe = site.probe(training=True, in_double=True)
    (x,), before = probe.inputs, probe.observe().output
    if not before.isfinite().all():
        raise UserError("returns NaN or infinity in training for inputs of size 1")
    least = (probe.tolerance if probe.is_double else TOLERANCE) * before.abs().max()
    by_sign = (before - probe.observe(-x).output).abs().amax(dim=(0, 2), keepdim=True)  # (1, C, 1)
    reaches: list[Reach] = []
    for sample, channel in ((0, 0), (len(x) - 1, x.shape[1] - 1)):
        changed = x.clone()
        changed[sample, channel, 0] += math.sqrt(x.numel())
        far = (probe.observe(changed).output - before).abs()
        moved = ~(far <= (TOLERANCE * by_sign).clamp_min(least))  # (N, C, P), true for NaN
        of_samples = moved.flatten(1).sum(dim=1)
        of_sample = int(of_samples[sample])
        others = int(of_samples.sum()) - of_sample
        moved[sample, channel, 0] = False
        if moved.any():
            reaches.append(Reach(max(of_sample, 1), others / max(len(x) - 1, 1)))
    if reaches:
        return max(reaches)
    small, large, flipped = (probe.observe(scale * x).output for scale in (0.1, 3.0, -3.0))
    by_sign, by_scale = ((large - other).abs().max() for other in (flipped, small))
    return Reach(1, 0.0) if by_scale <= max(1e-2 * by_sign, least) else None


def reaches_of(network: BuiltNetwork) -> dict[str, Reach]:
    """The reach of each site that takes statistics, the smallest over its input shapes."""
    return measure_reaches(network.sites)


def measure_reaches(sites: Sequence[EnteredSite]) -> dict[str, Reach]:
    reaches: dict[str, Reach] = {}
    for site in sites:
        with site.naming_errors():
            reach = reach_of(site)
        if reach is not None:
            reaches |= {name: min(reaches.get(name, reach), reach) for name in site.names}
    return reaches


def _values_per_statistic(network: BuiltNetwork) -> dict[str, int]:
    reaches = network.once(reaches_of)
    return {name: reach.num_values(network.group_size) for name, reach in reaches.items()}


def statistics_over_one_value(network: BuiltNetwork) -> str | None:
    """Has each statistic more than one value?"""
    single = [name for name, count in _values_per_statistic(network).items() if count == 1]
    if not single:
        return None
    return (
        f"the norm takes statistics over 1 value at {name_some(single)}, which erases its "
        f"input (samples per statistic: {network.group_size}); try a larger batch_size or "
        "norm_batch_size, fewer groups, or norm=layer"
    )


def statistics_over_few_values(network: BuiltNetwork) -> str | None:
    """Has each statistic many values?"""
    counts = {n: c for n, c in _values_per_statistic(network).items() if c <= FEW_VALUES}
    said = [
        f"statistics over only {count} values at "
        + name_some([name for name, other in counts.items() if other == count])
        for count in sorted(set(counts.values()))
    ]
    return "; ".join(said) or None


# ---------------------------------------------------------------- later positions


def leaks_future(case: Case, training: bool) -> str | None:
    """Do later positions of a text (N, C, T) move an earlier output, or its gradients?"""
    probes = case.probes(training)
    return "output" if any(probe.reads_later() is not None for probe in probes) else None


def where_future_leaks(network: BuiltNetwork, training: bool) -> str | None:
    """Where does a later position of a language model move an earlier output?"""
    if network.data.task != "language_modeling":
        return None
    sites = list(places_where(leaks_future, _sites_of_texts(network), training=training))
    if sites:
        return name_some([name for site in sites for name in site.names])
    if not leaks_future(network.whole(network.batch), training):
        return None
    return _blame(network, leaks_future(network.bare.whole(network.batch), training) is not None)


def _sites_of_texts(network: BuiltNetwork) -> list[EnteredSite]:
    length = network.batch["inputs"].shape[1]
    return [site for site in network.stages if site.shape[2] == length]


def leak(network: BuiltNetwork) -> str | None:
    """Where does a later position move an earlier output in evaluation?"""
    return network.once(where_future_leaks, False)


def future_leaks_in_training(network: BuiltNetwork) -> bool:
    """Does a later position move an earlier output in training?"""
    return network.once(where_future_leaks, True) is not None


def future_leaks_in_evaluation(network: BuiltNetwork) -> str | None:
    """Is the loss of a language model a likelihood?"""
    where = leak(network)
    if not where or network.allow_leak:
        return None
    return (
        f"a later position moves an earlier output at {where}, so the loss is "
        f"meaningless; try {find_remedy(network)}, or allow_leak=true to train it with "
        "every number marked INVALID"
    )


def future_leaks_in_training_alone(network: BuiltNetwork) -> str | None:
    """Is the training loss of a language model a likelihood?"""
    where = network.once(where_future_leaks, True)
    if not where or leak(network):
        return None
    return (
        f"in training a later position moves an earlier output at {where}, so train/loss is "
        "meaningless; evaluation with running statistics is not affected"
    )


def find_remedy(network: BuiltNetwork) -> str:
    """Suggests a replacement for the first norm that leaks, from what it pools in evaluation."""
    leaking = next(places_where(leaks_future, _sites_of_texts(network), training=False), None)
    if leaking is None:
        return "mask its attention, or use model=gpt"
    probe = leaking.probe(training=False)
    if probe.reads_across(0):
        return "norm=batch with norm.track_running_stats=true, or norm=batch_per_position"
    if not probe.reads_across(1):
        return "norm=causal_instance"
    remedy, site = "norm=causal_group", leaking.module.site
    if site.view == "sequence":
        as_tokens = SiteOnMaps(Site(site.norm, "token", None), leaking.module.positions)
        with suppress(Exception):  # of a norm that needs positions
            if not leaks_future(replace(leaking, module=as_tokens), False):
                return f"{remedy} or norm.view=token"
    return remedy


# ---------------------------------------------------------------- padding


def reads_masked(case: NormCase, training: bool) -> Answer | str | None:
    """Does the content or amount of masked positions move real outputs or the state?"""
    norm = case.trained(torch.float32)
    if not takes_mask(norm):
        return skipped("its forward has no argument `mask`; it is given the real positions only")
    mask = torch.arange(PADDED[1]) < torch.tensor(REAL)[:, None]
    module = SiteOnMaps(Site(norm, "sequence", None), torch.Size(PADDED[1:]))
    site = EnteredSite(["norm"], module, torch.Size(case.shape), mask)
    return "output" if reads_padding(site, training) else None


def reads_padding(site: EnteredSite, training: bool) -> bool:
    """Do the values or amount of padding move real outputs or the state?"""
    mask = site.mask
    if mask is None:
        return False
    return any(probe.reads_padding(EXTRA_POSITIONS) for probe in site.probes(training, mask))


def padding_is_read(network: BuiltNetwork) -> str | None:
    """Does padding move a real output, a gradient or a running state?"""
    for batch in network.padded_batches:
        fault = _padding_of(network, batch)
        if fault is not None:
            return fault
    return None


def _padding_of(network: BuiltNetwork, batch: Batch) -> str | None:
    """The message about padding that is read in a batch; None if none is."""
    sites = enter_sites(network.exposed, batch)
    for site in sites:
        norm_site = site.module.site
        if site.mask is None or norm_site.takes_mask or norm_site.view == "token":
            continue
        # A norm without `mask` gets one sample at a time, so it must not mix samples.
        with site.naming_errors():
            mixes = site.probe(training=True).reads_across(0)
        if mixes:
            return (
                f"the norm at {name_some(site.names)} mixes samples but its forward has no "
                "argument `mask`, so texts of different length reach it one at a time; try "
                "norm.view=token, or add `mask`"
            )
    in_any_mode = lambda site, _: any(reads_padding(site, mode) for mode in MODES)  # noqa: E731
    at_sites = list(places_where(in_any_mode, sites, training=True))
    where = name_some([n for site in at_sites for n in site.names])
    if not where and model_reads_padding(network, batch):
        where = _blame(network, model_reads_padding(network.bare, batch))
    if not where:
        return None
    if where == OUTSIDE:
        return (
            "model reads padding: its content or amount moves the output, and no norm does; use "
            "`mask` in attention and pooling, and pass it to each site"
        )
    return (
        f"norm reads padding at {where}: it moves real positions or the running "
        "state; its forward must leave out values where its argument `mask` is false"
    )


def model_reads_padding(network: BuiltNetwork, batch: Batch) -> bool:
    """Does padding move a network's outputs, with norms in either mode and dropout off?

    Tries less padding instead of more, because learned positions end at the longest text.
    """
    model, mask = network.exposed, batch["mask"]
    longest = int(mask.any(dim=0).nonzero().max()) + 1
    for training in MODES:
        for _, site in named_sites(model.eval()):
            site.train(training)
        wide = in_float64(model, batch["inputs"], mask) if network.has_foreign_model else None
        module, (inputs, _) = wide or (model, (batch["inputs"], mask))
        probe = Probe(
            *(module, inputs, mask),
            vocab_size=network.data.vocab_size,
            ways=1,
            is_sensitive=network.has_foreign_model,
        )
        before = probe.observe()
        others = [
            probe.observe(torch.where(mask, inputs, probe.replacement(inputs, way)), mask)
            for way in (0, 1)
        ]
        tolerances = [probe.tolerance] * len(others)
        with suppress(ValueError, RuntimeError):  # a model for one length
            others.append(probe.observe(inputs[:, :longest], mask[:, :longest]))
            tolerances.append(probe.tolerance_across_shapes)
        for after, tolerance in zip(others, tolerances, strict=True):
            if difference(before, after, EVERYWHERE, state=True, tolerance=tolerance) is not None:
                return True
    return False


# ---------------------------------------------------------------- running state


def has_running_state(case: NormCase) -> Answer:
    """Does a training forward change buffers?"""
    probe = Probe(case.build(), 1 + 2 * case.values())
    before = dict(probe.module.named_buffers())
    after = probe.observe().state
    changed = [n for n, b in after.items() if n not in before or not torch.equal(b, before[n])]
    return measured("yes", ", ".join(changed)) if changed else measured("no")


# ---------------------------------------------------------------- invariance

Change = Callable[[Tensor], Tensor]


def scaled_by_channel(x: Tensor) -> Tensor:
    factors = torch.linspace(0.5, SCALES[0], x.shape[1], dtype=x.dtype)
    return x * factors.view(-1, *[1] * (x.ndim - 2))


def changes_output(inputs_of: tuple[Change, ...], case: NormCase, training: bool) -> str | None:
    """Is the output the same after each of these changes of the input?"""
    x = case.values(torch.float64)
    return _tells_apart([x, *(change(x) for change in inputs_of)], case, training)


def behind_layer(norm: LoneNorm) -> list[Shape]:
    """Inputs that the convolution of the norm's slots may return."""
    return norm.with_dims(*(2, 3, 4, 5) if norm.slots.conv == "plain" else (4,))


@torch.no_grad()
def changes_with_weights(case: NormCase, training: bool) -> str | None:
    """Is the output the same if the weights of the preceding layer are scaled?

    The layer is a 1x1 convolution of the kind that the norm's slots set.
    """
    channels = case.lone.num_features
    layer = CONVOLUTIONS[case.lone.slots.conv](channels, channels, 1, bias=False).double()
    x = case.values(torch.float64).reshape(*case.shape[:2], -1, 1)
    inputs = []
    for factor in (1.0, SCALES[0]):
        layer.weight.copy_(factor * normal((channels, channels, 1, 1), 2))
        inputs.append(layer(x).reshape(case.shape))
    return _tells_apart(inputs, case, training)


def _tells_apart(inputs: list[Tensor], case: NormCase, training: bool) -> str | None:
    """Names a difference between the outputs; eps is tiny, as it breaks invariance to scale."""
    knobs: dict[str, Any] = {case.lone.eps_name: TINY_EPS} if case.lone.eps_name else {}
    norm = case.trained(**knobs).train(training)
    for module in norm.modules():  # also of norms whose signature has no eps
        for name in EPS_NAMES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, TINY_EPS)
    probe = Probe(norm)
    first, *others = (probe.observe(x).output for x in inputs)
    return "output" if any(moves(first, other) for other in others) else None


# ---------------------------------------------------------------- numbers


def effect_of_eps(case: NormCase) -> Answer:
    """By how much (root mean square) does the training output change if eps grows tenfold?"""
    name, eps = case.lone.eps_name, case.lone.eps_value
    if name is None or eps is None:
        return skipped("has no argument eps")
    knobs: list[dict[str, Any]] = [{name: factor * eps} for factor in (1, 10)]
    probes = [case.probe(**changed) for changed in knobs]
    effect = _distance(*(probe.observe(SMALL_STD * probe.inputs[0]).output for probe in probes))
    return measured(effect, f"eps {eps:g} to {10 * eps:g}, {show(case.shape)}")


def output_size(case: NormCase) -> Answer:
    """What is the root mean square of training outputs on standard normal inputs?

    If it grows with the batch size, larger batches gain from the scale alone.
    """
    out = Probe(case.build(torch.float64)).observe(case.values(torch.float64)).output
    return measured(_digits(float(out.square().mean().sqrt())), show(case.shape))


@torch.no_grad()
def gap_between_modes(case: NormCase) -> Answer:
    """How far apart (root mean square) are the outputs of both modes on a fresh batch?"""
    norm = case.trained()
    for seed in range(GAP_STEPS):
        norm(1 + 2 * case.values(torch.float64, seed))
    x = 1 + 2 * case.values(torch.float64, GAP_STEPS)
    evaluated, trained = norm.eval()(x), norm.train()(x)
    return measured(
        _distance(trained, evaluated), f"{GAP_STEPS} training batches {show(case.shape)}"
    )


def equals_instance_norm(case: NormCase) -> Answer:
    """Is a norm that mixes samples instance norm at one sample, as batch norm is?

    Up to its scale at eps: one sample of variance 1 is compared with its own z-scores.
    """
    if mixes_samples(case, True) is None:
        return skipped("mixes no samples")
    probe = case.probe()
    x = probe.inputs[0][:1]
    positions = list(range(2, x.ndim))
    try:
        out = probe.observe(x).output
    except REFUSALS as error:
        return measured("refused", first_line(error))
    centred = x - x.mean(positions, keepdim=True)
    expected = centred / centred.square().mean(positions, keepdim=True).sqrt()
    far = change(expected, out)
    if far < Z_TOLERANCE:
        return measured("yes", show((1, *case.shape[1:])))
    return measured("no", f"off by {far:.2g} of the largest value, {show((1, *case.shape[1:]))}")


def most_positions(norm: LoneNorm) -> list[Shape]:
    """The input with the most positions per sample."""
    return sorted(norm.with_dims(3, 4, 5), key=lambda shape: math.prod(shape[2:]))[-1:]


def batch_of(batch_size: int, norm: LoneNorm) -> list[Shape]:
    """A batch of features if the norm takes those, else of small maps or texts."""
    num_dims = min(len(shape) for shape in norm.shapes)
    positions = {2: (), 3: (MAP[0] * MAP[1],), 4: MAP, 5: (*MAP, 1)}[num_dims]
    return [(batch_size, norm.num_features, *positions)]


def _distance(before: Tensor, after: Tensor) -> float:
    scale = before.square().mean().sqrt().clamp(min=1e-30)
    return _digits(float((after - before).square().mean().sqrt() / scale))


def _digits(value: float) -> float:
    """Rounds to two digits if small, otherwise to three places; 0 for rounding errors."""
    if value < 1e-9:
        return 0.0
    return float(f"{value:.2g}") if value < 0.1 else round(value, 3)
