"""Checks a built network before it trains: mixing of samples, leaks, padding, and gradients."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from normexp.batching.replicas import Batch, InTurn, Stacked, model_arguments
from normexp.batching.sizes import Sizes
from normexp.checks.probe import Probe, fixed_draws, moved_state, moves
from normexp.checks.sites import (
    EnteredSite,
    Reach,
    SiteOnMaps,
    enter_sites,
    measure_reaches,
    name_some,
    naming,
    network_probe,
    probe_batch,
    run_through,
)
from normexp.data.dataset import Data
from normexp.errors import UserError, first_line
from normexp.norms.site import Site, named_sites

logger = logging.getLogger(__name__)

PROBE_SAMPLES = 4
EXTRA_POSITIONS = 3  # padding appended to a site's input
FEW_VALUES = 8  # warn of statistics over fewer values
MODES = (True, False)


@dataclass(frozen=True)
class Leak:
    """A way from later positions to earlier outputs.

    Attributes:
        where: the names of the sites, or the model if no norm leaks.
        remedy: what to change.
    """

    where: str
    remedy: str


@dataclass(frozen=True)
class Traits:
    """Properties of a built network, measured before its training.

    Attributes:
        mixes_samples: in training, a sample's output or gradient, or the running state, depends on
            other samples.
        mixes_samples_in_evaluation: a sample's output in evaluation depends on other samples.
        leak: how a later position moves an earlier output in evaluation; language models only.
        leaks_future_in_training: a later position moves an earlier output in training.
        draws_for_itself: a module uses torch's global random state.
        stacking_obstacle: why replicas cannot run under vmap.
        elements_per_sample: values of one sample that reach all sites.
        reaches: the sites whose norm takes a statistic, and how far it reaches.
    """

    mixes_samples: bool
    mixes_samples_in_evaluation: bool
    leak: Leak | None
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
    check_split(network, sizes)
    group_size = smallest_group(sizes, len(data.train), drop_last=drop_last)
    first = probe_batch(data, min(group_size, PROBE_SAMPLES))
    elements = run_through(network, first, sizes.norm_batch_size)
    batch = probe_batch(data, PROBE_SAMPLES)
    sites = enter_sites(network, batch)
    reaches = measure_reaches(sites)
    check_reaches(reaches, group_size)
    if len(batch["inputs"]) > 1 and ignores_inputs(network, batch):
        raise UserError(
            "with this norm the model's output is the same for every input, for example because it "
            "averages positions after a norm that centres them; try norm=layer"
        )
    check_padding(network, data)
    leaks = {mode: find_leak(network, sites, batch, data, training=mode) for mode in MODES}
    _judge_leaks(leaks, allow_leak=allow_leak)
    own_draws = network_probe(network, training=True).observe(*model_arguments(batch)).drew
    obstacle = "a module draws its own random numbers" if own_draws else None
    _warn_of_frozen(parameters_without_gradient(network, batch))
    mixes = {mode: mixes_samples(network, sites, batch, data, training=mode) for mode in MODES}
    return Traits(
        mixes_samples=mixes[True],
        mixes_samples_in_evaluation=mixes[False],
        leak=leaks[False],
        leaks_future_in_training=leaks[True] is not None,
        draws_for_itself=own_draws,
        stacking_obstacle=obstacle or cannot_stack(network, batch),
        elements_per_sample=elements,
        reaches=reaches,
    )


# ---------------------------------------------------------------- other samples


def mixes_samples(
    network: nn.Module, sites: Sequence[EnteredSite], batch: Batch, data: Data, *, training: bool
) -> bool:
    """True if a sample depends on others at a site, or anywhere in the network."""
    for entered in sites:
        with naming(entered):
            if entered.probe(training=training).reads_samples(entered.values(), training=training):
                return True
    probe = network_probe(network, training=training, opened=True, vocab_size=data.vocab_size)
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


def smallest_group(sizes: Sizes, num_samples: int, *, drop_last: bool) -> int:
    """Samples in the smallest set that shares batch statistics in an epoch of `num_samples`."""
    rest = 0 if drop_last else num_samples % sizes.batch_size
    if not rest:
        return sizes.norm
    last_micro = rest % sizes.micro or sizes.micro
    return last_micro % sizes.norm or sizes.norm


def check_split(network: nn.Module, sizes: Sizes) -> None:
    """Refuses a split step for norms that declare their state sequential.

    The parts of a step all begin from the same state, and their states are merged; a sequential
    state cannot be merged. The norm must declare this, because no probe can detect it.
    """
    if sizes.norm == sizes.batch_size:
        return
    sequential = [
        name
        for name, site in named_sites(network)
        if any(getattr(module, "sequential_state", False) for module in site.modules())
    ]
    if sequential:
        key = "norm_batch_size" if sizes.norm < sizes.micro else "micro_batch_size"
        raise UserError(
            f"{key}={getattr(sizes, key)} splits a step of {sizes.batch_size} samples, and the "
            f"state of the norm at {name_some(sequential)} is sequential; try {key}=null"
        )


# ---------------------------------------------------------------- later positions


def find_leak(
    network: nn.Module, sites: Sequence[EnteredSite], batch: Batch, data: Data, *, training: bool
) -> Leak | None:
    """Finds how a later position moves an earlier output of a language model; None if none does."""
    if data.task != "language_modeling":
        return None
    length = batch["inputs"].shape[1]
    leaking = [entered for entered in sites if site_leaks(entered, length, training=training)]
    if leaking:
        names = name_some([entered.name for entered in leaking])
        return Leak(names, _find_remedy(leaking[0], length))
    probe = network_probe(network, training=training, opened=True, vocab_size=data.vocab_size)
    if probe.reads_later(batch["inputs"], 1, batch.get("mask")) is not None:
        return Leak("the model outside its norms", "mask its attention, or use model=gpt")
    return None


def site_leaks(entered: EnteredSite, length: int, *, training: bool) -> bool:
    """True if a site reads later positions; False if its positions are not those of the text."""
    if entered.shape[2] != length:
        return False
    with naming(entered):
        probe = entered.probe(training=training)
        return probe.reads_later(entered.values(), 2) is not None


def _find_remedy(entered: EnteredSite, length: int) -> str:
    """Suggests a replacement for a leaking norm, by what it pools in evaluation."""
    probe, x = entered.probe(training=False), entered.values()
    if probe.reads_across(x, 0):
        return "norm=batch with norm.track_running_stats=true, or norm=batch_per_position"
    if not probe.reads_across(x, 1):
        return "norm=causal_instance"
    remedy = "norm=causal_group"
    site = entered.module.site
    if site.view == "sequence":
        as_tokens = SiteOnMaps(Site(site.norm, "token", None), entered.module.positions)
        try:
            if not site_leaks(replace(entered, module=as_tokens), length, training=False):
                return f"{remedy} or norm.view=token"
        except UserError:  # a norm that needs positions
            pass
    return remedy


def _judge_leaks(leaks: Mapping[bool, Leak | None], *, allow_leak: bool) -> None:
    in_training, leak = leaks[True], leaks[False]
    if leak is not None and not allow_leak:
        raise UserError(
            f"a later position moves an earlier output at {leak.where}, so the loss is "
            f"meaningless; try {leak.remedy}, or allow_leak=true to train it with every number "
            "marked INVALID"
        )
    if leak is None and in_training is not None:
        logger.info(
            "in training a later position moves an earlier output at %s, so train/loss is "
            "meaningless; evaluation with running statistics is not affected",
            in_training.where,
        )


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
        with naming(entered):
            mixes = entered.probe(training=True).reads_across(entered.values(), 0)
        if mixes:
            raise UserError(
                f"the norm at {entered.name} mixes samples but takes no mask, and texts of "
                "different length reach it one at a time; try norm.view=token, or give its "
                "forward an argument `mask`"
            )
    reading = [entered.name for entered in sites if site_reads_padding(entered)]
    if reading:
        raise UserError(
            f"norm reads padding at {name_some(reading)}: it moves real positions or the running "
            "state; have its forward leave out where its argument `mask` is false"
        )
    if model_reads_padding(network, batch, data):
        raise UserError(
            "model reads padding: its content or amount moves the output, and no norm does; use "
            "`mask` in attention and pooling, and hand it to each site"
        )


def padded_batch(data: Data, num_samples: int) -> Batch | None:
    """The shorter half of training samples, so that all have padding; None without padding."""
    mask = getattr(data.train, "mask", None)
    if mask is None or bool(mask.all()):
        return None
    order = mask.sum(dim=1).argsort(stable=True)
    order = order[mask[order].logical_not().any(dim=1)]
    places = torch.linspace(0, (len(order) - 1) / 2, num_samples).long()
    return data.train.gather(order[places])


def site_reads_padding(entered: EnteredSite) -> bool:
    """True if the values or amount of a site's padding move real outputs or the state."""
    if entered.mask is None:
        return False
    values = entered.values(num_positions=entered.shape[2] + EXTRA_POSITIONS)
    with naming(entered):
        probes = (entered.probe(training=training) for training in MODES)
        return any(reads_padding(probe, values, entered.mask) for probe in probes)


def reads_padding(probe: Probe, values: Tensor, mask: Tensor) -> bool:
    """Like `site_reads_padding` for a probe, `values` (N, C, P + EXTRA_POSITIONS), mask (N, P)."""
    length = mask.shape[1]
    x, real = values[:, :, :length], mask.unsqueeze(1)
    before = probe.observe(x, mask, upstream=real if probe.module.training else None)
    if probe.influence(x, real, mask, before=before, state=True):
        return True
    longer = functional.pad(mask, (0, EXTRA_POSITIONS), value=False)
    try:
        after = probe.observe(values, longer)
    except Exception:  # foreign code: a norm for one length
        return False
    plain = probe.observe(x, mask)
    pair = (torch.where(real, o.output[:, :, :length], 0) for o in (plain, after))
    return moves(*pair) or moved_state(plain.state, after.state) is not None


def model_reads_padding(network: nn.Module, batch: Batch, data: Data) -> bool:
    """True if padding moves a network's outputs, with norms in either mode and dropout off.

    Tries less padding instead of more, because learned positions end at the longest text.
    """
    inputs, mask = batch["inputs"], batch["mask"]
    longest = int(mask.any(dim=0).nonzero().max()) + 1
    for training in MODES:
        probe = network_probe(network, training=False, opened=True, vocab_size=data.vocab_size)
        for _, site in named_sites(probe.module):
            site.train(training)
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


# ---------------------------------------------------------------- gradients and parameters


def check_optimizer(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for a parameter that requires a gradient but is in no group.

    Args:
        optimizer: built for the parameters of this network.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n, p in network.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise UserError(
            f"parameter {name_some(missing)} requires a gradient but is not in the optimizer; "
            "try another optim, or set requires_grad=False on what is not to be trained"
        )


def parameters_without_gradient(network: nn.Module, batch: Batch) -> list[str]:
    """Names of norm parameters without a gradient after a backward of the cross-entropy."""
    own = network_probe(network, training=True).module
    with fixed_draws(), torch.enable_grad():
        output = own(*model_arguments(batch))  # (N, classes) or (B, T, V)
        functional.cross_entropy(output.flatten(0, -2), batch["targets"].flatten()).backward()
    return [
        f"{name}.{parameter_name}"
        for name, site in named_sites(own)
        for parameter_name, parameter in site.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]


def _warn_of_frozen(names: Sequence[str]) -> None:
    if names:
        logger.warning("no gradient reaches %s of the norm, so it is not trained", name_some(names))


def ignores_inputs(network: nn.Module, batch: Batch) -> bool:
    """True if every sample has the same output, even after zero parameters are replaced."""
    probe = network_probe(network, training=True, opened=True)
    inputs = batch["inputs"].clone()
    floating = inputs.is_floating_point()
    inputs[0] = 3 * inputs[0].flip(-1) + 1 if floating else inputs[0].roll(1, dims=-1)
    output = probe.observe(*model_arguments({**batch, "inputs": inputs})).output
    return not moves(output[:1].expand_as(output), output, scale=1e-2)


def cannot_stack(network: nn.Module, batch: Batch) -> str | None:
    """Says why two replicas cannot run under vmap; None if they can and agree."""
    networks = [copy.deepcopy(network).train() for _ in range(2)]
    pair = {name: torch.stack([value, value]) for name, value in batch.items()}

    def outputs(output: Tensor, _: Batch) -> dict[str, Tensor]:
        return {"output": output}

    try:
        with torch.no_grad():
            replicas = Stacked(networks)
            stacked = replicas.measure(pair, outputs)["output"]
            alone = InTurn(networks).measure(pair, outputs)["output"]
    except Exception as error:  # foreign modules may raise anything; the fallback is exact
        return first_line(error)
    try:
        copy.deepcopy(replicas)
    except Exception:  # a tensor from inside vmap cannot be used outside
        return "a module keeps a tensor of its forward outside its buffers"
    return "its outputs under vmap differ" if moves(alone, stacked, scale=1e-2) else None
