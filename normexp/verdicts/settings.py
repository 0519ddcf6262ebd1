"""Which setting is compared, which one is tuned, and which are sizes."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")  # each divides the one before
AXES = ("batch_size", "norm_batch_size")  # along which an arm is compared with itself
SETUP = "setup"  # the arm where cells are compared whole, whatever they differ in
BUDGETS = ("samples", "epochs", "steps")  # a training has one; the others follow from it
# Top-level settings whose defaults a norm's YAML may set; see training/config/slots.py.
SLOTS = ("act", "conv", "residual_scale", "layer_scale", "placement", "qk_norm", "v_norm")


@dataclass(frozen=True)
class Roles:
    """The settings that play a part of their own; those of studies, unless said otherwise.

    Of the others, one that has several values within an arm separates tables, and one that differs
    between arms alone keeps them from being compared.

    arm: the setting whose values are compared
    of_arm: beginnings of settings that belong to it, so that they may differ between arms
    slots: settings that the arm may set itself, so that they may differ, too, where it does
    alone: True if nothing else is compared; else so is every other setting that separates tables
    tuned: the setting whose best value is chosen for each arm
    sizes: the three batch sizes; an arm is compared with itself at several values of AXES
    task: which name a workload
    budgets: a training is given one of them, and the others follow from it
    """

    arm: str = "norm"
    of_arm: tuple[str, ...] = ("norm.",)
    slots: tuple[str, ...] = SLOTS
    alone: bool = False
    tuned: str | None = "lr"
    sizes: tuple[str, ...] = SIZES
    task: tuple[str, ...] = ("model", "data")
    budgets: tuple[str, ...] = BUDGETS

    def is_knob(self, key: str) -> bool:
        """True for a setting of the arm itself, such as `norm.num_groups`."""
        return key.startswith(self.of_arm)

    def is_of_arm(self, key: str) -> bool:
        """True for a setting that may differ between arms."""
        return key == self.arm or key in self.slots or self.is_knob(key)
