"""Checks a built network before it trains: mixing of samples, leaks, padding, and gradients."""

from __future__ import annotations

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from normexp.batching.replicas import Batch, model_arguments
from normexp.batching.sizes import Sizes
from normexp.checks.integrity import (
    cannot_stack,
    check_evaluation_draws,
    check_inputs_matter,
    check_saved_state,
    check_wiring,
)
from normexp.checks.probe import MODES, Probe, moved_state, moves
from normexp.checks.sites import (
    PROBE_SAMPLES,
    EnteredSite,
    Reach,
    SiteOnMaps,
    enter_sites,
    expose_branches,
    measure_reaches,
    name_some,
    probe_batch,
    shorten,
)
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.site import Site, named_sites

logger = logging.getLogger(__name__)

MAX_ELEMENTS = 2**15  # that reach a network's sites, where many samples are probed
NETWORK_CUTS = 4  # of a text, into before and after
FEW_VALUES = 8  # warn of statistics over fewer values


@dataclass(frozen=True)
class Traits:
    """Properties of a built network, measured before its training.

    Attributes:
        mixes_samples: in training, a sample's output or gradient, or the running state, depends on
            other samples.
        mixes_samples_in_evaluation: a sample's output in evaluation depends on other samples.
        leak: where a later position moves an earlier output in evaluation; language models only.
        leaks_future_in_training: a later position moves an earlier output in training.
        draws_for_itself: a module uses torch's global random state.
        stacking_obstacle: why replicas cannot run under vmap.
        elements_per_sample: values of one sample that reach all sites.
        reaches: the sites whose norm takes a statistic, and how far it reaches.
    """

    mixes_samples: bool
    mixes_samples_in_evaluation: bool
    leak: str | None
    leaks_future_in_training: bool
    draws_for_itself: bool
    stacking_obstacle: str | None
    elements_per_sample: int
    reaches: Mapping[str, Reach] = field(default_factory=dict)

    @property
    def leaks_future(self) -> bool:
        return self.leak is not None

    @property
    def pools(self) -> bool:
        """True if a norm takes statistics; otherwise it acts on each value by itself."""
        return bool(self.reaches) or self.mixes_samples

    def single_valued(self, group_size: int) -> list[str]:
        """Sites with statistics over a single value if `group_size` samples share them."""
        return [name for name, r in self.reaches.items() if r.num_values(group_size) == 1]


def examine(
    network: nn.Module, data: Data, sizes: Sizes, *, drop_last: bool, allow_leak: bool = False
) -> Traits:
    """Probes a network on a few training samples, at the sizes of its training.

    Raises:
        UserError: a forward fails, returns NaN or ignores its input; a statistic is over one value;
            padding is read; a sequential state would be split; a language model reads the future,
            unless `allow_leak`. Names the sites.
    """
    group_size = smallest_group(sizes, len(data.train), drop_last=drop_last)
    elements = count_elements(network, data, sizes, group_size)
    batch, own = probe_batch(data, PROBE_SAMPLES), expose_branches(network)
    short = shorten(own.train(), batch)
    check_wiring(own, short)
    sites = enter_sites(own, batch)
    check_split(sites, sizes)
    check_uses(sites)
    reaches = measure_reaches(sites)
    check_reaches(reaches, group_size)
    check_inputs_matter(own, short)
    check_padding(own, data)
    check_saved_state(own, short, sites)
    check_evaluation_draws(own, short)
    late = [site for site in map(EnteredSite.after_many_steps, sites) if site is not None]
    stages = [*sites, *late]
    leaks = {mode: find_leak(own, stages, batch, data, training=mode) for mode in MODES}
    check_leaks(leaks, stages, batch, allow_leak=allow_leak)
    own_draws = Probe(own.train()).observe(*model_arguments(short)).drew
    obstacle = "a module draws its own random numbers" if own_draws else None
    many = min(sizes.micro, max(PROBE_SAMPLES, MAX_ELEMENTS // max(elements, 1)))
    samples = shorten(own, probe_batch(data, many))
    at_sites = {
        mode: any(site.mixes_samples(sizes.micro, training=mode) for site in stages)
        for mode in MODES
    }
    mixes = {
        mode: at_sites[mode] or network_mixes(own, samples, data.vocab_size, training=mode)
        for mode in MODES
    }
    if mixes[True] and not at_sites[True]:
        logger.warning(
            "the model mixes samples outside its norms, or along another axis than the first of a "
            "norm's input; norm_batch_size has no effect there"
        )
    if mixes[True]:
        check_first_axis(sites, len(batch["targets"]), sizes)
    return Traits(
        mixes_samples=mixes[True],
        mixes_samples_in_evaluation=mixes[False],
        leak=leaks[False],
        leaks_future_in_training=leaks[True] is not None,
        draws_for_itself=own_draws,
        stacking_obstacle=obstacle or cannot_stack(network, short),
        elements_per_sample=elements,
        reaches=reaches,
    )


def check_leaks(
    leaks: Mapping[bool, str | None],
    sites: Sequence[EnteredSite],
    batch: Batch,
    *,
    allow_leak: bool,
) -> None:
    """Refuses a leak of the future in evaluation; logs one that is in training alone.

    Args:
        leaks: by mode, where a later position moves an earlier output; see `find_leak`.
    """
    if leaks[False] and not allow_leak:
        raise UserError(
            f"a later position moves an earlier output at {leaks[False]}, so the loss is "
            f"meaningless; try {find_remedy(sites, batch)}, or allow_leak=true to train it with "
            "every number marked INVALID"
        )
    if leaks[True] and not leaks[False]:
        logger.info(
            "in training a later position moves an earlier output at %s, so train/loss is "
            "meaningless; evaluation with running statistics is not affected",
            leaks[True],
        )


def count_elements(network: nn.Module, data: Data, sizes: Sizes, group_size: int) -> int:
    """The number of values per sample that reach the sites in a forward as in training.

    Raises:
        UserError: an error of a norm or the model, with the name of the site.
    """
    own = copy.deepcopy(network)
    for _, site in named_sites(own):
        site.norm_batch_size = sizes.norm_batch_size
    batch = probe_batch(data, min(group_size, PROBE_SAMPLES))
    sites = enter_sites(own, batch)
    return sum(len(e.names) * e.shape.numel() for e in sites) // len(batch["targets"])


# ---------------------------------------------------------------- other samples


def network_mixes(
    network: nn.Module, batch: Batch, vocab_size: int | None, *, training: bool
) -> bool:
    """True if a sample's result depends on other samples, through a site or any other module."""
    probe = Probe(network.train(training), vocab_size=vocab_size, ways=1)
    return probe.reads_samples(*model_arguments(batch), training=training) is not None


def check_reaches(reaches: Mapping[str, Reach], group_size: int) -> None:
    """Raises UserError for a statistic over one value; warns of statistics over a few."""
    counts = {name: reach.num_values(group_size) for name, reach in reaches.items()}
    degenerate = [name for name, count in counts.items() if count == 1]
    if degenerate:
        raise UserError(
            f"the norm takes statistics over 1 value at {name_some(degenerate)}, which erases its "
            f"input (samples per statistic: {group_size}); try a larger batch_size or "
            "norm_batch_size, fewer groups, or norm=layer"
        )
    few: defaultdict[int, list[str]] = defaultdict(list)
    for name, count in counts.items():
        if count <= FEW_VALUES:
            few[count].append(name)
    for count, names in sorted(few.items()):
        logger.warning("statistics over only %d values at %s", count, name_some(names))


def check_first_axis(sites: Sequence[EnteredSite], num_samples: int, sizes: Sizes) -> None:
    """Refuses sub-batches at sites whose first axis, which they split, is not that of samples.

    Window attention, for example, puts windows first.
    """
    odd = [(name, e.shape[0]) for e in sites if e.shape[0] != num_samples for name in e.names]
    if odd and sizes.norm < sizes.micro:
        raise UserError(
            f"norm_batch_size={sizes.norm}: {name_some([name for name, _ in odd])} get {odd[0][1]} "
            f"rows for {num_samples} samples, so no sub-batch of samples can be cut; try "
            "norm_batch_size=null"
        )


def smallest_group(sizes: Sizes, num_samples: int, *, drop_last: bool) -> int:
    """Samples in the smallest set that shares batch statistics in an epoch of `num_samples`."""
    rest = 0 if drop_last else num_samples % sizes.batch_size
    if not rest:
        return sizes.norm
    last_micro = rest % sizes.micro or sizes.micro
    return last_micro % sizes.norm or sizes.norm


def check_split(sites: Sequence[EnteredSite], sizes: Sizes) -> None:
    """Refuses a split step for norms with a sequential state.

    The parts of a step all begin from the same state, and their states are merged; a sequential
    state cannot be merged.
    """
    if sizes.norm == sizes.batch_size:
        return
    sequential = [name for entered in sites if entered.is_sequential() for name in entered.names]
    if sequential:
        key = "norm_batch_size" if sizes.norm < sizes.micro else "micro_batch_size"
        raise UserError(
            f"{key}={getattr(sizes, key)} splits a step of {sizes.batch_size} samples, and the "
            f"state of the norm at {name_some(sequential)} is sequential, as declared or because "
            f"its forward writes parameters; try {key}=null"
        )


def check_uses(sites: Sequence[EnteredSite]) -> None:
    """Warns of running state that several uses of a norm in one forward share."""
    uses = Counter(name for entered in sites for name in entered.names if entered.has_state)
    several = [name for name, count in uses.items() if count > 1]
    if several:
        logger.warning(
            "the model uses %s more than once in a forward, with one running state: precise "
            "statistics are those of the last use, and in accumulated steps the running variance "
            "leaves out how uses differ between parts",
            name_some(several),
        )


# ---------------------------------------------------------------- later positions


def find_leak(
    network: nn.Module, sites: Sequence[EnteredSite], batch: Batch, data: Data, *, training: bool
) -> str | None:
    """Where a later position of a language model moves an earlier output; None if it moves none."""
    if data.task != "language_modeling":
        return None
    inputs, *mask = model_arguments(batch)
    leaking = [e.names for e in sites if e.reads_later(inputs.shape[1], training=training)]
    if leaking:
        return name_some([name for names in leaking for name in names])
    probe = Probe(network.train(training), vocab_size=data.vocab_size, ways=1)
    cut = probe.reads_later(inputs, 1, *mask, max_cuts=NETWORK_CUTS)
    return None if cut is None else "the model outside its norms"


def find_remedy(sites: Sequence[EnteredSite], batch: Batch) -> str:
    """Suggests a replacement for the first norm that leaks, from what it pools in evaluation."""
    length = batch["inputs"].shape[1]
    leaking = [site for site in sites if site.reads_later(length, training=False)]
    if not leaking:
        return "mask its attention, or use model=gpt"
    entered, site = leaking[0], leaking[0].module.site
    with entered.probe(training=False) as probe:
        if probe.reads_across(entered.values(), 0):
            return "norm=batch with norm.track_running_stats=true, or norm=batch_per_position"
        if not probe.reads_across(entered.values(), 1):
            return "norm=causal_instance"
    remedy = "norm=causal_group"
    if site.view == "sequence":
        as_tokens = SiteOnMaps(Site(site.norm, "token", None), entered.module.positions)
        with suppress(UserError):  # of a norm that needs positions
            if not replace(entered, module=as_tokens).reads_later(length, training=False):
                return f"{remedy} or norm.view=token"
    return remedy


# ---------------------------------------------------------------- padding


def check_padding(network: nn.Module, data: Data) -> None:
    """Raises UserError if padding moves a real output, a gradient or a running state."""
    batch = padded_batch(data, PROBE_SAMPLES)
    if batch is None:
        return
    sites = enter_sites(network, batch)
    for entered in sites:
        site = entered.module.site
        if entered.mask is None or site.takes_mask or site.view == "token":
            continue
        # A norm without `mask` gets one sample at a time, so it must not mix samples.
        with entered.probe(training=True) as probe:
            mixes = probe.reads_across(entered.values(), 0)
        if mixes:
            raise UserError(
                f"the norm at {name_some(entered.names)} mixes samples but its forward has no "
                "argument `mask`, so texts of different length reach it one at a time; try "
                "norm.view=token, or add `mask`"
            )
    reading = [
        name
        for entered in sites
        if any(entered.reads_padding(training=mode) for mode in MODES)
        for name in entered.names
    ]
    if reading:
        raise UserError(
            f"norm reads padding at {name_some(reading)}: it moves real positions or the running "
            "state; its forward must leave out values where its argument `mask` is false"
        )
    if model_reads_padding(network, batch, data):
        raise UserError(
            "model reads padding: its content or amount moves the output, and no norm does; use "
            "`mask` in attention and pooling, and pass it to each site"
        )


def padded_batch(data: Data, num_samples: int) -> Batch | None:
    """Training samples from the shorter half of those with padding; None if none has padding."""
    mask = getattr(data.train, "mask", None)
    if mask is None or bool(mask.all()):
        return None
    order = mask.sum(dim=1).argsort(stable=True)
    order = order[mask[order].logical_not().any(dim=1)]
    places = torch.linspace(0, (len(order) - 1) / 2, num_samples).long()
    return data.train.gather(order[places])


def model_reads_padding(network: nn.Module, batch: Batch, data: Data) -> bool:
    """True if padding moves a network's outputs, with norms in either mode and dropout off.

    Tries less padding instead of more, because learned positions end at the longest text.
    """
    inputs, mask = batch["inputs"], batch["mask"]
    longest = int(mask.any(dim=0).nonzero().max()) + 1
    for training in MODES:
        for _, site in named_sites(network.eval()):
            site.train(training)
        probe = Probe(network, vocab_size=data.vocab_size, ways=1)
        before = probe.observe(inputs, mask)
        others = [(torch.where(mask, inputs, probe.replacement(inputs, w)), mask) for w in (0, 1)]
        try:
            others_shorter = [probe.observe(inputs[:, :longest], mask[:, :longest])]
        except (ValueError, RuntimeError):  # a model for one length
            others_shorter = []
        for after in [*(probe.observe(*other) for other in others), *others_shorter]:
            if moves(before.output, after.output) or moved_state(before.state, after.state):
                return True
    return False
