"""EvoNorm: norm and nonlinearity in one formula, found by a search."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normexp.norms.affine import Affine, over_channels
from normexp.norms.group import ChannelGroupsNorm
from normexp.norms.moments import measure, pool
from normexp.norms.running import RunningMomentsNorm, measure_samples


class EvoNormB0(RunningMomentsNorm):
    """x / max(sqrt(var_batch + eps), v * x + sqrt(var_own + eps)) * weight + bias.

    Both variances are biased and per channel: var_batch over all samples and positions, in
    evaluation the running average of its unbiased form; var_own over the positions of the sample,
    zero where there is one. It contains its nonlinearity: no activation should follow. `v` (C,)
    starts at 1. arXiv:2004.02967, found by a search.

    The running mean is not used to normalize; it makes merged parts of a step exact. timm's
    EvoNorm2dB0 computes the same, keeps no running mean, and has eps 1e-3; the paper has 1e-5.
    """

    def add_state(self) -> None:
        super().add_state()
        self.v = nn.Parameter(torch.ones(self.num_features))

    def normalize_by_batch(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        per_sample = measure_samples(x, real)
        batch = pool(per_sample, dim=1)
        self.advance(batch)
        return self._divide(x, per_sample.var, batch.var, affine)

    def normalize_by_running(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        per_sample = measure_samples(x, real)
        return self._divide(x, per_sample.var, over_channels(self.running_var, x, axis=2), affine)

    def _divide(self, x: Tensor, sample_var: Tensor, batch_var: Tensor, affine: Affine) -> Tensor:
        of_sample = over_channels(self.v, x, axis=2) * x + torch.sqrt(sample_var + self.eps)
        of_batch = torch.sqrt(batch_var + self.eps)
        # Not torch.maximum: its backward, which halves ties, takes several times as long.
        return affine.apply(x / torch.where(of_sample < of_batch, of_batch, of_sample), axis=2)


class EvoNormS0(ChannelGroupsNorm):
    """x * sigmoid(v * x) / sqrt(var + eps) * weight + bias, var over C/G channels and positions.

    x is not centred. The channels of a sample fall into G = `num_groups` runs. It contains its
    nonlinearity: no activation should follow. `v` (C,) starts at 1. timm's EvoNorm2dS0 computes the
    same, with 32 groups as in the paper, and so does its S0a, with eps 1e-3. Some code has the
    unbiased variance. arXiv:2004.02967.
    """

    def add_state(self) -> None:
        super().add_state()
        self.v = nn.Parameter(torch.ones(self.num_features))

    def normalize(self, x: Tensor, real: Tensor | None, affine: Affine) -> Tensor:
        self.refuse_one_value(x)
        by_group = (self.num_groups, -1)
        groups = x.unflatten(1, by_group)  # (N, G, C/G, *)
        real = None if real is None else real.unsqueeze(1)  # (N, 1, 1, *)
        var = measure(groups, real, tuple(range(2, groups.ndim))).var
        gated = x * torch.sigmoid(over_channels(self.v, x) * x)
        out = gated.unflatten(1, by_group) * torch.rsqrt(var + self.eps)
        return affine.apply(out.flatten(1, 2))
