"""The optimizer of a stack of replicas: its learning rates, and its weight decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normexp.norms.site import norm_parameters
from normexp.training.batching.replicas import Replicas
from normexp.training.config.keys import separate
from normexp.training.config.target import read_target

OptimizerFactory = Callable[..., Optimizer]


def build_optimizer(
    values: Mapping[str, Any], *, momentum: float | None = None
) -> OptimizerFactory:
    """The optimizer that `optim` names, to be called with parameters and a learning rate.

    Args:
        values: of the group `optim`.
        momentum: in place of that among the values.

    Raises:
        UserError: a knob that it does not take.
    """
    _, knobs = separate("optim", values)
    if momentum is not None:
        knobs["momentum"] = momentum
    target = read_target(knobs, "optim")
    target.require(1, "lr", "weight_decay")
    return target.call


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    norm_decay: float | None = None,
    decay_bias: bool = True,
) -> list[dict[str, object]]:
    """Returns the trained parameters in groups of equal weight decay.

    Parameters are told apart by their module and name (a bias is called `bias` or `..._bias`), not
    by their dimensions: a stack adds a dimension, and some norms have parameters with several.

    Args:
        weight_decay: of the parameters outside norms.
        norm_decay: of the parameters of norms, their biases included; None if they are left out.
        decay_bias: whether the biases outside norms decay.
    """
    of_norms = {id(p) for p in norm_parameters(model)}
    # A checkpoint holds the optimizer's state in this order. None: left out of weight decay.
    groups: dict[float | None, list[nn.Parameter]] = {weight_decay: []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in of_norms:
            decay = norm_decay
        elif name.endswith("bias") and not decay_bias:
            decay = None
        else:
            decay = weight_decay
        groups.setdefault(decay, []).append(parameter)
    return [{"params": params, "weight_decay": decay or 0.0} for decay, params in groups.items()]


class OwnRates:
    """Trains each replica of a stack at its own learning rate, with one optimizer.

    The optimizer steps at the common rate lr, then replica r keeps the share s_r of its update:
    p_r = old_r + s_r (new_r - old_r). This equals a step at the rate s_r lr for every optimizer
    whose update is linear in its rate given the gradients, and whose state does not contain the
    rate: SGD with momentum, Adam, AdamW with its decoupled decay, and the other elementwise
    optimizers of torch.

    Args:
        scales: s_r in (0, 1]. The common rate is the largest, so rounding is never magnified.
    """

    def __init__(self, replicas: Replicas, scales: Sequence[float]) -> None:
        device = next(replicas.parameters()).device
        factors = torch.tensor(scales, dtype=torch.float64, device=device)
        trees = [factors] if replicas.is_stacked else list(factors)
        self._scaled = [  # with a scale () or (S, 1, ...)
            (p, scale.to(p.dtype).view(scale.shape + (1,) * (p.ndim - scale.ndim)))
            for tree, scale in zip(replicas.trees, trees, strict=True)
            for p in tree.parameters()
            if p.requires_grad
        ]

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Steps the optimizer; then each replica keeps its share of the update."""
        before = [parameter.detach().clone() for parameter, _ in self._scaled]
        optimizer.step()
        for old, (parameter, scale) in zip(before, self._scaled, strict=True):
            parameter.copy_(old.lerp_(parameter, scale))  # exact to the bit for a scale of 1


def match_layouts(optimizer: Optimizer) -> None:
    """Lays out the state of each parameter in memory as the parameter is.

    Fused kernels run through both in the order of memory, and a checkpoint may come from a device
    on which the network lies otherwise.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                state[name] = laid_out.copy_(value)


# They update each value from its own history alone, by a step that is linear in the rate.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
)


def can_train_a_stack(optimizer: torch.optim.Optimizer) -> bool:
    """True if one optimizer acts on a stack as on each run alone; not known of foreign ones."""
    return type(optimizer) in ELEMENTWISE
