"""Every YAML of conf/model builds its model with exactly the arguments it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import instantiate
from model_cases import PositionNorm
from torch import nn

from normexp.norms.factory import NormFactory
from normexp.norms.site import named_sites

CONF = Path(__file__).parents[2] / "conf" / "model"
SHIPPED = ["convnet", "small_resnet", "resnet20", "vit", "gpt", "text_encoder", "torchvision"]
NUM_GROUPS = 8  # the default of conf/norm/group.yaml


def build(name: str, norm: NormFactory) -> nn.Module:
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    data: dict[str, object] = {"num_outputs": 10, "input_shape": (1, 8, 8)}
    if name == "gpt":
        data = {"vocab_size": 65, "block_size": 16}
    elif name == "text_encoder":
        data = {"vocab_size": 65, "block_size": 16, "num_outputs": 10}
    return instantiate(config)(norm=norm, **data)


def test_the_shipped_models_are_these() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} - {"custom"} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_default_group_norm_suits_every_site(name: str) -> None:
    model = build(name, NormFactory(lambda c: nn.GroupNorm(NUM_GROUPS, c))).eval()
    pooled: list[int] = []
    for _, site in named_sites(model):
        site.norm.register_forward_hook(
            lambda _module, args, _out: pooled.append(args[0][0].numel() // NUM_GROUPS)
        )
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    arguments = {"gpt": (tokens,), "text_encoder": (tokens, tokens == 0)}
    with torch.no_grad():
        model(*arguments.get(name, (torch.randn(2, 1, 8, 8),)))
    assert len(pooled) == len(list(named_sites(model)))
    assert min(pooled) >= 2


def test_resnet20_config_is_the_paper_network() -> None:
    model = build("resnet20", NormFactory(PositionNorm))
    colours = 9 * 2 * 16  # the paper's images have three channels, the digits one
    assert sum(p.numel() for p in model.parameters()) == 269_722 - colours
