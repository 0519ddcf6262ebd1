"""Optimizers over a stack of replicas, and the learning rate as a function of the step.

SGD and AdamW act element by element, so on a stack they do what they would do on each run alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Replicas
from normexp.errors import UserError
from normexp.norms.site import norm_parameters

OptimizerFactory = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate at each of `total_steps` optimizer steps.

    Linear warm-up over the first `warmup` share of the steps, then
        constant    1
        cosine      (1 + cos(pi u)) / 2, u from 0 to 1 over the rest (arXiv:1608.03983)
        one_cycle   linear from 1/25 to 1 over the warm-up, then cosine to 1e-4 (arXiv:1708.07120)
    """

    kind: str
    warmup: float
    total_steps: int

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine", "one_cycle"):
            raise UserError(f"optim.schedule={self.kind} is none of constant, cosine, one_cycle")
        if not 0 <= self.warmup < 1:
            raise UserError(f"optim.warmup={self.warmup} is no share of the steps; try 0.1")

    def factor(self, step: int) -> float:
        warmup_steps = round(self.warmup * self.total_steps)
        if step < warmup_steps:
            risen = (step + 1) / warmup_steps
            return 1 / 25 + (1 - 1 / 25) * risen if self.kind == "one_cycle" else risen
        if self.kind == "constant":
            return 1.0
        rest = max(1, self.total_steps - warmup_steps)
        cosine = (1 + math.cos(math.pi * (step - warmup_steps) / rest)) / 2
        return max(cosine, 1e-4) if self.kind == "one_cycle" else cosine


def parameter_groups(
    model: nn.Module, *, weight_decay: float, decay_norm: bool
) -> list[dict[str, object]]:
    """Two groups, with and without weight decay, which a norm's parameters go without.

    Decided by owner and not by number of dimensions, which a stack shifts and which misses norms
    with affine parameters of several dimensions.
    """
    of_norms = {id(p) for p in norm_parameters(model)}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if decay_norm or id(p) not in of_norms]
    kept = [p for p in trained if not decay_norm and id(p) in of_norms]
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": weight_decay}]
    if kept:
        groups.append({"params": kept, "weight_decay": 0.0})
    return groups


class ReplicaRates:
    """A learning rate of its own for each replica of a stack, around the step of one optimizer.

    The optimizer steps at one common rate lr, and each replica r then keeps s_r of its update:
    p_r = old_r + s_r (new_r - old_r), which is a step at s_r lr for every optimizer whose update is
    linear in its rate given the gradients: SGD with momentum, Adam, AdamW with its decoupled decay,
    and torch's other ones that act value by value. Their state does not hold the rate.

    Args:
        scales: s_r in (0, 1]; the common rate is the largest one, so that no rounding is magnified.
    """

    def __init__(self, replicas: Replicas, scales: Sequence[float]) -> None:
        if len(scales) != replicas.num_replicas or not all(0 < scale <= 1 for scale in scales):
            raise ValueError(f"{scales} are no {replicas.num_replicas} scales in (0, 1]")
        device = next(replicas.parameters()).device
        each = torch.tensor(scales, dtype=torch.float64, device=device)
        trees = [each] if replicas.is_stacked else list(each)
        self._scaled = [
            (parameter, _shaped_as(parameter, scale))
            for tree, scale in zip(replicas.trees, trees, strict=True)
            for parameter in tree.parameters()
            if parameter.requires_grad
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Around the optimizer's step."""
        before = [parameter.detach().clone() for parameter, _ in self._scaled]
        yield
        with torch.no_grad():
            for old, (parameter, scale) in zip(before, self._scaled, strict=True):
                parameter.copy_(old.lerp_(parameter, scale))  # a scale of 1 leaves it to the bit


def _shaped_as(parameter: Tensor, scale: Tensor) -> Tensor:
    """A scale, or those (S,) of a stack, to multiply a parameter by."""
    return scale.to(parameter.dtype).view(scale.shape + (1,) * (parameter.ndim - scale.ndim))
