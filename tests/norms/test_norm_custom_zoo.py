"""torch's and timm's own norms train as norm=custom, with no adapter."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from normexp.records.metrics import read_metrics
from normexp.records.result import read_result
from normexp.train import main

QUICK = ["model.width=8", "batch_size=16", "steps=4", "replicas=2", "log_every=1"]

# What is named, its knobs, and what its parameters begin at.
ONE, ZERO = ("weight", 1.0), ("bias", 0.0)
NORMS = {
    "torch.nn.BatchNorm2d": ([], [ONE, ZERO]),
    "torch.nn.GroupNorm": (["norm.num_groups=4"], [ONE, ZERO]),
    "torch.nn.InstanceNorm2d": (["norm.affine=true"], [ONE, ZERO]),
    "torch.nn.LayerNorm": ([], [ONE, ZERO]),
    "torch.nn.RMSNorm": ([], [ONE]),
    "timm.layers.LayerNorm2d": ([], [ONE, ZERO]),
    "timm.layers.RmsNorm2d": ([], [ONE]),
    "timm.layers.SimpleNorm2d": ([], [ONE]),
    "timm.layers.GroupNorm1": ([], [ONE, ZERO]),
    # These contain their activation.
    "timm.layers.BatchNormAct2d": (["act=identity"], [ONE, ZERO]),
    "timm.layers.GroupNormAct": (["norm.num_groups=4", "act=identity"], [ONE, ZERO]),
    "timm.layers.FilterResponseNormTlu2d": (["act=identity"], [ONE, ZERO, ("tau", 0.0)]),
    "timm.layers.EvoNorm2dB0": (["act=identity"], [ONE, ZERO, ("v", 1.0)]),
    "timm.layers.EvoNorm2dS0": (["norm.groups=4", "act=identity"], [ONE, ZERO, ("v", 1.0)]),
}


@pytest.mark.parametrize("target", NORMS)
def test_a_norm_of_torch_or_timm_trains_by_its_name_alone(tmp_path: Path, target: str):
    knobs, parameters = NORMS[target]
    words = ["norm=custom", f"norm._target_={target}", *knobs]
    assert main([*words, *QUICK, f"runs_dir={tmp_path}"]) == 0
    (run,) = tmp_path.glob("*/*/seed-0")
    result = read_result(run)
    assert result.status == "finished"
    losses = [row.value for row in read_metrics(run / "metrics.csv") if row.name == "train/loss"]
    assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
    weights = torch.load(run / "weights.pt", weights_only=True)
    for name, start in parameters:
        (value,) = (v for k, v in weights.items() if k.startswith("norm1.") and k.endswith(name))
        assert value.shape == (8,) and (value != start).any()
