"""Batch norm and group norm by torch's kernels: groups and replicas of a stack in one launch.

Groups of samples and replicas fold into the channels, which batch norm treats one by one. Without
folding, groups would run one after another, and vmap's own rule would apply weight and bias outside
the kernel, in passes over all values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from normexp.norms.base import Affine, Moments, centre, measure
from normexp.norms.contract import Mask

# On a CPU, groups of more elements than this run one after another: from about this size, the two
# copies that fold them cost more than the extra calls of a loop. On a GPU a launch costs more than
# a copy.
LOOP_FROM_ELEMENTS = 2**16

# As above, for maps with their channels last, which folding would transpose.
LOOP_FROM_ELEMENTS_LAST = 2**12

# On a CPU, a stack's inputs of fewer elements per replica take vmap's own rule: up to about this
# size its passes cost less than a rule in Python.
FOLD_FROM_ELEMENTS = 2**13

# Returns the output of a group (N, C, *) and two statistics (C,).
Kernel = Callable[[Tensor, Affine], tuple[Tensor, Tensor, Tensor]]


def batch_norm(
    x: Tensor,
    affine: Affine,
    averages: tuple[Tensor, Tensor],
    momentum: float | None,
    eps: float,
    *,
    num_groups: int = 1,
) -> Tensor:
    """Returns batch norm of x (G * N, C, *), each group of N samples by its own statistics.

    Moves the running averages once, by the mean and the unbiased variance of all values.

    Args:
        x: may be in half precision; all else is in float32 or wider.
        averages: running mean and variance (C,), moved in place.
        momentum: weight of the new values; None normalizes by the averages and leaves them.
    """
    # The operator has a rule for vmap, and takes 5 % of the time of a small norm.
    folds = num_groups > 1 or _folding_pays(x, averages[0])
    function = torch.ops.normexp.batch_norm.default if folds else _batch_norm
    return function(x, *affine, *averages, num_groups, momentum, eps)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    num_groups: int,
    momentum: float | None,
    eps: float,
) -> Tensor:
    cudnn = torch.backends.cudnn.enabled
    # Not torch.nn.functional.batch_norm, which refuses eps=0 before torch 2.15.
    if num_groups == 1 or momentum is None:
        averages = (running_mean, running_var)
        is_training, new_weight = momentum is not None, momentum or 0.0
        return torch.batch_norm(x, weight, bias, *averages, is_training, new_weight, eps, cudnn)

    def kernel(group: Tensor, affine: Affine) -> tuple[Tensor, Tensor, Tensor]:
        # Averages with momentum 1 are the moments of the group.
        mean, var = running_mean.new_zeros(2, group.shape[1])
        return torch.batch_norm(group, *affine, mean, var, True, 1.0, eps, cudnn), mean, var

    groups = x.unflatten(0, (num_groups, -1))
    out, means, variances = _by_group(kernel, groups, Affine(weight, bias))
    count = x[:, 0].numel()
    group_count = count / num_groups
    with torch.no_grad():
        # The unbiased variance of all values adds that between the groups, whose correction makes
        # it a sum of squares over G - G / count, and the mean of those within them, rescaled.
        between, mean = torch.var_mean(means, dim=0, correction=num_groups / count)
        within = variances.mean(dim=0)
        scale = (group_count - 1) / group_count * count / (count - 1)
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(torch.add(between, within, alpha=scale), momentum)
    return out.flatten(0, 1)


def normalize_groups(x: Tensor, real: Mask, affine: Affine, eps: float) -> tuple[Tensor, Moments]:
    """Returns batch norm of each group of x (G, N, C, *), and the moments (G, 1, C, 1, ...)."""
    if real is not None:
        moments = measure(x, real, (1, *range(3, x.ndim)))
        centred = centre(x, moments.mean, real)
        return affine.apply(centred, torch.rsqrt(moments.var + eps), axis=2), moments

    def kernel(group: Tensor, affine: Affine) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_batch_norm(group, *affine, None, None, True, 0.0, eps)

    out, mean, scale = _by_group(kernel, x, affine)
    shape = (len(x), 1, x.shape[2], *[1] * (x.ndim - 3))
    var = (scale.detach().pow(-2) - eps).clamp(min=0)  # the kernel's scale is 1 / sqrt(var + eps)
    count = x.shape[1] * x.shape[3:].numel()
    return out, Moments(mean.detach().view(shape), var.view(shape), count)


def _by_group(kernel: Kernel, x: Tensor, affine: Affine) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a kernel on each group of x (G, N, C, *); returns outputs and statistics (G, C)."""
    num_groups, _, num_channels = x.shape[:3]
    if num_groups == 1:
        # squeeze and not x[0], whose backward would fill a tensor with zeros and copy.
        out, first, second = kernel(x.squeeze(0), affine)
        return out[None], first[None], second[None]
    is_last = x.ndim == 5 and x.stride(2) == 1 < x.stride(4)
    loop_from = LOOP_FROM_ELEMENTS_LAST if is_last else LOOP_FROM_ELEMENTS
    if x.device.type == "cpu" and x.shape[1:].numel() > loop_from:
        outs, firsts, seconds = zip(*[kernel(group, affine) for group in x], strict=True)
        return torch.stack(outs), torch.stack(firsts), torch.stack(seconds)
    folded = x.movedim(0, 1).flatten(1, 2)  # (N, G * C, *)
    repeated = Affine(*[None if v is None else v.repeat(num_groups) for v in affine])
    out, first, second = kernel(folded, repeated)
    by_group = (num_groups, num_channels)
    out = out.unflatten(1, by_group).movedim(1, 0)
    return out, first.unflatten(0, by_group), second.unflatten(0, by_group)


def group_norm(x: Tensor, num_groups: int, affine: Affine, eps: float) -> Tensor:
    """Returns torch's group norm of x (N, C, *); replicas of a stack fold into channels and groups.

    vmap's own rule would turn replicas into samples. Convolutions of a stack want its channels
    together, so that would copy all values twice in each direction.
    """
    folds = x.ndim > 2 and _folding_pays(x, affine.weight)
    function = torch.ops.normexp.group_norm.default if folds else _group_norm
    return function(x, *affine, x.shape[1] // num_groups, eps)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int, eps: float
) -> Tensor:
    return torch.nn.functional.group_norm(x, x.shape[1] // group_size, weight, bias, eps)


def _folding_pays(x: Tensor, vector: Tensor | None) -> bool:
    """True under vmap if x or a vector (C,) differs between replicas, and x is large enough."""
    is_stacked = is_batchedtensor(x) or (vector is not None and is_batchedtensor(vector))
    return is_stacked and (x.device.type != "cpu" or x.numel() >= FOLD_FROM_ELEMENTS)


_LIBRARY = torch.library.Library("normexp", "FRAGMENT")  # registrations last as long as it


def _register(kernel: Callable[..., Tensor], arguments: str, num_vectors: int) -> None:
    """Makes a kernel of x (N, C, *), `num_vectors` vectors (C,) and settings an operator of torch.

    Under vmap the operator takes the channels of all replicas in one call.
    """

    def fold_replicas(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, *others: Any
    ) -> tuple[Tensor, int]:
        num_replicas = info.batch_size
        if in_dims[0] is None:
            x = x[:, None].expand(-1, num_replicas, *x.shape[1:])
        else:
            x = x.movedim(in_dims[0], 1)
        # Views (S * C,) of the vectors (S, C), because the kernel moves buffers in place.
        vectors = []
        for vector, axis in zip(others[:num_vectors], in_dims[1:], strict=False):
            vectors.append(None if vector is None else vector.movedim(axis, 0).flatten())
        out = kernel(x.flatten(1, 2), *vectors, *others[num_vectors:])
        return out.unflatten(1, (num_replicas, -1)), 1

    name = kernel.__name__.lstrip("_")
    _LIBRARY.define(f"{name}({arguments}) -> Tensor")
    _LIBRARY.impl(name, kernel, "CompositeImplicitAutograd")
    torch.library.register_vmap(f"normexp::{name}", fold_replicas, lib=_LIBRARY)


_register(
    _batch_norm,
    "Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, Tensor(b!) running_var, "
    "int num_groups, float? momentum, float eps",
    num_vectors=4,
)
_register(
    _group_norm, "Tensor x, Tensor? weight, Tensor? bias, int group_size, float eps", num_vectors=2
)
