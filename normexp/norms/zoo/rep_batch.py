"""Batch norms with a skip around them, which make batch norm usable in transformers."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from normexp.norms.base import Affine, knobs
from normexp.norms.contract import Mask
from normexp.norms.running import (
    NUM_TRAINING_STEPS,
    RunningMomentsNorm,
    before_step,
    linear_ramp,
    shares_to_steps,
)


class RepBatchNorm(RunningMomentsNorm):
    """BN(x) + alpha * x: batch norm with weight and bias, and a learned skip around it.

    `alpha` () starts at 1. In evaluation the sum is affine in x, so a batch norm with other weights
    replaces it (re-parameterization). RepBN, arXiv:2405.11582.
    """

    def add_state(self) -> None:
        super().add_state()
        self.alpha = nn.Parameter(torch.tensor(1.0))

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        return super().normalize_by_batch(x, real, affine) + self.alpha.to(x.dtype) * x

    def normalize_by_running(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        return super().normalize_by_running(x, real, affine) + self.alpha.to(x.dtype) * x


@knobs
class ProgressiveRepBatchNorm(RepBatchNorm):
    """share * LN(x) + (1 - share) * RepBN(x): layer norm that fades into RepBN. PRepBN.

    LN pools the channels at each position, and has a weight and a bias of its own. Its share falls
    linearly from 1 before the first step to 0 at `fade_end`; evaluation uses RepBN alone, so
    validation says little before that. arXiv:2405.11582. In the authors' code (xinghaochen/SLAB)
    the length of the fade is a number of steps.

    Args:
        fade_end: share of the training after which no layer norm is left.
    """

    learned = {"layer_weight": 1.0, "layer_bias": 0.0}
    layer_weight: Tensor = field(init=False)
    layer_bias: Tensor = field(init=False)
    fade_end: float
    num_training_steps: int = NUM_TRAINING_STEPS

    def check_knobs(self) -> None:
        super().check_knobs()
        (self.fade_steps,) = shares_to_steps(self.num_training_steps, fade_end=self.fade_end)

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        step = before_step(self.num_batches_tracked, x.dtype) + 1
        share = 1 - linear_ramp(step, 0, self.fade_steps)
        var, mean = torch.var_mean(x, dim=2, correction=0, keepdim=True)
        layer_affine = Affine(self.layer_weight, self.layer_bias)
        by_layer = layer_affine.apply(x - mean, torch.rsqrt(var + self.eps), axis=2)
        by_batch = super().normalize_by_batch(x, real, affine)
        return share * by_layer + (1 - share) * by_batch
