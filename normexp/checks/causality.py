"""Whether a later position of a text moves an earlier output, where the task is to predict it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from normexp.batching.replicas import Batch
from normexp.checks.probing import moved, output_of
from normexp.checks.reach import measure_reach
from normexp.checks.sites import ProbedSite, moved_places, name_some, outlier
from normexp.errors import UserError
from normexp.norms.site import Site


@dataclass(frozen=True)
class Leak:
    """A way for later positions to earlier outputs.

    Attributes:
        where: the sites by name, or the model where no norm leaks.
        remedy: what to change, fit to the norm that leaks.
    """

    where: str
    remedy: str


def find_leak(
    network: nn.Module,
    sites: Sequence[ProbedSite],
    batch: Batch,
    vocab_size: int,
    *,
    training: bool,
) -> Leak | None:
    """The leak of a language model in evaluation or training mode; None where it has none."""
    length = batch["inputs"].shape[1]
    leaking = [probed for probed in sites if site_leaks(probed, length, training=training)]
    if leaking:
        names = name_some([probed.name for probed in leaking])
        return Leak(names, _find_remedy(leaking[0], length))
    if model_leaks(network, batch, vocab_size, training=training):
        return Leak("the model outside its norms", "mask its attention, or use model=gpt")
    return None


def model_leaks(network: nn.Module, batch: Batch, vocab_size: int, *, training: bool) -> bool:
    """Whether other tokens from the middle on, or at the end alone, move outputs before them."""
    before = output_of(network, batch, training=training)
    for first in _cuts(batch["inputs"].shape[1]):
        changed = dict(batch)
        changed["inputs"] = batch["inputs"].clone()
        changed["inputs"][:, first:] = (batch["inputs"][:, first:] + 1) % vocab_size
        after = output_of(network, changed, training=training)
        if moved(before[:, :first], after[:, :first]):
            return True
    return False


def site_leaks(probed: ProbedSite, length: int, *, training: bool) -> bool:
    """The same of one site on random values; never where its positions are not the text's."""
    values = probed.values()
    if values.shape[2] != length:
        return False
    before, _ = probed.run(values, training=training)
    for first in _cuts(length):
        changed = values.clone()
        changed[:, 0, first:] += outlier(values)  # one channel, so that no sum over them cancels
        changed[:, 1:, first:] *= 3
        after, _ = probed.run(changed, training=training)
        if moved_places(before, after)[:, :, :first].any():
            return True
    return False


def _cuts(length: int) -> list[int]:
    """The positions from which on a text is changed: the middle one, and the last."""
    return [first for first in sorted({length // 2, length - 1}) if first > 0]


def _find_remedy(probed: ProbedSite, length: int) -> str:
    """What would serve in the place of this norm, by what it was measured to pool."""
    reach = measure_reach(probed, training=False)
    if reach.other_samples:
        return "norm=batch with norm.track_running_stats=true, or norm=batch_per_position"
    if not reach.other_channels:
        return "norm=causal_instance"
    remedy = "norm=causal_group"
    site = probed.site
    if site.view == "sequence":
        as_tokens = replace(probed, site=Site(site.norm, "token", site.norm_batch_size))
        try:
            if not site_leaks(as_tokens, length, training=False):
                return f"{remedy} or norm.view=token"
        except UserError:  # a norm that needs positions
            pass
    return remedy


def note_of(leak: Leak) -> str:
    """What a leak in training alone means for the numbers."""
    return (
        f"in training a later position moves an earlier output at {leak.where}: "
        "train/loss is no likelihood; evaluation with running statistics is"
    )


def refusal_of(leak: Leak) -> str:
    """Why a cell that leaks in evaluation is not trained."""
    return (
        f"a later position moves an earlier output at {leak.where}: no loss is a likelihood; try "
        f"{leak.remedy}, or allow_leak=true to train it with every number marked INVALID"
    )
