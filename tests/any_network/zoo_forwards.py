"""Small networks with lists, dataclasses, gradients and draws in their forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from zoo_case import UNTRIED, Case, normal
from zoo_maps import Block, Classifier

C, T = 6, 5


class Tower(nn.Module):
    """The head of a detector: a list of the maps of every scale, one norm for all."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(3, C), nn.Conv2d(C, 4, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        return torch.cat([self.head(self.body(one)).flatten(2) for one in maps], 2)


class Crops(nn.Module):
    """Crops of two sizes; the features of all are rows of one batch, crop after crop."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block(3, C)
        self.head = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Linear(C, 2))

    def forward(self, crops: list[Tensor]) -> Tensor:
        features = torch.cat([self.body(crop).mean((2, 3)) for crop in crops])
        return self.head(features).unflatten(0, (len(crops), -1)).transpose(0, 1)


class Renorm(nn.Module):
    """Corrects each batch to its averages, with gradients of the batch alone."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features, 1, 1))
        self.register_buffer("std", torch.ones(num_features, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.mean) / self.std
        mean = x.mean((0, 2, 3), keepdim=True)
        std = x.std((0, 2, 3), keepdim=True, unbiased=False) + 1e-3
        scale, offset = std.detach() / self.std, (mean.detach() - self.mean) / self.std
        with torch.no_grad():
            self.mean.lerp_(mean[0], 0.01)
            self.std.lerp_(std[0], 0.01)
        return (x - mean) / std * scale + offset


class Autoencoder(nn.Module):
    """Draws its code also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Block(3, 2 * C), Block(C, C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_std = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * log_std.exp()), mean, log_std


def by_scale(samples: Sequence[Any]) -> tuple[list[Tensor]]:
    """One list, with the maps of each scale as a batch."""
    return ([torch.stack(maps) for maps in zip(*samples, strict=True)],)


def scales(*sides: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(3, side, side) for side in sides)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Windows(nn.Module):
    """Rows of all steps, and a dataclass as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.norm, self.head = nn.Linear(C, C), nn.BatchNorm1d(C), nn.Linear(C, 2)

    def forward(self, x: Tensor) -> Output:  # (N, T, C)
        hidden = self.norm(self.start(x).flatten(0, 1)).view_as(x).relu()
        return Output(self.head(hidden.mean(1)), hidden)


class ForceField(nn.Module):
    """The energy of some atoms, and the forces on them: a gradient in its forward."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Linear(3, C), nn.BatchNorm1d(C), nn.SiLU()
        self.energy = nn.Sequential(*hidden, nn.Linear(C, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:  # (N, atoms, 3)
        positions = positions.clone().requires_grad_()
        energy = self.energy(positions.flatten(0, 1)).view(len(positions), -1).sum(1)
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=self.training)
        return energy, -slope


class Causal(nn.Module):
    """Reparametrized weights, as old code for series has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.weight_norm(nn.Conv1d(C, C, 2, padding=1))
        self.norm, self.head = nn.BatchNorm1d(C), nn.Linear(C, 2)

    def forward(self, x: Tensor) -> Tensor:  # (N, C, T)
        return self.head(self.norm(self.conv(x)[..., :-1]).relu()[..., -1])


def beside_renorm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), Renorm(3), Classifier())


FORWARDS = [
    Case("maps of three scales", Tower, scales(8, 4, 2), collate=by_scale),
    Case("maps of four scales", Tower, scales(8, 6, 4, 2), collate=by_scale),
    Case("crops of two sizes", Crops, scales(8, 6), collate=by_scale),
    Case("batch renorm beside batch norm", beside_renorm, scales(8), UNTRIED, None),
    Case("variational autoencoder", Autoencoder, scales(8), UNTRIED),
    Case("dataclass of rows", Windows, normal(T, C)),
    Case("forces", ForceField, normal(4, 3)),
    Case("weight norm", Causal, normal(C, T)),
]
