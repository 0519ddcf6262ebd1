"""Optimizers over a stack of replicas, and the learning rate as a function of the step.

SGD and AdamW act element by element, so on a stack they do what they would do on each run alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from normexp.errors import UserError
from normexp.norms.contract import named_sites

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
    """Two groups, with and without weight decay: a norm's parameters are those below a site.

    Decided by owner and not by number of dimensions, which a stack shifts and which misses norms
    with affine parameters of several dimensions.
    """
    norm_parameters = {id(p) for _, site in named_sites(model) for p in site.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if decay_norm or id(p) not in norm_parameters]
    kept = [p for p in trained if not decay_norm and id(p) in norm_parameters]
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": weight_decay}]
    if kept:
        groups.append({"params": kept, "weight_decay": 0.0})
    return groups
