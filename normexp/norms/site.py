"""What a norm is, how a model asks for one, and what a site hands to it.

Axis legend, used in every shape comment of the project:
    N samples, C channels (features), H W image rows and columns, T token positions,
    * any number of position axes (none, L, H W, D H W), G groups of samples, S replicas,
    V vocabulary

A norm maps (N, C, *) to the same shape and dtype, with statistics in float32 or wider. One that
pools positions or samples takes an optional `mask` (N, *), true where real; values at masked
positions move nothing and come back as zero.

A norm may also define two methods, which make splits of a batch faster or its running state exact;
a norm without them is split by running it once per part:

    forward_groups(x, mask=None)        x (G, N, C, *): statistics per group, in one call
    merge_state(start, parts, shares)   the state after a step that was run in parts

and an attribute `sequential_state = True`, where its state must see samples one after another: such
a norm is refused where a step is split; or `spans_devices = True`, where it takes its statistics
over the samples of all processes of a training, and so needs no merge of their states.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from normexp.norms.state import install_state, merge_state, read_state, write_state

View = Literal["map", "token", "sequence"]


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or in its own dtype where that is wider: squares in bf16 lose digits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def over_channels(vector: Tensor, x: Tensor) -> Tensor:
    """A per-channel vector (C,) shaped to multiply `x` (N, C, *)."""
    return vector.view(-1, *[1] * (x.ndim - 2))


def takes_mask(norm: nn.Module) -> bool:
    """Whether the norm's forward has an argument `mask`."""
    return "mask" in inspect.signature(norm.forward).parameters


class Site(nn.Module):
    """One place in a model where a norm sits; its name is its module path.

    Splits the samples of a training forward into ghost sub-batches of `norm_batch_size`, shows
    each to the norm in its view, and puts the result back. In evaluation nothing is split.

    Shapes: x (N, C, *) for view `map`, (B, T, C) for `token` and `sequence`; mask (N, *) or (B, T).
    """

    def __init__(self, norm: nn.Module, view: View, norm_batch_size: int | None) -> None:
        super().__init__()
        self.norm = norm
        self.view: View = view
        self.norm_batch_size = norm_batch_size
        self.takes_mask = takes_mask(norm)

    def extra_repr(self) -> str:
        return f"view={self.view}, norm_batch_size={self.norm_batch_size}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        size = self.norm_batch_size
        if not self.training or size is None or size >= len(x):
            return self.apply_norm(x, mask)
        whole = len(x) // size * size
        if hasattr(self.norm, "forward_groups"):
            bounds = [(0, whole), (whole, len(x))]
        else:
            bounds = [(first, min(first + size, len(x))) for first in range(0, len(x), size)]
        return self._apply_in_parts(x, mask, [(a, b) for a, b in bounds if a < b])

    def _apply_in_parts(
        self, x: Tensor, mask: Tensor | None, bounds: list[tuple[int, int]]
    ) -> Tensor:
        """Each part starts from the state before the first; the state ends merged by share."""
        if len(bounds) == 1:
            return self._apply_part(x, mask)
        originals = dict(self.norm.named_buffers())
        start = read_state(self.norm)
        outputs, ends, shares = [], [], []
        try:
            for first, last in bounds:
                # Fresh tensors for each part: a kernel may keep them for its backward.
                install_state(self.norm, {name: value.clone() for name, value in start.items()})
                part_mask = None if mask is None else mask[first:last]
                outputs.append(self._apply_part(x[first:last], part_mask))
                ends.append(read_state(self.norm))
                shares.append((last - first) / len(x))
        finally:
            install_state(self.norm, originals)
        write_state(self.norm, merge_state(self.norm, start, ends, shares))
        return torch.cat(outputs)

    def _apply_part(self, x: Tensor, mask: Tensor | None) -> Tensor:
        size = self.norm_batch_size
        assert size is not None
        if len(x) <= size:
            return self.apply_norm(x, mask)
        groups = x.unflatten(0, (-1, size))  # (G, n, ...)
        group_masks = None if mask is None else mask.unflatten(0, (-1, size))
        return self.apply_norm(groups, group_masks, grouped=True).flatten(0, 1)

    def apply_norm(self, x: Tensor, mask: Tensor | None = None, *, grouped: bool = False) -> Tensor:
        """The norm on `x` in this site's view, without a split; `grouped` says x leads with G."""
        norm = cast(Any, self.norm).forward_groups if grouped else self.norm
        lead = 1 if grouped else 0
        if self.view == "token":
            shown = x.flatten(lead, lead + 1)  # (B, T, C) -> (B*T, C)
            shown_mask = None if mask is None else mask.flatten(lead, lead + 1)
        elif self.view == "sequence":
            shown, shown_mask = x.transpose(-1, -2), mask  # (B, T, C) -> (B, C, T)
        else:
            shown, shown_mask = x, mask
        if shown_mask is None:
            out = norm(shown)
        elif self.takes_mask:
            out = norm(shown, mask=shown_mask)
        else:
            assert not grouped, "a norm with forward_groups takes a mask"
            out = self._apply_to_real(shown, shown_mask)
        if self.view == "token":
            return out.unflatten(lead, x.shape[lead : lead + 2])
        return out.transpose(-1, -2) if self.view == "sequence" else out

    def _apply_to_real(self, x: Tensor, mask: Tensor) -> Tensor:
        """Only real positions reach a norm without a mask; dynamic shapes, so never under vmap."""
        if self.view == "token":  # (B*T, C): drop the padded rows
            out = torch.zeros_like(x)
            out[mask] = self.norm(x[mask]).to(x.dtype)
            return out
        rows = []  # (B, C, T): a sample at a time, each at its own length
        for sample, real in zip(x, mask, strict=True):
            row = torch.zeros_like(sample)
            row[:, real] = self.norm(sample[None, :, real])[0].to(x.dtype)
            rows.append(row)
        return torch.stack(rows)


def named_sites(model: nn.Module) -> Iterator[tuple[str, Site]]:
    """The sites of a model with their names, in the order of its modules."""
    for name, module in model.named_modules():
        if isinstance(module, Site):
            yield name, module


def norm_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that count as a norm's for weight decay.

    Those below a site, and those that a slot's module names in an attribute `norm_parameters`.
    """
    for module in model.modules():
        if isinstance(module, Site):
            yield from module.parameters()
        for name in getattr(module, "norm_parameters", ()):
            yield module.get_parameter(name)
