"""The gradient of a norm whose backward moves state, which differences cannot be taken through."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normexp.checks.subject import Shape, seed_draws, values
from normexp.norms.state import read_state

STEP = 1e-5
SETTLING_STEPS = 128  # past the warm-up that such a norm may have


def as_function(
    norm: nn.Module, shape: Shape
) -> tuple[list[str], Callable[..., Tensor], list[Tensor]]:
    """The norm in float64 as a function of its input and parameters, from the state it has now.

    Returns:
        What the arguments are called, the function, and arguments that require a gradient.
    """
    named = {name: p.detach().clone() for name, p in norm.named_parameters() if p.requires_grad}
    start = read_state(norm)

    def run(x: Tensor, *given: Tensor) -> Tensor:
        seed_draws()
        state = {name: value.clone() for name, value in start.items()}
        return functional_call(norm, {**dict(zip(named, given, strict=True)), **state}, (x,))

    inputs = [t.requires_grad_() for t in (values(shape, torch.float64), *named.values())]
    return ["the input", *named], run, inputs


def backward_moves_state(norm: nn.Module, shape: Shape) -> bool:
    """Whether buffers are others after the backward than before it; it takes a step of training."""
    out = norm(values(shape, torch.float64).requires_grad_())
    before = read_state(norm)
    if not out.requires_grad:
        return False
    (out * values(tuple(out.shape), torch.float64, seed=3)).sum().backward()
    return any(not torch.equal(value, before[name]) for name, value in read_state(norm).items())


def find_wrong_slope(norm: nn.Module, shape: Shape) -> str | None:
    """What one backward after the settling steps is not the slope along; None where it is.

    Along one direction for the input and for each parameter.
    """
    for seed in range(SETTLING_STEPS):
        weights = values(shape, torch.float64, seed=seed + 1)
        (norm(values(shape, torch.float64, seed).requires_grad_()) * weights).sum().backward()
    names, run, inputs = as_function(norm, shape)
    out = run(*inputs)
    weights = values(tuple(out.shape), torch.float64, seed=3)
    gradients = torch.autograd.grad((out * weights).sum(), inputs, materialize_grads=True)
    for index, gradient in enumerate(gradients):
        direction = values(tuple(gradient.shape), torch.float64, seed=4)
        steps = [[t.detach().clone() for t in inputs] for _ in range(2)]
        steps[0][index] += STEP * direction
        steps[1][index] -= STEP * direction
        above, below = ((run(*step) * weights).sum() for step in steps)
        slope = float((above - below) / (2 * STEP))
        if abs(slope - float((gradient * direction).sum())) > 1e-3 * max(1.0, abs(slope)):
            return names[index]
    return None
