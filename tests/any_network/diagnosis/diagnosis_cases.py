"""A small network, trained well on the digits, to break on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normexp.any_network.diagnosis import Diagnosis, diagnose
from normexp.norms.site import Site
from normexp.training.data.images import load_digits

Batches = list[tuple[Tensor, Tensor]]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8), normalised, and classes (N,) of the training split."""
    data = load_digits(val_fraction=0.1, split_seed=0, augmentation=None)
    every = data.train.gather(torch.arange(len(data.train)))
    return data.model_inputs(every["inputs"]), every["targets"]


def batches(size: int = 32, seed: int = 0) -> Batches:
    inputs, targets = digits()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    whole = [indices for indices in order.split(size) if len(indices) == size]
    return [(inputs[indices], targets[indices]) for indices in whole]


def network(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """The norms are modules 1, 4 and 7; module 6 is dropout, which drops nothing."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), norm(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=False), norm(16), nn.ReLU()),
        *(nn.Dropout(0.0), norm(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


def train(model: nn.Module, *, size: int = 32, epochs: int = 5, lr: float = 0.1) -> nn.Module:
    """Trains with a rate that falls to zero, so that running averages settle."""
    steps = epochs * len(batches(size))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        for inputs, targets in batches(size, epoch + 1):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    return model


@cache
def _trained(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "batch":
        return train(network())
    if kind == "group":
        return train(network(lambda width: nn.GroupNorm(4, width)), epochs=2)
    assert kind == "none"
    return train(network(lambda _: nn.Identity()), lr=0.02, epochs=2)


def trained(kind: str = "batch") -> Any:
    """A copy of a trained network."""
    return copy.deepcopy(_trained(kind))


def examine(model: nn.Module, **options: Any) -> Diagnosis:
    options = {"batches": batches(), "max_batches": 8, "loss": F.cross_entropy} | options
    return diagnose(model, **options)


def kinds(diagnosis: Diagnosis) -> set[str]:
    return {finding.kind for finding in diagnosis.findings}


def norms_of(model: nn.Module) -> Iterator[Any]:
    yield from (m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d))


@cache
def of_batch_norm() -> Diagnosis:
    """The diagnosis of the trained network as it is."""
    return examine(trained())


def replaced(make):
    """The trained network with its norms rebuilt, and their state kept."""
    model = trained()
    for index in (1, 4, 7):
        norm = make(model[index].num_features)
        target = norm.norm if isinstance(norm, Site) else norm
        target.load_state_dict(model[index].state_dict())
        model[index] = norm.train()
    return model
