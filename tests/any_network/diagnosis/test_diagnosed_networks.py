"""Kinds of norms, networks and batches that can be diagnosed, and those that cannot."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diagnosis_cases import (
    batches,
    examine,
    of_batch_norm,
    replaced,
    trained,
)
from torch import nn
from torch.utils.data import TensorDataset

from normexp.any_network.diagnosis import diagnose
from normexp.any_network.diagnosis.parts import Parts, differ
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.site import Site

OTHERS = {
    "sync": nn.SyncBatchNorm,
    "own": partial(BatchNorm, eps=1e-5),
    "site": lambda width: Site(BatchNorm(width, eps=1e-5), "map", 8),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_batch_norm_are_analysed_alike(name: str):
    model, expected = replaced(OTHERS[name]), of_batch_norm()
    diagnosis = examine(model)
    assert not diagnosis.findings and not diagnosis.not_analysed
    assert diagnosis.evaluation == pytest.approx(expected.evaluation, rel=1e-4)
    assert len(diagnosis.sites) == 3
    if name != "site":  # there, 8 of 32 samples share statistics
        for term, value in expected.terms.items():
            assert diagnosis.terms[term].value == pytest.approx(value.value, abs=1e-5), term


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = trained()

    def forward(self, image, scale):
        return self.model(image * scale)


def test_batches_are_pairs_or_mappings():
    scale = torch.ones(32, 1, 1, 1)
    model, pairs = TwoInputs(), batches()[:2]
    expected = examine(trained(), batches=pairs).to_dict()
    as_tuples = examine(model, batches=[((x, scale), y) for x, y in pairs])
    mappings = [{"image": x, "scale": scale, "label": y} for x, y in pairs]
    as_mappings = diagnose(
        model, mappings, lambda output, batch: F.cross_entropy(output, batch["label"])
    )
    for diagnosis in (as_tuples, as_mappings):
        assert diagnosis.to_dict()["terms"] == expected["terms"]
        assert diagnosis.to_dict()["loss_at_size"] == expected["loss_at_size"]


class Holding(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.model = value, trained()

    def forward(self, x):
        return self.model(x)


class Closed(nn.Module):
    """Its forward is a function that runs the module it was made with."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model = trained()
        self.run = lambda x: model(x)

    def forward(self, x):
        return self.run(x)


class InBfloat16(nn.Module):
    """Runs its parts under autocast, which they need for inputs of this dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.model = trained()

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x).float()


class Domain(nn.Module):
    """A batch norm, and a shift by domain that the network sets before each call."""

    domain: int

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(num_features)
        self.shifts = nn.Parameter(torch.zeros(2, num_features, 1, 1))

    def forward(self, x):
        return self.norm(x) + self.shifts[self.domain]


class OfDomains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.model = Domain(1), trained()

    def forward(self, x):
        self.norm.domain = 0
        return self.model(self.norm(x))


@pytest.mark.parametrize(("make", "place"), [(InBfloat16, "model."), (OfDomains, "norm.norm")])
def test_parts_that_need_what_is_around_them_are_looked_at(make: Any, place: str):
    model = make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean += 2
    found = examine(model)
    stale = next(finding for finding in found.findings if finding.kind == "stale_averages")
    assert any(site.startswith(place) for site in stale.sites)
    assert not found.not_analysed


class MappedDropout(nn.Module):
    """Multiplies by a float32 weight, as autocast alone allows for bfloat16 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x):
        return F.dropout(F.linear(x, self.weight), training=self.training)


class UnderAutocast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_a_part_runs_alone_in_the_precision_of_its_network():
    model = UnderAutocast(nn.Linear(3, 3), MappedDropout())
    parts = Parts(model, (torch.ones(4, 3), torch.zeros(4)), lambda output, _: output.sum())
    assert parts.acts_in_training("1")
    assert not parts.acts_in_training("0")


def test_outputs_differ_in_values_or_in_number():
    x = torch.ones(2)
    assert differ([x], [x + 1])
    assert differ([x], [x, x])  # one more in training
    assert not differ([x], [x.clone()])


class Observer(nn.Module):
    """Scale and shift of a quantization, which belong to one forward together."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.scale, self.shift = 0.5 + torch.rand(x.shape[1]), torch.rand(x.shape[1])
        scale_and_shift = torch.stack([self.scale, self.shift])  # of one shape
        return scale_and_shift[0].view(1, -1, 1, 1) * x + scale_and_shift[1].view(1, -1, 1, 1)


def test_state_that_a_module_moves_together_is_put_in_together():
    found = examine(nn.Sequential(Observer(), trained()))
    assert found.not_analysed == ("0",)


def test_random_states_come_back_after_an_error():
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    expected = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    with pytest.raises(UserError):
        examine(trained(), loss=lambda *_: 1 / 0)
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert (np.random.get_state()[1] == expected[1]).all() and random.getstate() == expected[2]


def vectors():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


class Named(nn.Sequential):
    """A network that returns a mapping, as torchvision's segmentation models do."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.LazyLinear(2))
        self(torch.ones_like(batches()[0][0]))

    def forward(self, x):
        return {"out": super().forward(x)}


def test_mistakes_are_said():
    for wrong, part in (
        ({"model": nn.Linear}, "model=<class .*Linear'>: must be an nn.Module"),
        ({"batches": 5}, "batches is a int, must be a DataLoader"),
        ({"batches": torch.ones(4, 3)}, "batches holds a Tensor: a batch is a pair"),
        ({"batches": TensorDataset(torch.ones(4, 3))}, "is a TensorDataset, must be a DataLoader"),
        ({"loss": nn.CrossEntropyLoss}, r"pass an instance, CrossEntropyLoss\(\)"),
        ({"batches": iter(())}, "batches holds 0"),
        ({"batches": [{"picture": x} for x, _ in batches()]}, "mappings of picture.*takes input"),
        ({"batches": [(x[:, :, 0], y) for x, y in batches()]}, r"mode, at 0 \(RuntimeError"),
        ({"model": nn.Sequential(nn.LazyLinear(1))}, "0.weight has no shape before a first"),
        ({"model": Holding(threading.Lock())}, "Holding.value cannot be copied .*lock"),
        ({"model": Named()}, "output is a dict with the keys out"),
        ({"model": Closed()}, r"holds its module model, .* uses self\.model"),
        (
            {"batches": [(torch.ones(1, 3), torch.zeros(1).long())] * 4, "model": vectors()},
            "of 1 .* at 1 ",
        ),
    ):
        with pytest.raises(UserError, match=part):
            examine(**{"model": trained(), **wrong})
