"""Weight decay, and one optimizer for all replicas of a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from normexp.batching.replicas import Replicas, Stacked
from normexp.errors import first_line
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
    spared = set() if decay_norm else set(of_norms)
    if not decay_bias:
        biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
        spared |= biases - of_norms
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if id(p) not in spared]
    kept = [p for p in trained if id(p) in spared]
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": weight_decay}]
    return [*groups, {"params": kept, "weight_decay": 0.0}] if kept else groups


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
        factors = torch.tensor(scales, dtype=torch.float64, device=device)
        trees = [factors] if replicas.is_stacked else list(factors)
        self._scaled = [  # with a scale () or (S, 1, ...)
            (p, scale.to(p.dtype).view(scale.shape + (1,) * (p.ndim - scale.ndim)))
            for tree, scale in zip(replicas.trees, trees, strict=True)
            for p in tree.parameters()
            if p.requires_grad
        ]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes a step of the optimizer, and scales it for each replica."""
        before = [parameter.detach().clone() for parameter, _ in self._scaled]
        optimizer.step()
        for old, (parameter, scale) in zip(before, self._scaled, strict=True):
            parameter.copy_(old.lerp_(parameter, scale))  # exact to the bit for a scale of 1


SHAPES = ((3, 4), (5,), (), (2, 3, 3, 3), (1, 4))  # of the parameters that an optimizer is tried on
TRIAL_STEPS = 50


def stacking_obstacle_of(optimizer: OptimizerFactory) -> str | None:
    """Says why one optimizer cannot train a stack; None if it can.

    Measured: two replicas, the second at half the rate, take TRIAL_STEPS with random gradients, in
    a stack and each alone. SGD and Adam pass, as they update each value from its own history. An
    optimizer that takes norms over a layer or over all parameters fails, as does one that returns
    to older values, such as Lookahead. What happens only after more steps is not seen.
    """
    noise = torch.Generator().manual_seed(0)
    rows = [torch.randn(1 + TRIAL_STEPS, 2, *s, generator=noise).double() for s in SHAPES]
    start, gradients = [row[0] for row in rows], [row[1:] for row in rows]
    alone = [nn.ParameterList(value[replica].clone() for value in start) for replica in (0, 1)]
    scales = (1.0, 0.5)
    stack = Stacked(list(alone))
    try:
        _train_on(optimizer, stack, gradients, 0.1, ReplicaRates(stack, scales))
        for index, network in enumerate(alone):
            replica_gradients = [gradient[:, index] for gradient in gradients]
            _train_on(optimizer, network, replica_gradients, 0.1 * scales[index])
    except (
        Exception
    ) as error:  # user code may raise anything; cells.refusals tries it without a stack
        return first_line(error)
    for index, network in enumerate(alone):
        for stacked, expected in zip(stack.parameters(), network.parameters(), strict=True):
            if not torch.allclose(expected, stacked[index], rtol=1e-9, atol=1e-12):
                return "its update of a value depends on other values"
    return None


def _train_on(
    optimizer: OptimizerFactory,
    module: nn.Module,
    gradients: Sequence[Tensor],
    lr: float,
    rates: ReplicaRates | None = None,
) -> None:
    """Takes a step with each row of the gradients of the module's parameters."""
    parameters = list(module.parameters())
    groups = [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:], "weight_decay": 0.0},
    ]
    built = optimizer(groups, lr=lr)
    for step in range(len(gradients[0])):
        for parameter, rows in zip(parameters, gradients, strict=True):
            parameter.grad = rows[step].clone()
        built.step() if rates is None else rates.step(built)
