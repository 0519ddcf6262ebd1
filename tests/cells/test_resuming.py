"""A checkpoint that is there when a stack begins: it fits and counts, or it is set aside."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from normexp.batching.replicas import InTurn
from normexp.cells import stack as resuming
from normexp.cells.stack import read_checkpoint, resumed_replicas

CELL: Any = SimpleNamespace(title="group on digits", plan=SimpleNamespace(num_steps=20))


def state_of(kind: type[torch.optim.Optimizer], **knobs: Any) -> dict[str, Any]:
    return kind(InTurn([nn.Linear(3, 2)]).parameters(), **knobs).state_dict()


def content(width: int = 3, optimizer: dict[str, Any] | None = None) -> dict[str, Any]:
    optimizer = optimizer or state_of(torch.optim.SGD, lr=0.05, momentum=0.9)
    own = {"train_seconds": 1.0, "validated_at": 0, "is_stacked": True, "final": {}}
    return {
        **{"pytorch-lightning_version": "2", "optimizer_states": [optimizer], "lr_schedulers": []},
        **{"loops": {}, "normexp": {**own, "losses": {"num_steps": 7}}},
        "state_dict": InTurn([nn.Linear(width, 2)]).state_dict(prefix="replicas."),
    }


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """The forms in which replicas were built."""
    built = []

    def build(_cell: object, seeds: list[int], *, is_stacked: bool | None = None) -> InTurn:
        built.append(is_stacked)
        return InTurn([nn.Linear(3, 2) for _ in seeds])

    def optimizer_of(replicas: InTurn) -> torch.optim.Optimizer:
        return torch.optim.SGD(replicas.parameters(), lr=0.1, momentum=0.9)

    recipe = SimpleNamespace(optimizer_of=optimizer_of)
    monkeypatch.setattr(resuming, "build_replicas", build)
    monkeypatch.setattr(resuming, "build_recipe", lambda _cell: recipe)
    return built


def test_checkpoint_says_its_form_and_where_it_goes_on(
    tmp_path: Path, forms: list[bool | None], caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "last.ckpt"
    torch.save(content(), path)
    with caplog.at_level(logging.INFO, "normexp"):
        resumed_replicas(CELL, [0], path)
    assert forms == [True]
    assert caplog.messages == ["group on digits continues from step 7 of 20"]
    assert path.exists()


def test_checkpoint_of_other_networks_is_set_aside(
    tmp_path: Path, forms: list[bool | None], caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "last.ckpt"
    torch.save(content(width=4), path)
    resumed_replicas(CELL, [0], path)
    assert forms == [True, None]
    assert "(it is of other networks); it is kept as last.unreadable" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize(
    "optimizer",
    [
        state_of(torch.optim.AdamW, lr=0.05),
        {"param_groups": []},
    ],
)
def test_checkpoint_of_another_optimizer_is_set_aside(
    optimizer: dict[str, Any],
    tmp_path: Path,
    forms: list[bool | None],
    caplog: pytest.LogCaptureFixture,
):
    path = tmp_path / "last.ckpt"
    torch.save(content(optimizer=optimizer), path)
    resumed_replicas(CELL, [0], path)
    assert forms == [True, None]
    assert "(it is of another optimizer); it is kept as last.unreadable" in caplog.text
    assert not path.exists()


def test_optimizer_that_counts_in_its_groups_goes_on(tmp_path: Path, forms: list[bool | None]):
    path, optimizer = tmp_path / "last.ckpt", state_of(torch.optim.SGD, lr=0.05, momentum=0.9)
    optimizer["param_groups"][0] |= {"step": 7, "scale": torch.ones(3), "momentum": 0.91}
    torch.save(content(optimizer=optimizer), path)
    resumed_replicas(CELL, [0], path)
    assert forms == [True]
    assert path.exists()


def test_each_unreadable_checkpoint_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "last.ckpt"
    assert read_checkpoint(path) is None
    path.write_bytes(b"torn")
    assert read_checkpoint(path) is None
    assert "Error: " in caplog.text  # says why
    torch.save({"state_dict": {}, "normexp": {"is_stacked": True}}, path)
    assert read_checkpoint(path) is None
    assert "ValueError: it has no final" in caplog.text
    torch.save([], path)
    assert read_checkpoint(path) is None
    assert [each.name for each in sorted(tmp_path.iterdir())] == [
        "last.unreadable",
        "last.unreadable-2",
        "last.unreadable-3",
    ]
    assert (tmp_path / "last.unreadable").read_bytes() == b"torn"
