"""The settings that verdicts know by name: sizes, budgets, and those of norms."""

from __future__ import annotations

SIZES = ("batch_size", "micro_batch_size", "norm_batch_size")  # each divides the one before
BUDGETS = ("samples", "epochs", "steps")  # a training has one; the others follow from it
# What a norm's YAML may set besides; see normexp.config.slots.
SLOTS = ("act", "conv", "residual_scale", "layer_scale", "placement", "qk_norm", "v_norm")
# Settings that belong to the norm, so they may differ between norms that are compared.
NORM_KEYS = ("norm", *SLOTS)


def is_norm_key(key: str) -> bool:
    return key.partition(".")[0] in NORM_KEYS
