"""Parameter groups, the learning rate as a function of the step, and one rate per replica.

SGD and AdamW are elementwise, so one optimizer trains a stack as it would train each run alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from normexp.batching.replicas import Replicas
from normexp.errors import UserError
from normexp.norms.site import norm_parameters

OptimizerFactory = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate at each of `total_steps` optimizer steps.

    Linear warm-up over the first `warmup` (a share of the steps), then
        constant    1
        cosine      (1 + cos(pi u)) / 2, u from 0 to 1 over the rest (arXiv:1608.03983)
        one_cycle   linear from 1/25 to 1 over the warm-up, then cosine to 1e-4 (arXiv:1708.07120)
    """

    kind: str
    warmup: float
    total_steps: int

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine", "one_cycle"):
            raise UserError(
                f"optim.schedule={self.kind} is unknown; try constant, cosine or one_cycle"
            )
        if not 0 <= self.warmup < 1:
            raise UserError(
                f"optim.warmup={self.warmup} must be in [0, 1), a share of the steps; try 0.1"
            )

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
    model: nn.Module, *, weight_decay: float, decay_norm: bool, decay_bias: bool = True
) -> list[dict[str, object]]:
    """Returns groups with and without weight decay.

    Parameters are told apart by their module and name (a bias is called `bias` or `..._bias`), not
    by their dimensions: a stack adds a dimension, and some norms have parameters with several.

    Args:
        decay_norm: whether the parameters of norms decay, their biases included.
        decay_bias: whether all other biases do.
    """
    of_norms = {id(p) for p in norm_parameters(model)}
    spared = set() if decay_norm else set(of_norms)
    if not decay_bias:
        biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
        spared |= biases - of_norms
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if id(p) not in spared]
    kept = [p for p in trained if id(p) in spared]
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": weight_decay}]
    if kept:
        groups.append({"params": kept, "weight_decay": 0.0})
    return groups


class AveragedWeights(AveragedModel):
    """An exponential moving average of replicas' weights: w = decay w + (1 - decay) w_t.

    `update_parameters` takes w_t after step t; w begins as w_1. Buffers are those of the last step.
    """

    module: Replicas

    def __init__(self, replicas: Replicas, decay: float) -> None:
        super().__init__(replicas, multi_avg_fn=get_ema_multi_avg_fn(decay))


class ReplicaRates:
    """Trains each replica of a stack at its own learning rate with one optimizer.

    The optimizer steps at the common rate lr, then replica r keeps the share s_r of its update:
    p_r = old_r + s_r (new_r - old_r). This equals a step at the rate s_r lr for every optimizer
    whose update is linear in its rate given the gradients, and whose state does not contain the
    rate: SGD with momentum, Adam, AdamW with its decoupled decay, and the other elementwise
    optimizers of torch.

    Args:
        scales: s_r in (0, 1]. The common rate is the largest, so rounding is never magnified.
    """

    def __init__(self, replicas: Replicas, scales: Sequence[float]) -> None:
        assert len(scales) == replicas.num_replicas and all(0 < scale <= 1 for scale in scales)
        device = next(replicas.parameters()).device
        each = torch.tensor(scales, dtype=torch.float64, device=device)
        trees = [each] if replicas.is_stacked else list(each)
        self._scaled = [
            (parameter, _shaped_like(parameter, scale))
            for tree, scale in zip(replicas.trees, trees, strict=True)
            for parameter in tree.parameters()
            if parameter.requires_grad
        ]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes a step of the optimizer, and scales it for each replica."""
        before = [parameter.detach().clone() for parameter, _ in self._scaled]
        optimizer.step()
        for old, (parameter, scale) in zip(before, self._scaled, strict=True):
            parameter.copy_(old.lerp_(parameter, scale))  # exact to the bit for a scale of 1


def _shaped_like(parameter: Tensor, scale: Tensor) -> Tensor:
    """Returns a scale () or (S,) shaped to multiply a parameter."""
    return scale.to(parameter.dtype).view(scale.shape + (1,) * (parameter.ndim - scale.ndim))
