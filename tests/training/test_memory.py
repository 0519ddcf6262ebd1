"""A long training holds no more than a short one."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from training_cases import build_task, image_data, train

from normexp.batching.sizes import Sizes


def live_tensors() -> list[torch.Tensor]:
    """Without the shapes free of values that torch.compile keeps of what it traced."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    found = (thing for thing in gc.get_objects() if type(thing) in kinds)
    return [tensor for tensor in found if tensor.device.type != "meta"]


class CountTensors(pl.Callback):
    """Elements of all live tensors at some steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.elements: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        if pl_module.step in self.steps:
            gc.collect()
            self.elements.append(sum(tensor.numel() for tensor in live_tensors()))


@pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])
@pytest.mark.parametrize(
    "sizes", [pytest.param(Sizes(8), marks=pytest.mark.slow), Sizes(8, 4, 2)], ids=str
)
def test_live_tensors_do_not_grow_with_the_steps(tmp_path: Path, stacked: bool, sizes: Sizes):
    task = build_task(data=image_data(240), seeds=(0, 1), stacked=stacked, sizes=sizes, max_chunk=1)
    count = CountTensors(steps=(33, 45, 57))  # of the second epoch, where rows of the loss end
    train(task, tmp_path / "a.ckpt", [count], precision="32-true")
    assert len(count.elements) == 3
    assert len(set(count.elements)) == 1, count.elements
