"""Weight decay, and one optimizer for all replicas of a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from normexp.batching.replicas import Replicas
from normexp.norms.site import norm_parameters

OptimizerFactory = Callable[..., torch.optim.Optimizer]


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
    decayed, kept = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        decays = decay_norm if id(parameter) in of_norms else decay_bias or name[-4:] != "bias"
        if parameter.requires_grad:
            (decayed if decays else kept).append(parameter)
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": weight_decay}]
    return [*groups, {"params": kept, "weight_decay": 0.0}] if kept else groups


def train_at_own_rates(
    optimizer: torch.optim.Optimizer, replicas: Replicas, scales: Sequence[float]
) -> None:
    """Makes an optimizer train each replica of a stack at its own learning rate.

    The optimizer steps at the common rate lr, then replica r keeps the share s_r of its update:
    p_r = old_r + s_r (new_r - old_r). This equals a step at the rate s_r lr for every optimizer
    whose update is linear in its rate given the gradients, and whose state does not contain the
    rate: SGD with momentum, Adam, AdamW with its decoupled decay, and the other elementwise
    optimizers of torch.

    Args:
        scales: s_r in (0, 1]. The common rate is the largest, so rounding is never magnified.
    """
    device = next(replicas.parameters()).device
    factors = torch.tensor(scales, dtype=torch.float64, device=device)
    trees = [factors] if replicas.is_stacked else list(factors)
    scaled = [  # with a scale () or (S, 1, ...)
        (p, scale.to(p.dtype).view(scale.shape + (1,) * (p.ndim - scale.ndim)))
        for tree, scale in zip(replicas.trees, trees, strict=True)
        for p in tree.parameters()
        if p.requires_grad
    ]
    before: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        before[:] = [parameter.detach().clone() for parameter, _ in scaled]

    @torch.no_grad()
    def scale_update(*_: object) -> None:
        for old, (parameter, scale) in zip(before, scaled, strict=True):
            parameter.copy_(old.lerp_(parameter, scale))  # exact to the bit for a scale of 1
        before.clear()

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(scale_update)


# They update each value from its own history alone, by a step that is linear in the rate.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
)


def can_train_a_stack(optimizer: torch.optim.Optimizer) -> bool:
    """True if one optimizer acts on a stack as on each run alone; not known of foreign ones."""
    return type(optimizer) in ELEMENTWISE
