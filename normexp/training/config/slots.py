"""Slots: what surrounds a norm, for designs that are more than `norm(C)`.

    act             the activation after a norm; relu
    conv            the convolutions; plain
    residual_scale  initial value of a learned scalar at the end of each residual branch; null: none
    layer_scale     the same with a number per channel, LayerScale; null: none
    placement       where norms sit in a transformer block; pre
    qk_norm         a norm on the queries and keys of each attention head; false
    v_norm          a norm on the values of each attention head; false

Each is a top-level key of the config. If it is null, the same key in the norm's YAML applies, and
otherwise the default given above: FRN sets its TLU this way, and `act=relu` removes it. Models get
slots from the norm factory (`norm.act(C)`, `norm.conv(...)`, `norm.residual(C)`, `norm.placement`,
`norm.qk_norm`, `norm.v_norm`) and never ask which norm they got. A slot that the model does not use
is refused if the config sets it, and logged if only the norm's YAML does.

Does not import torch, because the command line checks values against these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Act = Literal["relu", "gelu", "silu", "tlu", "scaled_relu", "proxy_relu", "proxy_silu", "identity"]
Conv = Literal["plain", "weight_standardized", "scaled_weight_standardized"]
Placement = Literal[
    "pre",
    "post",
    "sandwich",
    "peri",
    "reordered",
    "layernorm_scaling",
    "hybrid",
    "mix_ln",
    "parallel",
    "simple",
]
# What each is, for --help: f is attention, then the MLP. models/transformer.py has the papers.
PLACEMENTS: dict[Placement, str] = {
    "pre": "x + f(norm(x))",
    "post": "norm(x + f(x))",
    "sandwich": "x + norm(f(norm(x)))",
    "peri": "sandwich, and a norm on the embedding",
    "reordered": "x + norm(f(x)), as OLMo 2",
    "layernorm_scaling": "x + f(norm(x) / sqrt(l)) in block l = 1, 2, ...",
    "hybrid": "y = norm(x + attention(x)), q, k and v normed; then y + mlp(y)",
    "mix_ln": "post in the first quarter of the blocks, pre in the others",
    "parallel": "x + attention(norm(x)) + mlp(norm(x))",
    "simple": "x + f(x), a norm after every linear map of f: SimpleNorm",
}


@dataclass(frozen=True)
class Slots:
    """The value of every slot; the defaults apply if neither config nor norm sets one."""

    act: Act = "relu"
    conv: Conv = "plain"
    residual_scale: float | None = None
    layer_scale: float | None = None
    placement: Placement = "pre"
    qk_norm: bool = False
    v_norm: bool = False


SLOTS = tuple(field.name for field in fields(Slots))

# What a model without the slot lacks, and which models have the slot.
PLACES = {
    "act": ("no activation after a norm", "model=convnet, small_resnet or unet"),
    "conv": ("no convolution from the norm factory", "model=convnet, small_resnet or unet"),
    **dict.fromkeys(
        ("residual_scale", "layer_scale"),
        ("no residual branch", "model=small_resnet, vit, gpt or text_encoder"),
    ),
    "placement": ("no transformer block", "model=vit, gpt or text_encoder"),
    **dict.fromkeys(("qk_norm", "v_norm"), ("no attention", "model=vit, gpt or text_encoder")),
}


def resolve(config: Mapping[str, Any], norm: Mapping[str, Any]) -> Slots:
    """Returns the slots of a cell: the config's value, else the norm's, else the default."""
    chosen = {}
    for level in (norm, config):  # the config wins
        for slot in SLOTS:
            if level.get(slot) is not None:
                chosen[slot] = level[slot]
    return Slots(**chosen)


def set_but_unused(level: Mapping[str, Any], used: set[str]) -> list[str]:
    """Returns the slots that `level`, a config or a norm, sets but the model does not use."""
    return [key for key in SLOTS if level.get(key) is not None and key not in used]
