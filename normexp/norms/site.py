"""The site, which handles views, masks and ghost sub-batches for the norm inside, and its state.

What it may expect of that norm is the contract, norms/contract.py. The state of a norm is its
buffers by name: read, written, swapped, and merged from the parts of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.errors import UserError
from normexp.norms.adapt import LayoutAdapter
from normexp.norms.contract import (
    DeclaresOrder,
    HasNormParameters,
    Mask,
    MergesState,
    NormOfGroups,
    State,
)
from normexp.norms.counters import counting

View = Literal["map", "token", "sequence"]
NOTHING: Mapping[str, Any] = {}
NOT_PASSED_ON = (
    *("forward_groups", "merge_state", "sequential_state", "spans_devices", "momentum"),
    *("num_training_steps", "norm_parameters", "track_running_stats", "inplace"),
)
OWN_OF_A_NORM = ("weight", "bias", "eps")  # what networks read to normalize without its forward


class ReadAroundNorm(AttributeError, UserError):
    """A network reads what a site does not have; `hasattr` is false."""


class InPlaceOfNorm(nn.Module):
    """A module whose tensors are not those that a network expects of its norm."""

    def __getattr__(self, name: str) -> Any:
        if name in OWN_OF_A_NORM:
            raise ReadAroundNorm(
                f"the {name} of a replaced norm is read, and that of the new norm is at "
                f".norm.{name}; a network that reads it in its forward normalizes by itself and "
                "would bypass the new norm: use norm=as_built, or switch its fused path off"
            )
        return super().__getattr__(name)


class Site(InPlaceOfNorm):
    """A place in a model where a norm sits, named by its module path.

    Splits the samples of a training forward into ghost sub-batches of `norm_batch_size`, shows
    each to the norm in its view, and joins the outputs. In evaluation nothing is split.

    Shapes: x (N, C, *) for view `map`; (B, T, C) for `token` and `sequence`, or (N, *, C), whose
    positions * it joins; mask (N, *) or (B, T).
    """

    adds_level = "norm"  # the part of a tensor's name that the network's authors do not have
    num_features: int  # of the norm, as the model asked for it

    def __init__(self, norm: nn.Module, view: View, norm_batch_size: int | None) -> None:
        super().__init__()
        self.norm = norm
        self.view: View = view
        self.norm_batch_size = norm_batch_size
        self.takes_mask = takes_mask(norm)

    def extra_repr(self) -> str:
        return f"view={self.view}, norm_batch_size={self.norm_batch_size}"

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if self.view != "map" and x.ndim != 3:
            return self.forward(x.reshape(len(x), -1, x.shape[-1])).view(x.shape)
        sizes = self._group_sizes(len(x))
        if len(sizes) < 2:
            return self._apply_in_view(self.norm, x, mask)
        # Each part comes through this forward again, and then divides evenly.
        if not isinstance(self.norm, NormOfGroups):
            return self._apply_in_parts(sizes, (x, mask))
        if sizes[-1] != sizes[0]:
            return self._apply_in_parts([sum(sizes[:-1]), sizes[-1]], (x, mask))
        groups = x.unflatten(0, (len(sizes), -1))  # (G, n, ...)
        group_masks = None if mask is None else mask.unflatten(0, (len(sizes), -1))
        return self._apply_in_view(self.norm.forward_groups, groups, group_masks).flatten(0, 1)

    def _group_sizes(self, num_samples: int) -> list[int]:
        """The samples of each set of statistics of a forward; the last set may be smaller."""
        size = self.norm_batch_size
        if not self.training or size is None:
            return [num_samples]
        num_groups, rest = divmod(num_samples, size)
        return [size] * num_groups + ([rest] if rest else [])

    def _apply_in_parts(
        self, sizes: list[int], args: tuple[Any, ...], keywords: Mapping[str, Any] = NOTHING
    ) -> Tensor:
        """Runs every part from the same initial state, then merges the final states by share."""
        originals = dict(self.norm.named_buffers())
        start = read_state(self.norm)
        parts = [_split(value, sizes) for value in (*args, *keywords.values())]
        outputs, ends = [], []
        try:
            for part in zip(*parts, strict=True):
                # Fresh tensors for each part, because a kernel may keep them for its backward.
                install_state(self.norm, {name: value.clone() for name, value in start.items()})
                named = dict(zip(keywords, part[len(args) :], strict=True))
                with counting(together=False):
                    outputs.append(self.forward(*part[: len(args)], **named))
                ends.append(read_state(self.norm))
        finally:
            install_state(self.norm, originals)
        shares = [size / sum(sizes) for size in sizes]
        write_state(self.norm, merge_state(self.norm, start, ends, shares))
        return torch.cat(outputs)

    def _apply_in_view(self, norm: Callable[..., Tensor], x: Tensor, mask: Mask) -> Tensor:
        """Shows x, which may lead with an axis of groups, to the norm and turns the result back."""
        if self.view == "token":
            rows = x.flatten(-3, -2)  # (B, T, C) -> (B*T, C)
            row_mask = None if mask is None else mask.flatten(-2)
            return self._call(norm, rows, row_mask).unflatten(-2, x.shape[-3:-1])
        if self.view == "sequence":
            return self._call(norm, x.mT, mask).mT  # (B, T, C) -> (B, C, T)
        return self._call(norm, x, mask)

    def _call(self, norm: Callable[..., Tensor], x: Tensor, mask: Mask) -> Tensor:
        if mask is None:
            return norm(x)
        return norm(x, mask=mask) if self.takes_mask else self._apply_to_real(x, mask)

    def _apply_to_real(self, x: Tensor, mask: Tensor) -> Tensor:
        """Shows only real positions to a norm without a mask; shapes vary, so never under vmap."""
        if self.view == "token":  # (B*T, C): drop the padded rows
            out = torch.zeros_like(x)
            out[mask] = self.norm(x[mask]).to(x.dtype)
            return out
        rows = []  # (B, C, T): one sample at a time, each at its own length
        for sample, real in zip(x, mask, strict=True):
            row = torch.zeros_like(sample)
            row[:, real] = self.norm(sample[None, :, real])[0].to(x.dtype)
            rows.append(row)
        return torch.stack(rows)


class AsBuiltSite(Site):
    """The site of a norm that a network has: runs the module itself, with all its arguments.

    A training forward is split as in any site, with every argument that has a value per sample.
    A network reads the attributes of its norm here, but for those that say what this package can
    do with a norm.
    """

    def __getattr__(self, name: str) -> Any:
        is_own = name in self._modules or name in NOT_PASSED_ON or name.startswith("_")
        return super().__getattr__(name) if is_own else getattr(self.norm, name)

    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        x, _ = input_and_mask(args, keywords)
        sizes = self._group_sizes(len(x))
        if len(sizes) < 2:
            return self.norm(*args, **keywords)
        return self._apply_in_parts(sizes, args, keywords)


def _split(value: Any, sizes: list[int]) -> Sequence[Any]:
    """The parts of a tensor with a value per sample; any other value for each part."""
    if isinstance(value, Tensor) and value.ndim and len(value) == sum(sizes):
        return value.split(sizes)
    return [value] * len(sizes)


def takes_mask(norm: nn.Module) -> bool:
    """True if the norm's forward has an argument `mask`."""
    if isinstance(norm, LayoutAdapter):
        return takes_mask(norm.norm)
    return "mask" in inspect.signature(norm.forward).parameters


def merge_state(module: nn.Module, start: State, parts: list[State], shares: list[float]) -> State:
    """Returns the buffers of `module` after a step run in parts that all began at `start`.

    Floating-point buffers are the share-weighted mean of the parts; integers (counters) are as the
    first part left them, so that a counter rises by one per step. A submodule's own `merge_state`
    takes precedence for the buffers that it returns. Leading replica axes pass through.
    """
    merged: State = {}
    for path, child in module.named_modules():
        if isinstance(child, MergesState):
            prefix = f"{path}." if path else ""
            first, *ends = (_below(prefix, state) for state in (start, *parts))
            values = child.merge_state(first, ends, shares)
            merged |= {prefix + name: value for name, value in values.items()}
    for name in parts[0].keys() - merged.keys():
        first = parts[0][name]
        weighted = (part[name] * share for part, share in zip(parts, shares, strict=True))
        merged[name] = torch.stack([*weighted]).sum(0) if first.is_floating_point() else first
    return merged


def _below(prefix: str, state: State) -> State:
    return {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}


def is_sequential(module: nn.Module) -> bool:
    """True if a norm in `module` declares that its state must see samples in order."""
    norms = (child for child in module.modules() if isinstance(child, DeclaresOrder))
    return any(norm.sequential_state for norm in norms)


def read_state(module: nn.Module) -> State:
    """Returns a copy of the module's buffers."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def write_state(module: nn.Module, state: State) -> None:
    """Copies values into the module's buffers in place, which stacked replicas need."""
    buffers = dict(module.named_buffers())
    for name, value in state.items():
        buffers[name].copy_(value)


def install_state(module: nn.Module, state: State) -> None:
    """Makes the tensors of `state` themselves the module's buffers."""
    for name, value in state.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, value)


def named_sites(model: nn.Module) -> Iterator[tuple[str, Site]]:
    """Yields the sites of a model with their names, in the order of its modules."""
    for name, module in model.named_modules():
        if isinstance(module, Site):
            yield name, module


def modules_outside_sites(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module and its descendants, without sites and their contents."""
    if isinstance(module, Site):
        return
    yield module
    for child in module.children():
        yield from modules_outside_sites(child)


def names_as_built(model: nn.Module) -> dict[str, str]:
    """Maps each name in the model's state_dict to its name in the network as its authors build it.

    A site and what adapts a norm to it add a level: `bn1.norm.weight` is the authors' `bn1.weight`.
    """
    modules = model.named_modules(remove_duplicate=False)
    levels = {
        f"{path}.{module.adds_level}".lstrip(".")
        for path, module in modules
        if hasattr(module, "adds_level")
    }
    names = {}
    for name in model.state_dict():
        parts = name.split(".")
        kept = [part for i, part in enumerate(parts, 1) if ".".join(parts[:i]) not in levels]
        names[name] = ".".join(kept)
    return names


def state_as_built(model: nn.Module) -> State:
    """Returns the model's state_dict under the names of the network as its authors build it."""
    names = names_as_built(model)
    return {names[name]: value for name, value in model.state_dict().items()}


def load_as_built(model: nn.Module, state: State) -> None:
    """Loads what `state_as_built` returned. Raises RuntimeError unless names and shapes fit."""
    own = {name: own for own, name in names_as_built(model).items()}
    model.load_state_dict({own.get(name, name): value for name, value in state.items()})


def norm_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that weight decay treats as a norm's.

    These are the parameters inside sites, and those in the `norm_parameters` of slot modules.
    """
    for module in model.modules():
        if isinstance(module, Site):
            yield from module.parameters()
        if isinstance(module, HasNormParameters):
            yield from (module.get_parameter(name) for name in module.norm_parameters)


def as_maps(x: Tensor, site: nn.Module) -> Tensor:
    """Reshapes an input or output of a site, (N, C, *) or (N, *, C), to (N, C, P), P positions.

    Any other module has channels first.
    """
    if isinstance(site, Site) and site.view != "map":
        return x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2)
    return x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)


def input_and_mask(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Tensor, Mask]:
    """Returns input and mask from the arguments of a site's forward."""
    x, *more = (*args, *keywords.values())
    mask = more[0] if more else None
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
    return x, mask if is_mask else None
