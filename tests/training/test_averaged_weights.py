"""Averaged weights: their formula, their own running state, the training that they leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from training_cases import assert_same_state, build_module, image_data, train

from normexp.batching.sizes import Sizes
from normexp.norms.group import GroupNorm
from normexp.training.evaluation import EvaluationPlan

DECAY = 0.8
ALL_SAMPLES = EvaluationPlan(("running",), 40, 40, (), every_epoch=True)


class AverageByHand(pl.Callback):
    """w = 0.8 w + 0.2 w_t after each step t, from w_1 on, of one replica."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer, pl_module, *args):  # noqa: ARG002
        network = pl_module.replicas.replica(self.replica)
        for name, value in network.named_parameters():
            old = self.weights.get(name, value)
            self.weights[name] = (DECAY * old + (1 - DECAY) * value).detach()


@pytest.mark.parametrize("sizes", [Sizes(8), Sizes(8, 4, 2)], ids=["full", "accumulated_ghost"])
@pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])
def test_averaged_weights_equal_a_hand_written_average(tmp_path: Path, stacked: bool, sizes):
    common = {"seeds": (0, 1), "stacked": stacked, "sizes": sizes, "plan": ALL_SAMPLES}
    module, by_hand = build_module(ema=DECAY, max_chunk=1, **common), AverageByHand(1)
    train(module, tmp_path / "a.ckpt", [by_hand])
    averaged = module.averaged.module.replica(1).eval()
    for name, value in averaged.named_parameters():
        torch.testing.assert_close(value, by_hand.weights[name], rtol=0, atol=1e-14, msg=name)
    without = train(build_module(**common), tmp_path / "b.ckpt")
    assert_same_state(module, without, 0, replica=1)


def test_averaged_weights_are_evaluated_with_running_state_of_their_own(tmp_path: Path):
    module = train(build_module(ema=DECAY, plan=ALL_SAMPLES), tmp_path / "a.ckpt")
    network, data = module.averaged.module.replica(0).eval(), module.batches.data
    whole = {split: getattr(data, split).gather(torch.arange(12)) for split in ("val", "test")}
    inputs = {k: data.model_inputs(b["inputs"], torch.float64) for k, b in whole.items()}
    for split, batch in whole.items():
        loss = nn.functional.cross_entropy(network(inputs[split]), batch["targets"]).item()
        assert module.metrics[f"{split}/loss@ema"][0] == pytest.approx(loss, abs=1e-12)
        assert module.metrics[f"{split}/loss@ema"] != module.metrics[f"{split}/loss"]
    seen: list[torch.Tensor] = []
    site = next(m for name, m in network.named_modules() if name.endswith("norm"))
    site.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    network(data.model_inputs(data.train.gather(torch.arange(40))["inputs"], torch.float64))
    torch.testing.assert_close(site.running_mean, seen[0].mean((0, 2, 3)), rtol=0, atol=1e-12)
    var = seen[0].var((0, 2, 3), correction=0)
    torch.testing.assert_close(site.running_var, var, rtol=0, atol=1e-12)


def test_norm_without_running_state_has_averaged_weights_too(tmp_path: Path):
    module = build_module(ema=DECAY, make_norm=lambda c: GroupNorm(c, eps=1e-5, num_groups=4))
    train(module, tmp_path / "a.ckpt")
    assert module.metrics["test/loss@ema"] != module.metrics["test/loss"]
    assert set(module.evaluator.samples) == {"running", "ema"}


def test_averaged_weights_are_measured_when_the_other_statistics_are(tmp_path: Path):
    module = build_module(ema=DECAY, data=image_data(16))  # not at every validation
    train(module, tmp_path / "a.ckpt")
    rows = [row for row in module.recorder.sinks[0][0].rows if "val/loss@ema" in row[3]]  # type: ignore[attr-defined]
    assert [row[0] for row in rows] == [module.step]
