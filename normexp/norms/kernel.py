"""Batch norm by torch's kernels: groups of samples, and replicas of a stack, in one launch.

Both fold into the channels, since batch norm treats each channel by itself. Without that, groups
would run one after another, and vmap's own rule applies weight and bias outside the kernel, in
passes over all values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from normexp.norms.base import Affine, Moments, centre, measure
from normexp.norms.contract import Mask

# On a CPU, groups of more elements than this run one after another: a loop saves the two copies
# needed to fold them, which cost more than its extra calls from about this size. On a GPU a launch
# costs more than a copy.
LOOP_FROM_ELEMENTS = 2**16

# On a CPU, a stack's inputs of fewer elements per replica go by vmap's own rule: a rule in Python
# costs more than its passes up to about this size.
FOLD_FROM_ELEMENTS = 2**13

Kernel = Callable[[Tensor, Affine], tuple[Tensor, Tensor, Tensor]]  # output, two rows (C,)


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

    Moves the running averages once, by the moments of all values, the variance by the unbiased one.

    Args:
        x: may be of half precision; all else is in float32 or wider.
        averages: running mean and variance (C,), moved in place.
        momentum: weight of the new values; None normalizes by the averages, and leaves them.
    """
    # The operator has a rule for vmap. Without need it costs 5 % of a small norm.
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
    training, rest = momentum is not None, (eps, torch.backends.cudnn.enabled)
    if num_groups == 1 or momentum is None:
        averages = (running_mean, running_var)
        # Not torch.nn.functional.batch_norm, which refuses eps=0 before torch 2.15.
        return torch.batch_norm(x, weight, bias, *averages, training, momentum or 0.0, *rest)

    def kernel(group: Tensor, affine: Affine) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = running_mean.new_zeros(2, group.shape[1])  # with momentum 1: the group's own
        return torch.batch_norm(group, *affine, mean, var, True, 1.0, *rest), mean, var

    out, means, variances = _by_group(
        kernel, x.unflatten(0, (num_groups, -1)), Affine(weight, bias)
    )
    count = x[:, 0].numel()  # of all groups
    group_count = count / num_groups
    with torch.no_grad():
        # The correction makes it the sum of squares over G - G / count, the unbiased share.
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
    """Runs a kernel on each group of x (G, N, C, *); returns outputs and rows (G, C)."""
    num_groups, _, num_channels = x.shape[:3]
    if num_groups == 1:
        out, *rows = kernel(x.squeeze(0), affine)
        # Not out[0] where it is undone: that costs a tensor of zeros and a copy in the backward.
        return out[None], rows[0][None], rows[1][None]
    if x.device.type == "cpu" and x.shape[1:].numel() > LOOP_FROM_ELEMENTS:
        parts = [kernel(part, affine) for part in x]
        out, first, second = (torch.stack(values) for values in zip(*parts, strict=True))
        return out, first, second
    folded = x.movedim(0, 1).flatten(1, 2)  # a group's channels become channels of their own
    repeated = Affine(*[None if v is None else v.repeat(num_groups) for v in affine])
    out, *rows = kernel(folded, repeated)
    first, second = (row.unflatten(0, (num_groups, num_channels)) for row in rows)
    return out.unflatten(1, (num_groups, num_channels)).movedim(1, 0), first, second


def group_norm(x: Tensor, num_groups: int, affine: Affine, eps: float) -> Tensor:
    """Returns torch's group norm of x (N, C, *); replicas of a stack fold into channels and groups.

    vmap's own rule makes samples of the replicas, with two copies of all values in each direction:
    convolutions of a stack want its channels together.
    """
    folds = x.ndim > 2 and _folding_pays(x, affine.weight)
    function = torch.ops.normexp.group_norm.default if folds else _group_norm
    return function(x, *affine, x.shape[1] // num_groups, eps)


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int, eps: float
) -> Tensor:
    return torch.nn.functional.group_norm(x, x.shape[1] // group_size, weight, bias, eps)


def _folding_pays(x: Tensor, row: Tensor | None) -> bool:
    """True under vmap, if x or a row (C,) differs between the replicas and x is large enough."""
    is_stacked = is_batchedtensor(x) or (row is not None and is_batchedtensor(row))
    return is_stacked and (x.device.type != "cpu" or x.numel() >= FOLD_FROM_ELEMENTS)


_LIBRARY = torch.library.Library("normexp", "FRAGMENT")  # registrations last as long as it


def _register(kernel: Callable[..., Tensor], arguments: str, num_rows: int) -> None:
    """Makes an operator of a kernel of x (N, C, *), `num_rows` rows (C,) and settings.

    Under vmap it takes the channels of all replicas in one call.
    """

    def fold_replicas(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        axis, size = in_dims[0], info.batch_size
        x = x[:, None].expand(-1, size, *x.shape[1:]) if axis is None else x.movedim(axis, 1)
        rows = [  # (S, C) to (S * C,); a view of buffers, which the kernel moves in place
            None if row is None else row.movedim(dim, 0).flatten()
            for row, dim in zip(rest[:num_rows], in_dims[1 : num_rows + 1], strict=True)
        ]
        out = kernel(x.flatten(1, 2), *rows, *rest[num_rows:])
        return out.unflatten(1, (size, -1)), 1

    name = kernel.__name__.lstrip("_")
    _LIBRARY.define(f"{name}({arguments}) -> Tensor")
    _LIBRARY.impl(name, kernel, "CompositeImplicitAutograd")
    torch.library.register_vmap(f"normexp::{name}", fold_replicas, lib=_LIBRARY)


_register(
    _batch_norm,
    "Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, Tensor(b!) running_var, "
    "int num_groups, float? momentum, float eps",
    num_rows=4,
)
_register(
    _group_norm, "Tensor x, Tensor? weight, Tensor? bias, int group_size, float eps", num_rows=2
)
