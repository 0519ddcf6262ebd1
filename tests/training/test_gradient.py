"""The draws of an optimizer step: none is used twice."""

from __future__ import annotations

from functools import partial

import torch
from training_cases import build_task, text_data, text_encoder

from normexp.batching.sizes import Sizes
from normexp.training.step import StepGradient


def test_each_step_has_draws_of_its_own_and_each_part_knows_its_place(monkeypatch):
    sizes = Sizes(8, 4)
    model = partial(text_encoder, dropout=0.5)
    task = build_task(model=model, data=text_data(), seeds=(0, 1), sizes=sizes)
    dropout, foreign = [], []

    def set_dropout(keys: torch.Tensor, first_sample: int) -> None:
        dropout.append((tuple(keys.flatten().tolist()), first_sample))
        foreign.append(())

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        foreign[-1] = tuple(task.replicas.foreign_seeds or ())
        return {"loss": task.loss(output, batch)}

    monkeypatch.setattr(task.replicas, "set_dropout", set_dropout)
    task.replicas.foreign_seeds = [0, 0]
    replicas, batches = task.replicas, task.batches
    gradient = StepGradient(replicas, batches, sizes, replicas.add_gradient, loss, None)
    for step, batch in enumerate(batches.chunk(0, 2)):
        gradient.add(batch, step)
    assert [first for _, first in dropout] == [0, 4, 0, 4]
    keys = [keys for keys, _ in dropout]
    assert keys[0] == keys[1] and keys[2] == keys[3]
    assert not set(keys[0]) & set(keys[2])
    assert len({seed for seeds in foreign for seed in seeds}) == 8  # 2 steps, 2 parts, 2 replicas
