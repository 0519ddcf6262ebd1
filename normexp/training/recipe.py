"""The recipe of a training: every choice but its network, its data and its seeds.

Its devices, the number of its steps, their learning rates, and the optimizer of a stack.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from normexp.batching.replicas import Replicas
from normexp.config.sizes import Sizes
from normexp.errors import UserError
from normexp.norms.site import norm_parameters

if TYPE_CHECKING:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.loggers import Logger

OptimizerFactory = Callable[..., Optimizer]


@dataclass(frozen=True)
class Devices:
    """The devices that train a cell together, and the precision of their numbers."""

    accelerator: str  # auto, cpu, gpu or cuda
    per_node: int
    num_nodes: int
    strategy: str  # auto, or ddp for several devices
    precision: str  # 32-true, bf16-mixed or 64-true
    matmul_precision: str  # of float32 on a GPU: highest, high or medium
    shares_statistics: bool  # the norm takes its statistics over all devices

    @property
    def count(self) -> int:
        """The number of devices, over all nodes."""
        return self.per_node * self.num_nodes

    @property
    def type(self) -> str:
        """`cuda` or `cpu`; any other accelerator is left for Lightning to check.

        `auto` is never "mps", which has no float64 for sums over a data set.
        """
        if self.accelerator == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return "cuda" if self.accelerator == "gpu" else self.accelerator


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a training, as a scheduler of torch sets it.

    Attributes:
        build: makes the scheduler, which steps after each optimizer step, or at each validation if
            it monitors a metric.
        follows_lr: at every step the rate is proportional to `lr`; not known of schedulers that
            are not ours, such as OneCycleLR with its `max_lr`.
        monitor: the name of that metric.
        name: of the class of the scheduler.
    """

    total_steps: int
    build: Callable[[Optimizer], LRScheduler]
    follows_lr: bool = False
    monitor: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Recipe:
    """How a cell is trained, evaluated and logged. Its factories build anew for each training."""

    # Length
    sizes: Sizes  # those with which one device trains like all devices together
    drop_last: bool  # drop the last incomplete batch of each epoch
    steps_per_epoch: int
    schedule: Schedule  # the learning rate of each of all optimizer steps

    # Optimizer steps
    optimizer: OptimizerFactory  # has `optimizer_momentum`
    optimizer_target: str  # its dotted path, for messages
    lr: float
    optimizer_momentum: float | None  # None for an optimizer without momentum
    weight_decay: float
    decay_norm: bool  # also the parameters of norms
    decay_bias: bool  # also biases of modules other than norms
    max_grad_norm: float | None  # 2-norm per replica; None: no clipping
    norm_momentum: float | None  # of running averages, from a half-life; None: that of the norm

    # Evaluation
    val_every_epochs: int
    statistics: tuple[str, ...]  # of running, precise, own_share and batch; running always
    precise_samples: int  # training samples to pool for precise statistics
    evaluation_batch_sizes: tuple[int, ...]  # samples per batch, for batch statistics
    evaluates_every_epoch: bool  # all statistics at every validation, not only at the end

    # Execution
    devices: Devices
    stack: bool | None  # train seeds together; None: where it pays
    max_chunk: int  # at most so many optimizer steps in one call of training_step
    compile: bool  # torch.compile the forward of training
    cuda_graph: bool  # record an optimizer step once and replay it
    save_weights: bool
    allow_leak: bool  # train a network that sees future tokens; its numbers are INVALID

    # What watches and records
    callbacks: Callable[[], list[Callback]]  # the user's
    log_every: int  # optimizer steps per row of train/loss
    loggers: Callable[[Mapping[str, Any]], list[Logger]]  # of one run, from its names and folders

    # Of one training
    lr_scales: tuple[float, ...] | None = None  # each replica's learning rate, as a share of `lr`
    mixed_in_evaluation: int | None = None  # samples that the norm mixes there; None if it does not

    @property
    def num_steps(self) -> int:
        return self.schedule.total_steps

    @property
    def num_epochs(self) -> float:
        return self.num_steps / self.steps_per_epoch

    def for_norm(self, *, mixes_samples: bool, mixes_in_evaluation: bool) -> Recipe:
        """The recipe for a norm that was probed: what does not depend on batches is left out."""
        return replace(
            self,
            evaluation_batch_sizes=self.evaluation_batch_sizes if mixes_samples else (),
            statistics=tuple(s for s in self.statistics if mixes_samples or s != "own_share"),
            mixed_in_evaluation=self.sizes.norm if mixes_in_evaluation else None,
        )

    def build_optimizer(self, replicas: Replicas) -> torch.optim.Optimizer:
        groups = parameter_groups(
            replicas,
            weight_decay=self.weight_decay,
            decay_norm=self.decay_norm,
            decay_bias=self.decay_bias,
        )
        return self.optimizer(groups, lr=self.lr)

    def build_rates(self, replicas: Replicas) -> OwnRates | None:
        return None if self.lr_scales is None else OwnRates(replicas, self.lr_scales)


def check_devices(devices: Devices) -> None:
    """Raises UserError for GPUs that this machine lacks."""
    accelerator, wanted, count = devices.accelerator, devices.per_node, torch.cuda.device_count()
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={accelerator}: this machine has no CUDA GPU; "
            "try trainer=cpu, or trainer=auto, which takes a GPU if there is one"
        )
    if accelerator != "cpu" and torch.cuda.is_available() and wanted > max(count, 1):
        raise UserError(
            f"trainer.devices={wanted}: this machine has {count} GPU{'s' if count > 1 else ''}; "
            f"try trainer.devices={count} or trainer.accelerator=cpu"
        )


@contextmanager
def gpu_arithmetic(matmul_precision: str) -> Iterator[None]:
    """Inside the block a GPU multiplies float32 as asked for, and equal steps have equal bits.

    `highest` is float32; `high` is TF32 with 10 bits of mantissa, and `medium` less, on tensor
    cores. By default torch uses TF32 for convolutions but not for matrix products; here both follow
    one setting.

    By default cuDNN may choose convolutions whose sums differ from call to call, and the backward
    of fused attention may add up in any order (pytorch#182551). Then a resumed training would not
    end as one that was never interrupted. So both are off. (Under vmap, that backward also fails.)
    """
    cudnn: Any = torch.backends.cudnn  # not its `flags`, which switch it off by default
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.deterministic
    torch.set_float32_matmul_precision(matmul_precision)
    cudnn.allow_tf32, cudnn.deterministic = matmul_precision != "highest", True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32, cudnn.deterministic = before[1:]


# --- Length and learning rates -------------------------------------------------------------------


def count_steps_per_epoch(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Returns the number of optimizer steps in one pass over the training samples."""
    steps = num_samples // batch_size if drop_last else math.ceil(num_samples / batch_size)
    if steps == 0:
        raise UserError(
            f"batch_size={batch_size} is more than the {num_samples} training samples; "
            f"try batch_size={num_samples} or drop_last=false"
        )
    return steps


def count_steps(
    steps_per_epoch: int,
    batch_size: int,
    *,
    epochs: int,
    steps: int | None,
    samples: int | None,
    samples_per_epoch: int,
) -> int:
    """Returns the optimizer steps of a whole training; `steps` or `samples` override `epochs`."""
    if steps is not None:
        return steps
    if samples is not None:
        if samples < batch_size:
            raise UserError(f"samples={samples} is less than one batch_size={batch_size}")
        whole, rest = divmod(samples, samples_per_epoch)
        return whole * steps_per_epoch + rest // batch_size
    return epochs * steps_per_epoch


def scale_learning_rate(
    rule: str, *, lr: float, momentum: float | None, batch_size: int, base_batch_size: int
) -> tuple[float, float | None]:
    """Returns learning rate and momentum for `batch_size`, given those for `base_batch_size`.

    With k = batch_size / base_batch_size:
        none            unchanged
        linear          lr * k (Goyal et al., arXiv:1706.02677)
        sqrt            lr * sqrt(k) (Hoffer et al., arXiv:1705.08741)
        momentum_aware  m' = m^k, lr * k * (1 - m') / (1 - m): past samples have the same weight
                        at every batch size (Chiley et al., arXiv:1905.05894)

    Raises:
        UserError: momentum_aware for an optimizer without momentum.
    """
    k = batch_size / base_batch_size
    if rule == "momentum_aware":
        if momentum is None:
            raise UserError("lr_rule=momentum_aware needs optim.momentum; try optim=sgd")
        scaled = momentum**k
        return lr * k * (1 - scaled) / (1 - momentum), scaled
    factor = {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[rule]
    return lr * factor, momentum


def momentum_of_half_life(half_life: float, batch_size: int) -> float:
    """Returns the momentum (weight of the new value) that halves the past in `half_life` samples.

    1 - 2^(-batch_size / half_life): the running average remembers equally many samples at every
    batch size.
    """
    return 1 - 2 ** (-batch_size / half_life)


def schedule_by_factor(factor: Callable[[int], float], total_steps: int) -> Schedule:
    """The schedule whose rate at a step, counted from 0, is `lr` times a factor."""

    def build(optimizer: Optimizer) -> LRScheduler:
        # After the last step the scheduler asks for the rate of one more.
        return LambdaLR(optimizer, lambda step: factor(min(step, total_steps - 1)))

    return Schedule(total_steps, build, follows_lr=True)


def named_schedule(kind: str, warmup: float, total_steps: int) -> Schedule:
    """Linear warm-up over the first `warmup` (a share of the steps), then, as u goes from 0 to 1:

    constant    1
    cosine      (1 + cos(pi u)) / 2 (arXiv:1608.03983)
    linear      1 - u
    wsd         1, then linear to 0 over the last fifth of all steps (arXiv:2404.06395)
    one_cycle   cosine down to 1e-4; its warm-up begins at 1/25 (arXiv:1708.07120)
    """
    warmup_steps = round(warmup * total_steps)
    rest = max(1, total_steps - warmup_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            risen = (step + 1) / warmup_steps
            return 1 / 25 + (1 - 1 / 25) * risen if kind == "one_cycle" else risen
        if kind == "wsd":
            return min(1.0, (total_steps - step) / (0.2 * total_steps))
        if kind == "constant":
            return 1.0
        if kind == "linear":
            return 1 - (step - warmup_steps) / rest
        cosine = (1 + math.cos(math.pi * (step - warmup_steps) / rest)) / 2
        return max(cosine, 1e-4) if kind == "one_cycle" else cosine

    return schedule_by_factor(factor, total_steps)


def own_schedule(
    make: Callable[..., Any], target: Any, total_steps: int, monitor: str | None, name: str
) -> Schedule:
    """The schedule of a user's function of (step, total_steps), or of a scheduler class.

    Args:
        make: `target` with its knobs.
        monitor: for a scheduler whose `step` takes `metrics`; val/loss if None.
        name: of the target, for messages.

    Raises:
        UserError: a factor that is not a number from 0 on. Errors of its own code pass through.
    """
    is_scheduler = isinstance(target, type) and issubclass(target, LRScheduler)
    takes_metric = is_scheduler and "metrics" in inspect.signature(target.step).parameters
    if monitor is not None and not takes_metric:
        raise UserError(f"schedule.monitor={monitor}: this schedule uses no metric; drop the key")
    if not is_scheduler:
        for step in {*range(0, total_steps, max(1, total_steps // 100)), total_steps - 1}:
            factor = make(step, total_steps)
            if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
                raise UserError(
                    f"{name} returns {factor!r} at step {step} of {total_steps}; return a number, "
                    "0 or more: the factor on lr"
                )
        return schedule_by_factor(lambda step: float(make(step, total_steps)), total_steps)
    trial = SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = make(trial)
    if not takes_metric:
        trial.step()
        scheduler.step()
    watched = (monitor or "val/loss") if takes_metric else None
    return Schedule(total_steps, make, monitor=watched, name=target.__name__)


# --- One optimizer for all replicas of a stack, and weight decay ----------------------------------


def parameter_groups(
    model: nn.Module, *, weight_decay: float, decay_norm: bool, decay_bias: bool = True
) -> list[dict[str, object]]:
    """Returns groups with and without weight decay.

    Parameters are told apart by their module and name (a bias is called `bias` or `..._bias`), not
    by their dimensions: a stack adds a dimension, and some norms have parameters with several.

    Args:
        decay_norm: whether the parameters of norms decay, their biases included.
        decay_bias: whether all other biases do.
    """
    of_norms = {id(p) for p in norm_parameters(model)}
    decayed, kept = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        decays = decay_norm if id(parameter) in of_norms else decay_bias or name[-4:] != "bias"
        if parameter.requires_grad:
            (decayed if decays else kept).append(parameter)
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": weight_decay}]
    return [*groups, {"params": kept, "weight_decay": 0.0}] if kept else groups


class OwnRates:
    """Trains each replica of a stack at its own learning rate, with one optimizer.

    The optimizer steps at the common rate lr, then replica r keeps the share s_r of its update:
    p_r = old_r + s_r (new_r - old_r). This equals a step at the rate s_r lr for every optimizer
    whose update is linear in its rate given the gradients, and whose state does not contain the
    rate: SGD with momentum, Adam, AdamW with its decoupled decay, and the other elementwise
    optimizers of torch.

    Args:
        scales: s_r in (0, 1]. The common rate is the largest, so rounding is never magnified.
    """

    def __init__(self, replicas: Replicas, scales: Sequence[float]) -> None:
        device = next(replicas.parameters()).device
        factors = torch.tensor(scales, dtype=torch.float64, device=device)
        trees = [factors] if replicas.is_stacked else list(factors)
        self._scaled = [  # with a scale () or (S, 1, ...)
            (p, scale.to(p.dtype).view(scale.shape + (1,) * (p.ndim - scale.ndim)))
            for tree, scale in zip(replicas.trees, trees, strict=True)
            for p in tree.parameters()
            if p.requires_grad
        ]

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Steps the optimizer; then each replica keeps its share of the update."""
        before = [parameter.detach().clone() for parameter, _ in self._scaled]
        optimizer.step()
        for old, (parameter, scale) in zip(before, self._scaled, strict=True):
            parameter.copy_(old.lerp_(parameter, scale))  # exact to the bit for a scale of 1


# They update each value from its own history alone, by a step that is linear in the rate.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta),
)


def can_train_a_stack(optimizer: torch.optim.Optimizer) -> bool:
    """True if one optimizer acts on a stack as on each run alone; not known of foreign ones."""
    return type(optimizer) in ELEMENTWISE
