"""Which settings of a run play a part of their own in verdicts."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")  # each divides the one before
BUDGETS = ("samples", "epochs", "steps")  # a training has one; the others follow from it
# What a norm's YAML may set besides; see normexp.training.config.slots.
SLOTS = ("act", "conv", "residual_scale", "layer_scale", "placement", "qk_norm", "v_norm")


@dataclass(frozen=True)
class Roles:
    """The settings that play a part of their own; those of studies, unless said otherwise.

    All other settings separate tables.

    arm: the setting whose values are compared
    of_arm: settings that belong to it, as those below `norm.` do; they may differ between arms
    tuned: the setting whose best value is chosen for each arm
    sizes: along which an arm is compared with itself
    task: which name a workload
    """

    arm: str = "norm"
    of_arm: tuple[str, ...] = SLOTS
    tuned: str | None = "lr"
    sizes: tuple[str, ...] = SIZES
    task: tuple[str, ...] = ("model", "data")

    def is_of_arm(self, key: str) -> bool:
        """True for a setting that may differ between arms."""
        return key.partition(".")[0] in (self.arm, *self.of_arm)
