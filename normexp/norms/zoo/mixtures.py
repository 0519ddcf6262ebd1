"""Norms that combine several kinds of statistics: learned mixtures, and modes of the data."""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn

from normexp.norms.base import NO_AFFINE, Affine, Moments, count_values, knobs, over_channels
from normexp.norms.contract import Mask
from normexp.norms.running import (
    RunningMomentsNorm,
    RunningNorm,
    SampleMomentsNorm,
    group_dims,
    measure_samples,
)
from normexp.norms.sample import group_norm, refuse_one_position


class SwitchableNorm(SampleMomentsNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias, each moment a mixture of three.

    mean = sum_k w_k mean_k, with w the softmax of `mean_weight` (3,), and var likewise with
    `var_weight`, over the moments of a channel of a sample (instance norm), of a sample (layer
    norm) and of a channel (batch norm, by its running averages in evaluation), in this order. With
    one position a sample's channels have no moments, and the other two are mixed. arXiv:1806.10779.

    The authors' code (switchablenorms/Switchable-Normalization) takes the unbiased variance over a
    sample's positions and, for (N, C), of all three; here it is biased, as in the paper.
    """

    def add_state(self) -> None:
        super().add_state()
        self.mean_weight = nn.Parameter(torch.ones(3))
        self.var_weight = nn.Parameter(torch.ones(3))

    def combine(
        self, x: Tensor, samples: Moments, mean: Tensor, var: Tensor, affine: Affine
    ) -> Tensor:
        layer_mean = samples.mean.mean(dim=2, keepdim=True)
        between = (samples.mean - layer_mean).square()
        layer_var = (samples.var + between).mean(dim=2, keepdim=True)
        first = 1 if x.shape[3:].numel() == 1 else 0
        mean = _mixture(self.mean_weight, [samples.mean, layer_mean, mean], first)
        var = _mixture(self.var_weight, [samples.var, layer_var, var], first)
        return affine.apply(x - mean, torch.rsqrt(var + self.eps), axis=2)


def _mixture(logits: Tensor, moments: list[Tensor], first: int) -> Tensor:
    """Returns the mean of the moments from the `first` on, weighted by the softmax of logits."""
    weights = logits[first:].to(moments[0].dtype).softmax(dim=0)
    mixed = weights[0] * moments[first]
    for weight, moment in zip(weights[1:], moments[first + 1 :], strict=True):
        mixed = mixed + weight * moment
    return mixed


class GatedBatchNorm(RunningMomentsNorm):
    """Abstract: (rho * z_batch + (1 - rho) * z_sample) * weight + bias, with rho learned.

    z_batch is batch norm, by the running averages in evaluation; z_sample is layer or instance
    norm. The learned `gate` (C,) starts at 0.99. The papers' code starts it at 1, where the checks
    before a training could not see what z_sample pools.
    """

    pools_channels: bool  # true: z_sample is layer norm
    learned = {"gate": 0.99}
    gate: Tensor

    def rho(self, gate: Tensor) -> Tensor:
        """Returns the share of batch norm in each channel (C,)."""
        return gate

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        z_batch = super().normalize_by_batch(x, real, NO_AFFINE)
        return self._mix(x, real, z_batch, affine)

    def normalize_by_running(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        z_batch = super().normalize_by_running(x, real, NO_AFFINE)
        return self._mix(x, real, z_batch, affine)

    def _mix(self, x: Tensor, real: Mask, z_batch: Tensor, affine: Affine) -> Tensor:
        real = None if real is None else real.flatten(0, 1)
        num_groups = 1 if self.pools_channels else self.num_features
        z_sample = group_norm(x.flatten(0, 1), real, num_groups, NO_AFFINE, self.eps)
        rho = over_channels(self.rho(self.gate.to(x.dtype)), x, axis=2)
        mixed = rho * z_batch + (1 - rho) * z_sample.unflatten(0, x.shape[:2])
        return affine.apply(mixed, axis=2)


class BatchInstanceNorm(GatedBatchNorm):
    """Batch norm mixed with instance norm in each channel, rho within [0, 1]. arXiv:1805.07925.

    The authors' code (hyseob/Batch-Instance-Normalization) clips rho after every optimizer step,
    and gives it ten times the learning rate. A norm does not see the optimizer, so here rho is
    `gate` clipped in the forward, with the gradient of the unclipped value.
    """

    pools_channels = False

    def rho(self, gate: Tensor) -> Tensor:
        return gate + (gate.clamp(0, 1) - gate).detach()

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        refuse_one_position(x.shape[1:], "batch-instance norm", "norm=batch")
        return super().normalize(x, real, affine)


class BatchChannelNorm(GatedBatchNorm):
    """Batch norm mixed with layer norm of the whole sample in each channel. arXiv:2312.00596.

    rho is not bounded. The authors' code (AfifaKhaled/Batch-Channel-Normalization) multiplies the
    running variance by m / (m - 1), with m the number of values in the evaluated batch; its version
    for transformers takes the moments of each token in both norms. arXiv:1911.09738 is another BCN.
    """

    pools_channels = True


@knobs
class ModeNorm(RunningNorm):
    """sum_k g_k * (x - mean_k) / sqrt(var_k + eps) * weight + bias, over K modes.

    A sample's gates g (N, K) are the softmax of a linear map of the means of its channels over
    positions. mean_k and var_k are the moments of a channel over all samples and positions, in
    which sample n has the weight g_nk; evaluation uses their running averages, `mode_mean` and
    `mode_var` (K, C). One mode is batch norm. arXiv:1810.05466.

    The authors' code (ldeecke/mn-torch) averages E[x^2], which loses digits, and starts from 0;
    here the (biased) variance is averaged and starts near 1. Its gates also begin nearly equal. The
    moments of parts of a step and of ghost groups are averaged.

    Args:
        num_modes: K.
    """

    num_modes: int
    mode_mean: Tensor = field(init=False)
    mode_var: Tensor = field(init=False)

    def check_knobs(self) -> None:
        super().check_knobs()
        self.require_positive("num_modes", 2)

    def add_state(self) -> None:
        super().add_state()
        num_modes, num_features = self.num_modes, self.num_features
        self.gates = nn.Linear(num_features, num_modes)
        nn.init.normal_(self.gates.weight, mean=1 / num_modes, std=0.01)
        self.register_buffer("mode_mean", torch.zeros(num_modes, num_features))
        # Different starts, because checks before a training could not see gates of equal modes.
        start = 1 + 0.1 * torch.arange(num_modes)[:, None]
        self.register_buffer("mode_var", start.repeat(1, num_features))

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        samples, gates = self._gate(x, real)
        weights = gates
        if isinstance(samples.count, Tensor):
            weights = gates * samples.count.flatten(2)
        shares = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        # Sums, because autocast would compute matrix products in half precision.
        shares = shares.unsqueeze(3)  # (G, N, K, 1)
        means = samples.mean.flatten(2).unsqueeze(2)  # (G, N, 1, C)
        variances = samples.var.flatten(2).unsqueeze(2)
        mean = (shares * means).sum(dim=1)  # (G, K, C)
        between = (means - mean.unsqueeze(1)).square()  # (G, N, K, C)
        var = (shares * (variances + between)).sum(dim=1)
        count = count_values(x, real, group_dims(x))
        count = count.flatten(2) if isinstance(count, Tensor) else count  # (G, 1, 1)
        self.move_averages(count, mode_mean=mean, mode_var=var)
        return self._standardize(x, samples.mean, gates, mean, var, affine)

    def normalize_by_running(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        samples, gates = self._gate(x, real)
        mean, var = self.mode_mean.to(x.dtype)[None], self.mode_var.to(x.dtype)[None]
        return self._standardize(x, samples.mean, gates, mean, var, affine)

    def _gate(self, x: Tensor, real: Mask) -> tuple[Moments, Tensor]:
        """Returns the moments of the channels of each sample, and its gates (G, N, K)."""
        samples = measure_samples(x, real)
        weight, bias = self.gates.weight.to(x.dtype), self.gates.bias.to(x.dtype)
        logits = (samples.mean.flatten(2).unsqueeze(2) * weight).sum(dim=3) + bias
        return samples, logits.softmax(dim=-1)

    def _standardize(
        self,
        x: Tensor,
        sample_mean: Tensor,
        gates: Tensor,
        mean: Tensor,
        var: Tensor,
        affine: Affine,
    ) -> Tensor:
        """Returns the output by the moments (G, K, C) of the modes.

        x - sample_mean is scaled once by the sum over modes, which saves K copies of x.
        """
        scales = gates.unsqueeze(-1) * torch.rsqrt(var + self.eps).unsqueeze(1)  # (G, N, K, C)
        offsets = sample_mean.flatten(2).unsqueeze(2) - mean.unsqueeze(1)
        scale = scales.sum(dim=2).view(sample_mean.shape)
        offset = (scales * offsets).sum(dim=2).view(sample_mean.shape)
        return affine.apply(torch.addcmul(offset, x - sample_mean, scale), axis=2)
