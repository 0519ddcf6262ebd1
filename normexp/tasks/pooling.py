"""Making a norm's running state the moments of whatever it sees, by the rules of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Replicas
from normexp.norms.contract import named_sites
from normexp.norms.state import State


@contextmanager
def momentum_at_one(replicas: Replicas) -> Iterator[None]:
    """Running averages forget all but the newest forward, and can be pooled, while inside."""
    with ExitStack() as borrowed:
        for _, site in named_sites(replicas):
            for module in site.modules():
                if hasattr(module, "momentum"):
                    borrowed.callback(setattr, module, "momentum", module.momentum)
                    module.momentum = 1.0  # type: ignore[assignment]
                if _has_moments(module) and not hasattr(module, "merge_state"):
                    _lend_pooling(module, borrowed)
        yield


def _has_moments(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_buffers(recurse=False)}
    return {"running_mean", "running_var"} <= names


def _lend_pooling(norm: Any, borrowed: ExitStack) -> None:
    """Gives a foreign norm that keeps moments as torch.nn does what the shipped ones have."""
    counter = torch.zeros(norm.running_mean.shape[:-1], dtype=torch.int64)  # () or (S,)
    norm.register_buffer("num_values", counter.to(norm.running_mean.device), persistent=False)
    borrowed.callback(delattr, norm, "num_values")
    norm.merge_state = _pool_moments
    borrowed.callback(delattr, norm, "merge_state")
    borrowed.callback(norm.register_forward_pre_hook(_count_values).remove)


def _count_values(norm: Any, inputs: tuple[Tensor, ...]) -> None:
    norm.num_values.fill_(inputs[0].numel() // norm.running_mean.shape[-1])


def _pool_moments(start: State, parts: list[State], shares: list[float]) -> State:
    """Moments of all parts' values, each part left by one forward at momentum 1."""
    del start, shares  # each part knows how many values it saw
    names = ("running_mean", "running_var", "num_values")
    means, variances, counts = (torch.stack([part[name] for part in parts]) for name in names)
    num = counts[..., None].to(means.dtype)  # (parts, ..., 1)
    weights = num / num.sum(dim=0)
    mean = (weights * means).sum(dim=0)
    within = variances * (num - 1) / num
    var = (weights * (within + (means - mean).square())).sum(dim=0)
    total = num.sum(dim=0)
    unbiased = var * total / (total - 1).clamp(min=1)
    return {"running_mean": mean, "running_var": unbiased, "num_values": counts.sum(dim=0)}


def undo_bessel(replicas: Replicas) -> None:
    """From the unbiased variance, which running averages hold, to that of the population.

    A norm whose running variance is the biased one says so by `unbiased_running_var = False`.
    """
    for _, site in named_sites(replicas):
        for module in site.modules():
            averages_unbiased = getattr(module, "unbiased_running_var", True)
            if _has_moments(module) and hasattr(module, "num_values") and averages_unbiased:
                norm: Any = module
                num = norm.num_values[..., None].to(norm.running_var.dtype)
                norm.running_var.mul_(torch.where(num > 1, (num - 1) / num, 1))
