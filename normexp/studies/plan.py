"""The numbers of a training that follow from others: steps, learning rate, momenta."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from omegaconf import DictConfig

from normexp.batching.budget import count_steps, count_steps_per_epoch
from normexp.batching.learning_rate import momentum_of_half_life, scale_learning_rate
from normexp.batching.sizes import Sizes
from normexp.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """Sizes, length and learning rate of one training."""

    sizes: Sizes
    steps_per_epoch: int
    num_steps: int
    lr: float
    optimizer_momentum: float | None  # None where the optimizer has none
    norm_momentum: float | None  # of a norm's running averages; None where half_life is not set

    @property
    def epochs(self) -> int:
        """Passes over the training samples, the last of which may end early."""
        return math.ceil(self.num_steps / self.steps_per_epoch)


def plan_training(cfg: DictConfig, num_train: int) -> Plan:
    """The plan of a cell. Raises UserError for values that contradict each other."""
    sizes = Sizes(cfg.batch_size, cfg.micro_batch_size, cfg.norm_batch_size)
    steps_per_epoch = count_steps_per_epoch(num_train, sizes.batch_size, drop_last=cfg.drop_last)
    left_out = num_train - steps_per_epoch * sizes.batch_size
    if left_out > 0:
        logger.info("drop_last leaves out %d of %d samples an epoch", left_out, num_train)
    lr, momentum = scale_learning_rate(
        cfg.lr_rule,
        lr=cfg.lr,
        momentum=cfg.optim.get("momentum"),
        batch_size=sizes.batch_size,
        base_batch_size=cfg.base_batch_size,
    )
    if lr != cfg.lr:
        logger.info(
            "lr_rule=%s takes lr from %g at base_batch_size=%d to %g at batch_size=%d",
            *(cfg.lr_rule, cfg.lr, cfg.base_batch_size, lr, sizes.batch_size),
        )
    return Plan(
        sizes=sizes,
        steps_per_epoch=steps_per_epoch,
        num_steps=count_steps(
            steps_per_epoch,
            sizes.batch_size,
            epochs=cfg.epochs,
            steps=cfg.steps,
            samples=cfg.samples,
            samples_per_epoch=min(num_train, steps_per_epoch * sizes.batch_size),
        ),
        lr=lr,
        optimizer_momentum=momentum,
        norm_momentum=_norm_momentum(cfg, sizes),
    )


def _norm_momentum(cfg: DictConfig, sizes: Sizes) -> float | None:
    half_life = cfg.norm.get("half_life")
    if half_life is None:
        return None
    if cfg.norm.get("momentum") is not None:
        raise UserError(
            f"norm.momentum={cfg.norm.momentum} and norm.half_life={half_life} are both set; "
            "add norm.momentum=null to use the half-life"
        )
    return momentum_of_half_life(half_life, sizes.batch_size)
