"""Whether padding, its content or its amount, moves what a network or one of its norms makes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, model_arguments
from normexp.checks.probing import moved, open_gates, scratch
from normexp.checks.reach import measure_reach
from normexp.checks.sites import ProbedSite, moved_places, name_some, outlier
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.site import named_sites
from normexp.norms.state import State, read_state

EXTRA_POSITIONS = 3  # of padding, behind what a site receives


def padded_batch(data: Data, num_samples: int) -> Batch | None:
    """Training samples of the shorter half, so that all have padding; None where nothing has."""
    mask = getattr(data.train, "mask", None)
    if mask is None or bool(mask.all()):
        return None
    order = mask.sum(dim=1).argsort(stable=True)
    order = order[mask[order].logical_not().any(dim=1)]
    places = torch.linspace(0, (len(order) - 1) / 2, num_samples).long()
    return data.train.gather(order[places])


def check_padding(
    network: nn.Module, sites: Sequence[ProbedSite], batch: Batch, vocab_size: int
) -> None:
    """Raises UserError where padding moves a real sample's output or a running state."""
    _refuse_unmasked_mixing(sites)
    modes = (True, False)
    reading = [p.name for p in sites if any(site_reads_padding(p, training=m) for m in modes)]
    if reading:
        raise UserError(
            f"norm reads padding at {name_some(reading)}: it moves real positions or the running "
            "state; have its forward leave out where its argument `mask` is false"
        )
    if any(model_reads_padding(network, batch, vocab_size, training=m) for m in modes):
        raise UserError(
            "model reads padding: its content or amount moves the output, and no norm does; use "
            "`mask` in attention and pooling, and hand it to each site"
        )


def site_reads_padding(probed: ProbedSite, *, training: bool) -> bool:
    """Whether other values in a site's padding, or more of it, move real outputs or the state."""
    mask = probed.mask
    if mask is None:
        return False
    length = mask.shape[1]
    values = probed.values(num_positions=length + EXTRA_POSITIONS)
    before = probed.run(values[:, :, :length], training=training, mask=mask)
    padding = ~mask.unsqueeze(1)
    changed = torch.where(
        padding, 3 * values[:, :, :length] + outlier(values), values[:, :, :length]
    )
    if _differs(before, probed.run(changed, training=training, mask=mask), mask):
        return True
    longer = nn.functional.pad(mask, (0, EXTRA_POSITIONS), value=False)
    try:
        after = probed.run(values, training=training, mask=longer)
    except UserError:  # a norm for one length
        return False
    return _differs(before, after, mask)


def _differs(before: tuple[Tensor, State], after: tuple[Tensor, State], mask: Tensor) -> bool:
    """Whether real outputs (N, C, T), or the states, differ."""
    real = mask.unsqueeze(1)
    length = mask.shape[1]
    pair = [torch.where(real, out[:, :, :length], 0) for out, _ in (before, after)]
    return bool(moved_places(pair[0], pair[1]).any()) or _states_differ(before[1], after[1])


def _states_differ(before: State, after: State) -> bool:
    return any(moved(before[name].double(), after[name].double()) for name in before)


def model_reads_padding(
    network: nn.Module, batch: Batch, vocab_size: int, *, training: bool
) -> bool:
    """The same of a whole network, norms in training mode and the rest, dropout, in evaluation.

    Less padding takes the place of more: a model has learned positions for no longer texts.
    """
    inputs, mask = batch["inputs"], batch["mask"]
    before = _output_and_state(network, batch, training=training)
    changed = {**batch, "inputs": torch.where(mask, inputs, (inputs + 1) % vocab_size)}
    after = _output_and_state(network, changed, training=training)
    if moved(before[0], after[0]) or _states_differ(before[1], after[1]):
        return True
    longest = int(mask.any(dim=0).nonzero().max()) + 1
    shorter = {**batch, "inputs": inputs[:, :longest], "mask": mask[:, :longest]}
    try:
        after = _output_and_state(network, shorter, training=training)
    except (ValueError, RuntimeError):  # a model for one length
        return False
    return moved(before[0], after[0]) or _states_differ(before[1], after[1])


def _output_and_state(network: nn.Module, batch: Batch, *, training: bool) -> tuple[Tensor, State]:
    with scratch(network, training=False, norm_batch_size=None) as own:
        open_gates(own)
        for _, site in named_sites(own):
            site.train(training)
        return own(*model_arguments(batch)), read_state(own)


def _refuse_unmasked_mixing(sites: Sequence[ProbedSite]) -> None:
    """A norm without `mask` gets one sample at a time: no use to one that mixes samples."""
    for probed in sites:
        site = probed.site
        if probed.mask is None or site.takes_mask or site.view == "token":
            continue
        if measure_reach(probed, training=True).other_samples:
            raise UserError(
                f"the norm at {probed.name} mixes samples but takes no mask, and texts of "
                "different length reach it one at a time; try norm.view=token, or give its "
                "forward an argument `mask`"
            )
