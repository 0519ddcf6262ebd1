"""Deep copies of networks, even after a forward that leaves tensors which torch does not copy."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from normexp.errors import UserError, one_line

T = TypeVar("T")


class _WithoutGraph(TorchFunctionMode):
    """Copies the values of tensors that a forward computed, as the weight of a spectral norm."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        # A copy that no forward computes anew still requires a gradient, so that a check finds it.
        return memo.setdefault(id(tensor), tensor.detach().clone().requires_grad_())


def copied(value: T, sharing: Iterable[object] = ()) -> T:
    """Returns a deep copy, in which tensors that were computed are leaves.

    Args:
        value: a module, or anything with modules inside.
        sharing: objects inside that the copy shares with the original.

    Raises:
        UserError: a module with lazy parameters, or with an attribute that cannot be copied.
    """
    if isinstance(value, nn.Module):
        lazy = [name for name, p in value.named_parameters() if is_lazy(p)]
        if lazy:
            raise UserError(
                f"{type(value).__name__}.{lazy[0]} has no shape before a first forward; give the "
                "sizes, as nn.Linear(64, 10) in place of nn.LazyLinear(10), or run one forward"
            )
    try:
        return _copied(value, sharing)
    except Exception as error:  # foreign objects may raise anything
        if not isinstance(value, nn.Module):
            raise
        raise UserError(
            f"{_obstacle(value)} cannot be copied ({one_line(error)}); keep it outside of the "
            "module, or define __deepcopy__ in its class"
        ) from error


def _copied(value: T, sharing: Iterable[object] = ()) -> T:
    with _WithoutGraph():
        return copy.deepcopy(value, {id(shared): shared for shared in sharing})


def _obstacle(module: nn.Module) -> str:
    """Returns the path of the innermost attribute that cannot be copied."""
    for path, child in reversed([*module.named_modules()]):
        for name, value in vars(child).items():
            try:
                _copied(value)
            except Exception:  # foreign objects may raise anything
                return ".".join(filter(None, (type(module).__name__, path, name)))
    return f"a {type(module).__name__}"
