"""Every shipped norm, built from its file, takes steps: all has a gradient, all is finite."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks_cases import convnet, encoder, image_data, padded_data
from omegaconf import DictConfig, OmegaConf

from normexp.batching.sizes import Sizes
from normexp.build import build_norm
from normexp.config.compose import compose_config

FILES = sorted((Path(__file__).resolve().parents[2] / "conf" / "norm").rglob("*.yaml"))
TEXT_ONLY = ["batch_per_position", "bn_per_position", "causal_group", "causal_instance"]


@cache
def defaults() -> DictConfig:
    return compose_config([])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_norm_takes_steps(file: Path):
    is_text = file.stem in TEXT_ONLY
    data = padded_data() if is_text else image_data()
    cfg = OmegaConf.create({**defaults(), "norm": OmegaConf.load(file)})
    network = (encoder if is_text else convnet)(build_norm(cfg, Sizes(8), data))
    batch = data.train.gather(torch.arange(6))
    arguments = [data.model_inputs(batch["inputs"]), *([batch["mask"]] if is_text else [])]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    for _ in range(3):
        loss = F.cross_entropy(network(*arguments), batch["targets"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert all(value.isfinite().all() for value in network.state_dict().values())
    assert network.eval()(*arguments).isfinite().all()
