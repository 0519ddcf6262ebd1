"""The base of norms that pool samples and keep running averages.

    RunningNorm          running averages, counters, groups of samples, merging of parts of a step
    RunningMomentsNorm   the averages are mean and variance, used as batch norm uses them
    SampleMomentsNorm    also uses the moments of each sample

Values come in groups, x (G, N, C, *): the samples of a group share statistics, and all groups of
one forward move the running averages together, once. A plain forward is one group; a site that
splits its batch into ghost sub-batches passes several. `real` is the mask as (G, N, 1, *).

A norm that changes over a training, by a warm-up or a ramp, takes an argument `num_training_steps`,
which receives the number of optimizer steps. The bounds of its ramps are shares of that number,
like the warm-up of the learning rate, so that they mean the same in a training of any length;
`+norm.num_training_steps=N` makes them shares of N steps. A norm that is built outside a training,
as for a card, gets 1000.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from normexp.errors import UserError
from normexp.norms.base import (
    Affine,
    AffineNorm,
    Moments,
    knobs,
    measure,
    over_channels,
    pool,
    pool_mean,
    unbiased,
    wide_dtype,
)
from normexp.norms.contract import Mask, State
from normexp.norms.counters import Counting
from normexp.norms.kernel import batch_norm, normalize_groups


@knobs
class RunningNorm(AffineNorm):
    """Abstract: a norm that pools samples in training and uses running averages in evaluation.

    A subclass defines `normalize_by_batch`, which also moves its averages by one step, and
    `normalize_by_running`. Every floating-point buffer is an average.

    Args:
        momentum: weight of the new value in the running averages, as in torch; None gives all
            steps equal weight.
    """

    momentum: float | None = 0.1
    averages: ClassVar[dict[str, float]] = {}  # buffers (C,) to register, and their initial values
    needs_momentum = False  # True: momentum=None is refused
    track_running_stats = True  # may be set as on torch's norms: False holds the averages
    channel_axis = 2
    num_batches_tracked: Tensor = field(init=False)
    num_values: Tensor = field(init=False)  # pooled in training so far; weighs parts of a step

    def check_knobs(self) -> None:
        if self.momentum is None:
            if self.needs_momentum:
                raise UserError(
                    f"momentum=null does not fit {type(self).__name__}; try norm.momentum=0.1"
                )
        elif not 0 < self.momentum <= 1:
            raise UserError(
                f"momentum={self.momentum} is not in (0, 1]; try norm.momentum=0.1, or null to "
                "average all steps equally"
            )

    def add_state(self) -> None:
        for name, start in self.averages.items():
            self.register_buffer(name, self.vector(start))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        # An integer, so that casting the module to half precision does not round it.
        self.register_buffer("num_values", torch.tensor(0), persistent=False)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        out = self.forward_groups(x[None], None if mask is None else mask[None])
        return out.squeeze(0)  # the backward of out[0] would fill a tensor with zeros and copy

    def forward_groups(self, x: Tensor, mask: Mask = None) -> Tensor:
        """Returns the output for x (G, N, C, *), mask (G, N, *): statistics per group.

        In training the running averages move once, by the values of all groups together.
        """
        return super().forward(x, mask)

    def normalize(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if not self.training:
            return self.normalize_by_running(x, real, affine)
        self.check_shape(x.shape[1:])
        return self.normalize_by_batch(x, real, affine)

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine, /) -> Tensor:
        """Returns the output in training and moves the state by one step."""
        raise NotImplementedError

    def normalize_by_running(self, x: Tensor, real: Mask, affine: Affine, /) -> Tensor:
        """Returns the output in evaluation."""
        raise NotImplementedError

    @property
    def moves_averages(self) -> bool:
        """False if code around the norm has switched that off; the batch still normalizes."""
        return self.track_running_stats and self.momentum != 0

    def check_shape(self, shape: torch.Size) -> None:
        """Raises UserError if a training input (N, C, *) has fewer than two values per channel."""
        if shape.numel() <= shape[1]:
            raise UserError(
                f"batch norm got one value per channel, in an input of shape {tuple(shape)}; it "
                "needs 2 or more: try a larger batch_size or norm_batch_size"
            )

    @torch.no_grad()
    def move_averages(self, count: int | Tensor, **values: Tensor) -> None:
        """Moves running averages one step towards values (G, 1, C, 1, ...), pooled over the groups.

        Writes in place, by operations that vmap supports.

        Args:
            count: number of values in each group.
            values: by the name of the average.
        """
        if not self.moves_averages:
            return
        pooled = {name: pool_mean(value, count, dim=0) for name, value in values.items()}
        mean, total = next(iter(pooled.values()))
        self.num_batches_tracked.add_(1)
        weight = self.new_weight(self.num_batches_tracked, mean.dtype)
        if isinstance(total, Tensor):
            total = total.flatten()[0]
            weight = weight * (total > 0).to(mean.dtype)  # padding alone moves nothing
            total = total.long()
        self.num_values.add_(total)
        for name, (value, _) in pooled.items():
            average = getattr(self, name)
            average.mul_(1 - weight).add_(weight * value.reshape(average.shape))

    def averages_like(self, x: Tensor) -> list[Tensor]:
        """Returns the `averages`, shaped to broadcast to x (G, N, C, *) and in its dtype."""
        return [over_channels(getattr(self, name), x, axis=2) for name in self.averages]

    def new_weight(self, step: Tensor, dtype: torch.dtype) -> float | Tensor:
        """Returns the weight of the new value at the `step`-th update, counted from 1."""
        if not self.moves_averages:
            return 0.0
        return self.momentum if self.momentum is not None else 1 / step.to(dtype)

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """Returns each floating-point buffer averaged over the parts of a step; see `norms.site`.

        The weights are the increases of `num_values`, which count real positions, and not `shares`.
        Without a real value in any part, the buffer keeps its start.
        """
        del shares
        num_values = count_in_parts(parts, start)  # (parts, ...)
        merged = {"num_values": start["num_values"] + num_values.sum(dim=0)}
        for name, before in start.items():
            if before.is_floating_point():
                ends = torch.stack([part[name] for part in parts])  # (parts, ..., C)
                axes = [1] * (ends.ndim - num_values.ndim)
                counts = num_values.view(*num_values.shape, *axes).to(ends.dtype)
                mean, _ = pool_mean(ends, counts, dim=0)
                merged[name] = torch.where(counts.sum(dim=0) > 0, mean[0], before)
        return merged


def count_in_parts(parts: list[State], start: State) -> Tensor:
    """Returns how many values each part of a step has pooled, (parts, ...)."""
    return torch.stack([part["num_values"] for part in parts]) - start["num_values"]


class RunningMomentsNorm(Counting, RunningNorm):
    """Batch norm, and the base of norms whose running averages are mean and variance.

    Parts of a step merge exactly, into the moments of all their values.
    """

    averages = {"running_mean": 0.0, "running_var": 1.0}
    running_mean: Tensor
    running_var: Tensor
    unbiased_running_var = True  # false: the running variance averages the biased one

    def reset_running_stats(self) -> None:
        """Starts the averages anew, as torch's batch norms do."""
        for name, buffer in self.named_buffers(recurse=False):
            buffer.fill_(self.averages.get(name, 0))

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        if real is None and self.kernel_moves_averages(x):
            out = self.normalize_in_kernel(x.flatten(0, 1), affine, len(x))
            return out.unflatten(0, x.shape[:2])
        out, moments = normalize_groups(x, real, affine, self.eps)
        self.advance(moments)
        return out

    def normalize_by_running(self, x: Tensor, _: Mask, affine: Affine) -> Tensor:
        averages = (self.running_mean.to(x.dtype), self.running_var.to(x.dtype))
        out = batch_norm(x.flatten(0, 1), affine, averages, None, self.eps)
        return out.unflatten(0, x.shape[:2])

    def kernel_moves_averages(self, x: Tensor) -> bool:
        """True if torch's kernel moves the averages in the call that normalizes `x`.

        It needs a fixed momentum, averages in float32 or wider, and the unbiased variance.
        """
        if self.momentum is None or not self.moves_averages or not self.unbiased_running_var:
            return False
        return self.running_mean.dtype == wide_dtype(x)

    def normalize_in_kernel(self, x: Tensor, affine: Affine, num_groups: int = 1) -> Tensor:
        """Returns batch norm of x (G * N, C, *), in any precision, and moves the state."""
        self.count(num_batches_tracked=1, num_values=x.numel() // x.shape[1])
        averages = (self.running_mean, self.running_var)
        return batch_norm(x, affine, averages, self.momentum, self.eps, num_groups=num_groups)

    @torch.no_grad()
    def advance(self, groups: Moments) -> None:
        """Moves the state by one step, by the moments (G, 1, C, 1, ...) of all groups."""
        mean, var, count = pool(groups, dim=0)
        var = unbiased(var, count) if self.unbiased_running_var else var
        self.move_averages(count, running_mean=mean, running_var=var)

    def merge_state(self, start: State, parts: list[State], shares: list[float]) -> State:
        """Returns the state after one training forward on the values of all parts.

        Each part i has moved `start` by one training forward, with the weight f for its moments
        m_i, v_i: running_i = (1 - f) * start + f * moment_i. These are pooled over n_i values:
        m = sum w_i m_i, v = sum w_i (v_i + (m_i - m)^2), w_i = n_i / sum n_i. The n_i are increases
        of `num_values`, which count real positions, and not `shares`. All values may lead with
        replica axes.
        """
        without_var = {name: start[name] for name in ("num_values", "running_mean")}
        merged = super().merge_state(without_var, parts, shares)
        means = torch.stack([part["running_mean"] for part in parts])
        variances = torch.stack([part["running_var"] for part in parts])
        counts = count_in_parts(parts, start)[..., None].to(means.dtype)  # (parts, ..., 1)
        total = counts.sum(dim=0)
        step = start["num_batches_tracked"] + 1
        f = self.new_weight(step[..., None], means.dtype)
        start_var = start["running_var"]
        old_var = (1 - f) * start_var
        mean, _ = pool_mean(means, counts, dim=0)
        within = variances - old_var  # f * v_i
        between = (means - mean).square() / f  # f * (m_i - m)^2
        if self.unbiased_running_var:
            within = within * (counts - 1).clamp(min=0) / counts.clamp(min=1)
        var, _ = pool_mean(within + between, counts, dim=0)
        new_var = unbiased(var[0], total) if self.unbiased_running_var else var[0]
        return merged | {"running_var": torch.where(total > 0, old_var + new_var, start_var)}


class SampleMomentsNorm(RunningMomentsNorm):
    """Abstract: a norm by the moments of each sample's channels and of all samples together.

    A subclass defines `combine`. In evaluation the running averages stand for all samples.
    """

    def normalize_by_batch(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        samples = measure_samples(x, real)
        batch = pool(samples, dim=1)
        self.advance(batch)
        return self.combine(x, samples, batch.mean, batch.var, affine)

    def normalize_by_running(self, x: Tensor, real: Mask, affine: Affine) -> Tensor:
        mean, var = self.averages_like(x)
        return self.combine(x, measure_samples(x, real), mean, var, affine)

    def combine(
        self, x: Tensor, samples: Moments, mean: Tensor, var: Tensor, affine: Affine, /
    ) -> Tensor:
        """Returns the output by the moments (G, N, C, 1, ...) of the samples, and those of all."""
        raise NotImplementedError


def group_dims(x: Tensor) -> tuple[int, ...]:
    """Returns the axes of x (G, N, C, *) that batch statistics pool: samples and positions."""
    return (1, *range(3, x.ndim))


def measure_samples(x: Tensor, real: Mask) -> Moments:
    """Returns the moments (G, N, C, 1, ...) over the positions of each channel of a sample."""
    return measure(x, real, tuple(range(3, x.ndim)))


NUM_TRAINING_STEPS = 1000  # for a norm that is built outside a training


def before_step(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `state` as it is before this step writes it, even in the backward of compiled code.

    The partitioner of torch.compile ignores that the forward writes a buffer: it recomputes cheap
    operations on the buffer in the backward, from the new value. A cumulative sum over an axis of
    size one changes nothing and is not recomputed.
    """
    return state.to(dtype)[None].cumsum(dim=0)[0]


def shares_to_steps(num_training_steps: int, **shares: float) -> list[int]:
    """Converts shares of a training to numbers of steps, rounded.

    Raises:
        UserError: names the knob whose share is outside [0, 1].
    """
    for knob, share in shares.items():
        if not 0 <= share <= 1:
            raise UserError(
                f"norm.{knob}={share} must be a share of the training, from 0 to 1; try "
                f"norm.{knob}=0.1"
            )
    return [round(share * num_training_steps) for share in shares.values()]


def linear_ramp(step: Tensor, start: int, end: int) -> Tensor:
    """Returns 0 up to step `start`, then a line to 1 at step `end`; steps count from 1."""
    return ((step - start) / max(end - start, 1)).clamp(0, 1)
