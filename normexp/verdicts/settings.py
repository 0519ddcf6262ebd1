"""Which setting is compared, which one is tuned, and which are sizes."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")  # each divides the one before
BUDGETS = ("samples", "epochs", "steps")  # a training has one; the others follow from it
# Top-level settings whose defaults a norm's YAML may set; see training/config/slots.py.
SLOTS = ("act", "conv", "residual_scale", "layer_scale", "placement", "qk_norm", "v_norm")


@dataclass(frozen=True)
class Roles:
    """The settings that play a part of their own; those of studies, unless said otherwise.

    Of the others, one that has several values within an arm separates tables, and one that differs
    between arms alone keeps them from being compared.

    arm: the setting whose values are compared
    of_arm: settings that belong to it, so that they may differ between arms; `norm.` stands for all
        that begin so
    tuned: the setting whose best value is chosen for each arm
    sizes: along which an arm is compared with itself
    task: which name a workload
    budgets: a training is given one of them, and the others follow from it
    """

    arm: str = "norm"
    of_arm: tuple[str, ...] = ("norm.", *SLOTS)
    tuned: str | None = "lr"
    sizes: tuple[str, ...] = SIZES
    task: tuple[str, ...] = ("model", "data")
    budgets: tuple[str, ...] = BUDGETS

    def is_of_arm(self, key: str) -> bool:
        """True for a setting that may differ between arms."""
        return key == self.arm or key in self.of_arm or f"{key.partition('.')[0]}." in self.of_arm
