"""The site of a norm in a model: views, masks and ghost sub-batches for the norm inside.

norms/contract.py says what a site may expect of its norm. The functions below read, write and merge
the state of norms, which is their buffers by name, and translate names between a model with sites
and the network as its authors build it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

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
from normexp.norms.counters import norms_with_counters
from normexp.norms.samples import FIRST_AXIS, SampleOrder
from normexp.training.config.keys import RunningFrom

View = Literal["map", "token", "sequence"]
# Attributes of a norm that its site hides, because they say how norms can be treated.
NOT_PASSED_ON = (
    *("forward_groups", "merge_state", "sequential_state", "synchronized", "momentum"),
    *("num_training_steps", "norm_parameters", "track_running_stats", "inplace"),
)
# What networks read of a norm to normalize without its forward.
READ_TO_BYPASS = ("weight", "bias", "eps")
AVERAGES = ("running_mean", "running_var", "num_batches_tracked")


class ReadAroundNorm(AttributeError, UserError):
    """A network reads an attribute that a replaced norm lacks; `hasattr` is false."""


class InPlaceOfNorm(nn.Module):
    """A module that replaces a norm, and lacks the tensors that a network expects of it."""

    def __getattr__(self, name: str) -> Any:
        if name in READ_TO_BYPASS:
            raise ReadAroundNorm(
                f"the {name} of a replaced norm is read, and that of the new norm is at "
                f".norm.{name}; a network that reads it in its forward normalizes by itself and "
                "would bypass the new norm: use norm=as_built, or switch its fused path off"
            )
        if name in AVERAGES:
            norm = self._modules.get("norm")
            if not hasattr(norm, name):
                raise ReadAroundNorm(
                    f"the {name} of a replaced norm is read, and {type(norm).__name__} has none; "
                    "use norm=as_built, or norm=batch"
                )
            return getattr(norm, name)
        return super().__getattr__(name)


class Part(NamedTuple):
    """The arguments of a norm for some of the samples."""

    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


class Site(InPlaceOfNorm):
    """A place in a model where a norm sits, named by its module path.

    Splits the samples of a training forward into ghost sub-batches of `norm_batch_size`, shows
    each to the norm in its view, and joins the outputs. In evaluation nothing is split.

    Shapes: x (N, C, *) for view `map`; (B, T, C) for `token` and `sequence`, or (N, *, C), whose
    position axes are joined; mask (N, *) or (B, T). A single sample may lack its axis in the view
    `token`.

    Attributes:
        order: of the samples in x; None: the first axis counts them.
        keeps_padding: a norm without `mask` is shown padding too, since that was found to move
            nothing real; else it is shown the real positions alone.
    """

    adds_level = "norm"  # in the names of tensors, which the network's authors do not have
    num_features: int  # as the model asked
    order: SampleOrder | None = None
    keeps_padding = False

    def __init__(
        self,
        norm: nn.Module,
        view: View,
        norm_batch_size: int | None,
        running_from: RunningFrom = "step",
    ) -> None:
        super().__init__()
        self.norm = norm
        self.view: View = view
        self.norm_batch_size = norm_batch_size
        self.running_from: RunningFrom = running_from
        self.takes_mask = takes_mask(norm)

    def extra_repr(self) -> str:
        return f"view={self.view}, norm_batch_size={self.norm_batch_size}"

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        if isinstance(x, fx.Proxy):
            return _leaf_of_trace(self, x, *(() if mask is None else (mask,)))
        is_split = self.training and self.norm_batch_size is not None
        is_plain = self.view == "map" and mask is None and self.order is None
        if is_plain and not is_split and x.numel():
            return self.norm(x)  # what follows would take as long as a small norm
        if self.order is None:
            return self._normalize(x, mask)
        rows = self.order.rows_per_sample(x) if self.training and self.norm_batch_size else 1
        if mask is not None:
            mask = self.order.arrange(mask, rows)
        out = self._normalize(self.order.arrange(x, rows), mask, rows=rows)
        return self.order.restore(out, rows)

    def _normalize(self, x: Tensor, mask: Mask = None, *, rows: int = 1) -> Tensor:
        """Returns the output for x with samples first, each `rows` rows."""
        if not x.numel():
            return x.clone()  # a detector may propose nothing
        if self.view != "map" and x.ndim != 3:
            positions = x.shape[1:-1].numel()
            tokens = x.reshape(x.shape[0] if x.ndim > 1 else 1, positions, x.shape[-1])
            mask = None if mask is None else mask.reshape(tokens.shape[:2])
            return self._normalize(tokens, mask, rows=rows).view(x.shape)
        sizes = self._group_sizes(x, rows)
        if len(sizes) < 2:
            return self._apply_in_view(self.norm, x, mask)
        if isinstance(self.norm, NormOfGroups) and self.running_from == "step":
            if sizes[-1] == sizes[0]:
                groups = x.unflatten(0, (len(sizes), -1))  # (G, n, ...)
                group_masks = None if mask is None else mask.unflatten(0, (len(sizes), -1))
                out = self._apply_in_view(self.norm.forward_groups, groups, group_masks)
                return out.flatten(0, 1)
            sizes = [sum(sizes[:-1]), sizes[-1]]  # the first part then divides evenly
        masks = _split(mask, sizes)
        parts = [Part((x, mask), {}) for x, mask in zip(x.split(sizes), masks, strict=True)]
        return torch.cat(self._apply_in_parts(partial(self._normalize, rows=rows), parts, sizes))

    def _group_sizes(self, x: Tensor, rows: int = 1) -> list[int]:
        """Returns the rows of each group that shares statistics; the last may have fewer."""
        size = self.norm_batch_size
        if not self.training or size is None:
            return [x.shape[0]]
        num_full, remainder = divmod(x.shape[0], size * rows)
        return [size * rows] * num_full + ([remainder] if remainder else [])

    def _apply_in_parts(
        self, run: Callable[..., Tensor], parts: Sequence[Part], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Calls `run` with every part, and ends with the state that `running_from` says."""
        originals = dict(self.norm.named_buffers())
        start = read_state(self.norm)
        outputs, ends = [], []
        counting = norms_with_counters(self.norm)
        counters = counting[0].counters if counting else None  # the same for all
        try:
            for i, part in enumerate(parts):
                state = ends[-1] if ends and self.running_from == "sequence" else start
                if i > 0 or self.running_from != "group":  # a first group's backward may write too
                    # Fresh tensors for each part, because a kernel may keep them for its backward.
                    install_state(self.norm, {name: value.clone() for name, value in state.items()})
                with counters.moving_at_once() if counters else nullcontext():
                    outputs.append(run(*part.args, **part.keywords))
                ends.append(read_state(self.norm))
        finally:
            install_state(self.norm, originals)
        if self.running_from != "group":
            shares = [size / sum(sizes) for size in sizes]
            write_state(self.norm, state_after(self.norm, start, ends, shares, self.running_from))
        return outputs

    def _apply_in_view(self, norm: Callable[..., Tensor], x: Tensor, mask: Mask) -> Tensor:
        """Shows x to the norm in its view, and returns the output in the shape of x.

        Both may lead with an axis of groups.
        """
        if self.view == "token":
            tokens = x.flatten(-3, -2)  # (B, T, C) -> (B*T, C)
            token_mask = None if mask is None else mask.flatten(-2)
            return self._call(norm, tokens, token_mask).unflatten(-2, x.shape[-3:-1])
        if self.view == "sequence":
            return self._call(norm, x.mT, mask).mT  # (B, T, C) -> (B, C, T)
        return self._call(norm, x, mask)

    def _call(self, norm: Callable[..., Tensor], x: Tensor, mask: Mask) -> Tensor:
        if mask is not None and self.takes_mask:
            return norm(x, mask=mask)
        if mask is None or self.keeps_padding:
            return norm(x)
        return self._apply_to_real(x, mask)

    def _apply_to_real(self, x: Tensor, mask: Tensor) -> Tensor:
        """Shows only real positions to a norm without a mask; shapes vary, so never under vmap."""
        if self.view == "token":  # (B*T, C): drop the padded tokens
            out = torch.zeros_like(x)
            out[mask] = self.norm(x[mask]).to(x.dtype)
            return out
        outputs = []  # (B, C, T): one sample at a time, each at its own length
        for sample, real in zip(x, mask, strict=True):
            out = torch.zeros_like(sample)
            out[:, real] = self.norm(sample[None, :, real])[0].to(x.dtype)
            outputs.append(out)
        return torch.stack(outputs)


class AsBuiltSite(Site):
    """The site of a norm that a network already has, which runs with all its arguments.

    A training forward is split as in any site, with every argument that has a value per sample.
    The network reads the attributes of its norm from the site, but for NOT_PASSED_ON.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self._modules or name in NOT_PASSED_ON or name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self.norm, name)

    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        x, _ = input_and_mask(args, keywords)
        if isinstance(x, fx.Proxy):
            return _leaf_of_trace(self, *args, **keywords)
        if not self.training or self.norm_batch_size is None:
            return self.norm(*args, **keywords)
        order = self.order or FIRST_AXIS
        rows = order.rows_per_sample(x)
        sizes = self._group_sizes(order.arrange(x, rows), rows)
        if len(sizes) < 2:
            return self.norm(*args, **keywords)

        def split(value: Any) -> Sequence[Any]:
            if not isinstance(value, Tensor) or not order.is_like(value, x):
                return [value] * len(sizes)
            return [order.restore(part, rows) for part in order.arrange(value, rows).split(sizes)]

        of_args = [split(value) for value in args]
        of_keywords = {name: split(value) for name, value in keywords.items()}
        parts: list[Part] = []
        for i in range(len(sizes)):
            part_keywords = {name: values[i] for name, values in of_keywords.items()}
            parts.append(Part(tuple(values[i] for values in of_args), part_keywords))
        outputs = self._apply_in_parts(self.norm, parts, sizes)
        return order.restore(torch.cat([order.arrange(out, rows) for out in outputs]), rows)


def _leaf_of_trace(site: Site, *args: Any, **keywords: Any) -> Any:
    """Makes the site one node of a graph that torch.fx traces, as it does torch's own norms."""
    tracer: Any = next(iter((*args, *keywords.values()))).tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(site), args, keywords)


def _split(mask: Mask, sizes: list[int]) -> Sequence[Mask]:
    return [None] * len(sizes) if mask is None else mask.split(sizes)


def takes_mask(norm: nn.Module) -> bool:
    """True if the norm's forward has an argument `mask`."""
    if isinstance(norm, LayoutAdapter):
        return takes_mask(norm.norm)
    return "mask" in inspect.signature(norm.forward).parameters


def state_after(
    module: nn.Module,
    start: State,
    ends: list[State],
    shares: list[float],
    running_from: RunningFrom,
) -> State:
    """Returns the buffers of `module` after a step that was run in parts.

    step        every part began at `start`; the end states are merged
    group       the first part alone counts, as where one device's buffers are broadcast
    sequence    each part began where the one before it ended, as in plain accumulation
    """
    if running_from == "step":
        return merge_state(module, start, ends, shares)
    return ends[0] if running_from == "group" else ends[-1]


def merge_state(module: nn.Module, start: State, parts: list[State], shares: list[float]) -> State:
    """Returns the buffers of `module` after a step run in parts that all began at `start`.

    A submodule may merge its buffers by its own `merge_state`. Of other buffers, floating-point
    ones are the mean of the parts weighted by `shares`; integers are as the first part left them,
    so that a counter rises by one per step. Leading replica axes pass through.
    """
    merged: State = {}
    for path, child in module.named_modules():
        if isinstance(child, MergesState):
            prefix = f"{path}." if path else ""
            ends = [_below(prefix, part) for part in parts]
            for name, value in child.merge_state(_below(prefix, start), ends, shares).items():
                merged[prefix + name] = value
    for name in parts[0].keys() - merged.keys():
        value = parts[0][name]
        if value.is_floating_point():
            weighted = [part[name] * share for part, share in zip(parts, shares, strict=True)]
            value = torch.stack(weighted).sum(0)
        merged[name] = value
    return merged


def _below(prefix: str, state: State) -> State:
    return {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}


def is_sequential(module: nn.Module) -> bool:
    """True if a norm in `module` declares that its state must see samples in order."""
    return any(
        isinstance(child, DeclaresOrder) and child.sequential_state for child in module.modules()
    )


def read_state(module: nn.Module) -> State:
    """Returns a copy of the module's buffers."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def write_state(module: nn.Module, state: State) -> None:
    """Copies values into the module's buffers, in place, as stacked replicas need."""
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
    added = set()  # paths of the norms below sites and adapters
    for path, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "adds_level"):
            added.add(f"{path}.{module.adds_level}".lstrip("."))
    names = {}
    for name in model.state_dict():
        path, kept = "", []
        for level in name.split("."):
            path = f"{path}.{level}".lstrip(".")
            if path not in added:
                kept.append(level)
        names[name] = ".".join(kept)
    return names


def state_as_built(model: nn.Module) -> State:
    """Returns the model's state_dict under the names of the network as its authors build it."""
    names = names_as_built(model)
    return {names[name]: value for name, value in model.state_dict().items()}


def load_as_built(model: nn.Module, state: State) -> None:
    """Loads what `state_as_built` returned. Raises RuntimeError unless names and shapes fit."""
    names = {as_built: name for name, as_built in names_as_built(model).items()}
    model.load_state_dict({names.get(name, name): value for name, value in state.items()})


def norm_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that weight decay treats as a norm's.

    These are the parameters inside sites, and those in the `norm_parameters` of slot modules.
    """
    for module in model.modules():
        if isinstance(module, Site):
            yield from module.parameters()
        if isinstance(module, HasNormParameters):
            yield from map(module.get_parameter, module.norm_parameters)


def as_maps(x: Tensor, site: nn.Module) -> Tensor:
    """Reshapes an input or output of a module to (N, C, P), P positions.

    A site of tokens has them as (N, *, C), any other module as (N, C, *).
    """
    if isinstance(site, Site) and site.view != "map":
        return x.reshape(len(x), -1, x.shape[-1]).transpose(1, 2)
    return x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)


def input_and_mask(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Tensor, Mask]:
    """Returns input and mask from the arguments of a site's forward."""
    x, *others = (*args, *keywords.values())
    mask = others[0] if others else None
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
    return x, mask if is_mask else None
