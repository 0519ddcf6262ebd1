"""Small networks and data for the probes, and norms with one fault each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from normexp.data import Data, Examples, build_text_data
from normexp.norms.build import build_norm
from normexp.norms.factory import NormFactory
from normexp.norms.site import View
from normexp.training.config.compose import compose_config
from normexp.training.config.groups import shipped_defaults
from normexp.training.models.transformer import GPT, TextEncoder
from normexp.training.models.vision import ConvNet

VOCAB, LENGTH, WIDTH = 7, 8, 16
Make = Callable[[int], nn.Module]


class PositionMean(nn.Module):
    """Centres each channel over the positions, padding and future included."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # (N, C, T)
        del mask
        return x - x.mean(dim=-1, keepdim=True)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text_data() -> Data:
    """A text of random symbols in windows of 8."""
    symbols = torch.randint(VOCAB, (600,), generator=source()).tolist()
    text = "".join("abcdefg"[symbol] for symbol in symbols)
    return build_text_data("text", text, LENGTH, val_fraction=0.3, test_fraction=0.3)


def padded_data(lengths: Sequence[int] = (2, 3, 4, 5, 6, 8)) -> Data:
    """Strings of 8 positions; only the first few are real."""
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]

    def examples(seed: int) -> Examples:
        tokens = torch.randint(1, VOCAB, (len(lengths), LENGTH), generator=source(seed))
        return Examples(tokens, torch.arange(len(lengths)) % 3, mask)

    return _classes(examples(0), examples(1), input_shape=(LENGTH,), vocab_size=VOCAB)


def image_data(num_train: int = 40) -> Data:
    """Noise of 8x8 pixels in three classes."""

    def examples(count: int, seed: int) -> Examples:
        images = torch.randint(256, (count, 1, 8, 8), generator=source(seed)).to(torch.uint8)
        return Examples(images, torch.arange(count) % 3)

    train, val = examples(num_train, 0), examples(6, 1)
    return _classes(train, val, input_shape=(1, 8, 8), mean=(0.5,), std=(0.3,))


def _classes(train: Examples, val: Examples, **others: Any) -> Data:
    sets = {"train": train, "val": val, "test": val}
    return Data(name="mine", task="classification", num_outputs=3, **sets, **others)


def shipped(name: str, data: Data, view: View) -> NormFactory:
    """The norm of conf/norm/<name>.yaml in a view, for WIDTH features."""
    groups = {"num_groups": 4} if "group" in name and name != "group1" else {}
    norm = declared(name) | {"view": view} | groups
    return build_norm({**defaults(), "norm": norm}, num_positions=data.input_shape[-1])


def declared(name: str) -> dict[str, Any]:
    return shipped_defaults("norm", name) or {}


@cache
def defaults() -> dict[str, Any]:
    return compose_config([])


def gpt(norm: NormFactory) -> nn.Module:
    torch.manual_seed(0)
    return GPT(norm, VOCAB, LENGTH, depth=1, width=WIDTH, num_heads=2, dropout=0.0)


def encoder(norm: NormFactory, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return TextEncoder(norm, VOCAB, LENGTH, 3, depth=1, width=WIDTH, num_heads=2, dropout=dropout)


def convnet(norm: NormFactory) -> nn.Module:
    torch.manual_seed(0)
    return ConvNet(norm, (1, 8, 8), 3, width=8)


class Model(nn.Module):
    """A model from a function of its modules and its inputs."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def text_model(function: Callable[..., Tensor], norm: nn.Module, **modules: nn.Module) -> Model:
    """A model of tokens with an embedding, one norm and a head."""
    ends = {"embedding": nn.Embedding(VOCAB, WIDTH), "head": nn.Linear(WIDTH, VOCAB)}
    return Model(function, norm=norm, **ends, **modules)


class FlatNet(nn.Module):
    """Images as vectors, with one norm."""

    def __init__(self, norm: NormFactory, width: int = WIDTH) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, width)
        self.norm1 = norm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm1(self.hidden(inputs.flatten(1)))))
