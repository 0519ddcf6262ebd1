"""Every norm of conf/norm, built from its file, and tensors to try it on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.norms.running import RunningNorm
from normexp.training.batching.replicas import InTurn, Stacked
from normexp.training.config.keys import separate

Norm = TypeVar("Norm", bound=nn.Module)

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "norm"
FILES = {str(path.relative_to(FOLDER))[:-5]: path for path in sorted(FOLDER.rglob("*.yaml"))}
SHIPPED = [name for name in FILES if name != "as_built"]
KNOBS_OF: dict[str, dict[str, Any]] = {  # and the class
    name: separate("norm", cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path))))[1]
    for name, path in FILES.items()
}

EPS = 1e-3  # large enough to be seen where it is left out or misplaced
C, T = 8, 5
SHAPES = {2: (6, C), 3: (6, C, T), 4: (4, C, 3, 5), 5: (3, C, 2, 3, 4)}
GROUPS = 4
STEPS = 2  # that a norm of `make` has made
S = 3  # replicas in a stack

# Knobs for which two steps are past the warm-up and corrections meet both their bounds.
KNOBS: dict[str, dict[str, Any]] = {
    "batch_renorm": {
        **{"r_max": 2, "d_max": 1, "num_training_steps": 10},
        **{"warmup": 0.1, "r_ramp_end": 0.5, "d_ramp_end": 0.9},
    },
    "moving_average_batch": {"memory": 2, "r_max": 1.2, "warmup": 0, "momentum": 0.1},
    "power": {"warmup": 0.1, "num_training_steps": 10},
    "progressive_rep_batch": {"fade_end": 0.6, "num_training_steps": 10},
    "taper": {"warmup": 0.1, "taper_end": 0.6, "num_training_steps": 10, "momentum": 0.01},
    "ghost": {"ghost_size": 2},
    "gated_rms": {"rank": 3},
    "mode": {"num_modes": 3},
    **dict.fromkeys(
        ("group", "group_ws", "causal_group", "evonorm_s0", "proxy_group"), {"num_groups": GROUPS}
    ),
    **dict.fromkeys(("batch_per_position", "deviations/bn_per_position"), {"num_positions": T}),
}
PER_POSITION = ["batch_per_position", "deviations/bn_per_position"]
NEED_POSITIONS = [
    *("instance", "frn", "batch_instance", "causal_instance"),
    *("deviations/ln_hw", "deviations/ln_time"),
]
APPROXIMATE = ["power", "moving_average_batch"]  # their backward is not their forward's


def num_dims_of(name: str) -> tuple[int, ...]:
    """The numbers of dimensions that a norm accepts."""
    if name in PER_POSITION or name == "causal_instance":
        return (3,)
    if name == "causal_group":
        return (2, 3)
    return (3, 4, 5) if name in NEED_POSITIONS else (2, 3, 4, 5)


@cache
def maker(name: str, **knobs: Any) -> Callable[[int], nn.Module]:
    values = {**KNOBS_OF[name], **KNOBS.get(name, {}), **knobs}
    has_eps = "eps" in inspect.signature(get_object(values["_target_"])).parameters
    return instantiate(({"eps": EPS} if has_eps else {}) | values)


RUNNING = [name for name in SHIPPED if isinstance(maker(name)(C), RunningNorm)]


def make_fresh(name: str, dtype: torch.dtype = torch.double) -> nn.Module:
    return maker(name)(C).to(dtype)


def make(name: str, dtype: torch.dtype = torch.double, seed: int = 7) -> nn.Module:
    """A norm after two steps, with parameters and averages away from their initial values."""
    norm = randomize(make_fresh(name, dtype), seed)
    state = {**dict(norm.named_buffers()), **dict(norm.named_parameters())}
    with torch.no_grad():
        for key, value in (("num_batches_tracked", STEPS), ("running_share", 0.3)):
            if key in state:
                state[key].fill_(value)
        if "gate" in state:
            state["gate"].mul_(0.6)  # inside (0, 1), where clipping does nothing
    return norm


def randomize(norm: Norm, seed: int = 7) -> Norm:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*norm.parameters(), *norm.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return norm


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.double) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(name: str) -> Iterator[Tensor]:
    """One input of each number of dimensions, channels far apart in mean and size."""
    for num_dims in num_dims_of(name):
        per_channel = (C, *[1] * (num_dims - 2))
        mean, size = torch.linspace(-3, 3, C), torch.linspace(0.05, 2, C)
        x = random_tensor(*SHAPES[num_dims]) * 3 + mean.view(per_channel)
        yield x * size.view(per_channel)


def random_mask(*shape: int, seed: int = 1) -> Tensor:
    """Two of three positions are real, neighbours; in every other sample the first two."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.67
    mask[:, :2] = True
    mask[1::2, 0] = False
    mask[1::2, 1:3] = True
    return mask


def mask_for(x: Tensor) -> Tensor:
    """A mask for x (N, C, *); rows (N, C) are real in pairs, since ghost batches have two."""
    if x.ndim == 2:
        return torch.arange(len(x)) // 2 % 2 == 0
    return random_mask(len(x), *x.shape[2:])


def gradients(out: Tensor, wanted: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Of sum(out * r), r fixed and random: a plain sum is blind where outputs add up to zero.

    Zero for a parameter that the output does not use, as some in evaluation.
    """
    weight = random_tensor(*out.shape, seed=11).to(out.dtype)
    return torch.autograd.grad((out * weight).sum(), wanted, materialize_grads=True, **options)


def run(norm: nn.Module, x: Tensor, mask: Tensor | None = None):
    """Output, and gradients of the input and of each parameter."""
    x = x.clone().requires_grad_()
    out = norm(x) if mask is None else norm(x, mask=mask)
    return out, gradients(out, [x, *norm.parameters()])


def state_of(norm: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, including those that are not saved."""
    tensors = [*norm.named_parameters(), *norm.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def assert_stack_equals_loop(
    alone: list[nn.Module],
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shared: bool = False,
    bends: bool = False,
) -> None:
    """Outputs, gradients and buffers of S norms, together and one after another; x (S, N, C, *).

    With `bends` gradients of gradients too; x is (N, C, *) if `shared` by all.
    """
    results = []
    for form in (Stacked, InTurn):
        replicas = form([copy.deepcopy(norm) for norm in alone])
        batch = {"inputs": x.detach().requires_grad_()} | ({} if mask is None else {"mask": mask})
        out = replicas.measure(batch, lambda y, _: y.sin(), shared=shared)
        of_x, *rows = gradients(out, [batch["inputs"], *replicas.parameters()], create_graph=bends)
        if form is InTurn:  # those of one network after those of another
            size = len(rows) // len(alone)
            rows = [torch.stack(rows[index::size]) for index in range(size)]
        bend = gradients(of_x, [batch["inputs"]]) if bends else ()
        copies = [replicas.replica(index) for index in range(len(alone))]
        results.append((out, of_x, rows, bend, [dict(own.named_buffers()) for own in copies]))
    assert_close(*results, rtol=1e-9 if bends else 0, atol=1e-12)
