"""Running a built network on a few samples before training, to see what it does with them.

Every probe works on a copy of the network and leaves the global random state as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Batch, InTurn, Stacked, model_arguments
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.adapt import first_line
from normexp.norms.site import named_sites

# Relative size of a change that counts as one; rounding in float32 moves outputs by less.
MOVED = 1e-4
# Outputs are compared on this scale or their own, whichever is larger: below it lies rounding.
SMALLEST_SCALE = 1e-2


def probe_batch(data: Data, num_samples: int) -> Batch:
    """The first training samples, as a model receives them."""
    num = min(num_samples, len(data.train))
    batch = data.train.gather(torch.arange(num))
    batch["inputs"] = data.model_inputs(batch["inputs"])
    return batch


@contextmanager
def scratch(
    network: nn.Module, *, training: bool, norm_batch_size: int | None
) -> Iterator[nn.Module]:
    """A copy of the network to probe, under a fixed global random state."""
    own = copy.deepcopy(network).train(training)
    for _, site in named_sites(own):
        site.norm_batch_size = norm_batch_size
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        yield own


def output_of(network: nn.Module, batch: Batch, *, training: bool) -> Tensor:
    """One forward of a fresh copy without closed gates, all samples sharing statistics."""
    with scratch(network, training=training, norm_batch_size=None) as own:
        open_gates(own)
        return own(*model_arguments(batch))


def open_gates(network: nn.Module) -> None:
    """Draws parameters that are all zero: a branch that starts at zero would hide what it does."""
    for parameter in network.parameters():
        if not parameter.any():
            parameter.normal_(std=0.1)


def run_through(network: nn.Module, batch: Batch, norm_batch_size: int | None) -> int:
    """One training forward; returns how many values per sample reach the sites.

    Raises:
        UserError: what a norm or the model raised, with the name of the site.
    """
    entered: list[str] = []
    seen: list[int] = []
    with scratch(network, training=True, norm_batch_size=norm_batch_size) as own:

        def enter(name: str, _: nn.Module, args: tuple[Tensor, ...]) -> None:
            entered.append(name)
            seen.append(args[0].numel())

        for name, site in named_sites(own):
            site.register_forward_pre_hook(partial(enter, name))
            site.register_forward_hook(lambda *_: entered.pop() and None)
        try:
            own(*model_arguments(batch))
        except Exception as error:  # of foreign code, any kind
            if not entered and isinstance(error, UserError):
                raise
            reason = first_line(error)
            where = f"norm at site {entered[-1]}" if entered else "model"
            raise UserError(f"{where}: {reason}") from error
    return sum(seen) // len(batch["targets"])


def moved(before: Tensor, after: Tensor) -> bool:
    """Whether outputs differ by more than rounding."""
    if not before.numel():
        return False
    scale = before.abs().amax().clamp(min=SMALLEST_SCALE)
    return bool(((before - after).abs().amax() > MOVED * scale) | after.isnan().any())


def mixes_samples(network: nn.Module, batch: Batch, *, training: bool = True) -> bool:
    """Whether a change of the first sample moves the outputs of the others."""
    changed = {name: value.clone() for name, value in batch.items()}
    changed["inputs"][0] = other_inputs(batch["inputs"][0])
    before = output_of(network, batch, training=training)
    after = output_of(network, changed, training=training)
    return moved(before[1:], after[1:])


def ignores_inputs(network: nn.Module, batch: Batch) -> bool:
    """Whether every sample has one output, whatever the parameters that are zero will become.

    So where a mean over positions follows a norm that centres each channel over them.
    """
    changed = {name: value.clone() for name, value in batch.items()}
    changed["inputs"][0] = other_inputs(batch["inputs"][0])
    with scratch(network, training=True, norm_batch_size=None) as own:
        open_gates(own)
        outputs = own(*model_arguments(changed))
    return not moved(outputs[:1].expand_as(outputs), outputs)


def other_inputs(inputs: Tensor) -> Tensor:
    """Other contents of the same kind: an image stretched and shifted, tokens rotated."""
    if inputs.is_floating_point():
        return 3 * inputs.flip(-1) + 1
    return inputs.roll(1, dims=-1)


def draws_for_itself(network: nn.Module, batch: Batch) -> bool:
    """Whether a training forward uses torch's global random state, as nn.Dropout does."""
    with scratch(network, training=True, norm_batch_size=None) as own:
        before = torch.get_rng_state()
        own(*model_arguments(batch))
        return not torch.equal(before, torch.get_rng_state())


def cannot_stack(network: nn.Module, batch: Batch) -> str | None:
    """Why two replicas of the network cannot run under vmap; None where they can and agree."""
    networks = [copy.deepcopy(network).train() for _ in range(2)]
    pair = {name: torch.stack([value, value]) for name, value in batch.items()}

    def outputs(output: Tensor, _: Batch) -> dict[str, Tensor]:
        return {"output": output}

    try:
        with torch.no_grad():
            replicas = Stacked(networks)
            stacked = replicas.measure(pair, outputs)["output"]
            alone = InTurn(networks).measure(pair, outputs)["output"]
    except Exception as error:  # any foreign module, any reason: the fallback is exact
        return first_line(error)
    try:
        copy.deepcopy(replicas)
    except Exception:  # what vmap handed to a forward cannot leave it
        return "a module keeps a tensor of its forward that is no buffer"
    return "its outputs under vmap differ" if moved(alone, stacked) else None
