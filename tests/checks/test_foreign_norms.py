"""Cards of the norms of torch and torchvision: every line that fails, and every trait, is true."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.ops import FrozenBatchNorm2d

from normexp.checks.card import measure_card
from normexp.norms.slots import Slots

NO, YES, TRAINING = "no", "yes", "in training"
BATCH = (TRAINING, NO, TRAINING, TRAINING)
MAP = (NO, YES, YES, YES)
CHANNELS = (NO, YES, NO, NO)
OF_SAMPLE = (NO, NO, YES, YES)
TRACKED = (TRAINING, NO, TRAINING, TRAINING)
# torch's InstanceNorm reads a map as one of N * C channels: contiguous, and in bfloat16 throughout
# unless it has parameters in float32.
CONTIGUOUS, IN_HALF = "channels_last kept", "statistics wide in bfloat16"
NO_MEAN = "empty batch"  # its running mean becomes NaN
FOLLOWS_ITEM = {"torch.compile in training", "replicas under vmap"}

# Samples, channels, positions and future that it mixes, as its documentation says; the failures.
NORMS: dict[str, tuple[Any, tuple[str, ...], set[str]]] = {
    "batch 1d": (nn.BatchNorm1d, BATCH, set()),
    "batch 2d": (nn.BatchNorm2d, BATCH, set()),
    "batch 3d": (nn.BatchNorm3d, BATCH, set()),
    "batch without affine": (partial(nn.BatchNorm2d, affine=False), BATCH, set()),
    "batch of the batch": (
        partial(nn.BatchNorm2d, track_running_stats=False),
        (YES, NO, YES, YES),
        set(),
    ),
    "batch, cumulative": (partial(nn.BatchNorm1d, momentum=None), BATCH, FOLLOWS_ITEM),
    "sync": (nn.SyncBatchNorm, BATCH, set()),
    "frozen": (FrozenBatchNorm2d, (NO, NO, NO, NO), set()),
    "group 8": (partial(nn.GroupNorm, 8), MAP, set()),
    "group 1": (partial(nn.GroupNorm, 1), MAP, set()),
    "group 32": (partial(nn.GroupNorm, 32), MAP, set()),
    "group without affine": (partial(nn.GroupNorm, 4, affine=False), MAP, set()),
    "layer": (nn.LayerNorm, CHANNELS, set()),
    "layer without affine": (partial(nn.LayerNorm, elementwise_affine=False), CHANNELS, set()),
    "layer without bias": (partial(nn.LayerNorm, bias=False), CHANNELS, set()),
    "layer 2d": (LayerNorm2d, CHANNELS, set()),
    "rms": (nn.RMSNorm, CHANNELS, set()),
    "rms without affine": (partial(nn.RMSNorm, elementwise_affine=False), CHANNELS, set()),
    "local response": (partial(nn.LocalResponseNorm, size=5), CHANNELS, {"any strides"}),
    "instance 1d": (nn.InstanceNorm1d, OF_SAMPLE, {IN_HALF}),
    "instance 2d": (nn.InstanceNorm2d, OF_SAMPLE, {CONTIGUOUS, IN_HALF}),
    "instance 3d": (nn.InstanceNorm3d, OF_SAMPLE, {IN_HALF}),
    "instance 2d with affine": (partial(nn.InstanceNorm2d, affine=True), OF_SAMPLE, {CONTIGUOUS}),
    "instance 2d that tracks": (
        partial(nn.InstanceNorm2d, track_running_stats=True),
        TRACKED,
        {CONTIGUOUS, IN_HALF, NO_MEAN},
    ),
    "instance 1d with both": (
        partial(nn.InstanceNorm1d, affine=True, track_running_stats=True),
        TRACKED,
        set(),
    ),
}
FAST = ("group 8", "frozen", "layer 2d")
CASES = [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in NORMS]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_card_has_no_false_line(name: str):
    make, expected, failures = NORMS[name]
    function = make.func if isinstance(make, partial) else make
    target = f"{function.__module__}.{function.__qualname__}"
    card = measure_card(make, name=name, target=target, eps=1e-5, slots=Slots())
    lines = {line.name: line for line in card.lines}
    traits = ("mixes samples", "pools channels", "pools positions", "leaks the future")
    assert tuple(lines[trait].value for trait in traits) == expected
    assert {line.name for line in card.lines if line.status == "fail"} == failures
