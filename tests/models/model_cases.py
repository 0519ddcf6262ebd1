"""The models of conf/model, built small, and inputs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from surgery_cases import layer_norm, replaced, taking_settings
from torch import Tensor, nn

from normexp.norms.factory import NormFactory

CONF = Path(__file__).parents[2] / "conf" / "model"
MODELS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "timm")
TRANSFORMERS = ("vit", "gpt", "text_encoder")
SMALL = {"depth": 2, "width": 16, "num_heads": 2}
IMAGES, NUM_OUTPUTS, VOCAB_SIZE, BLOCK_SIZE = (1, 8, 8), 5, 11, 12
FACTS = {
    "unet": {"input_shape": IMAGES, "num_outputs": NUM_OUTPUTS, "depth": 2},
    "gpt": {"vocab_size": VOCAB_SIZE, "block_size": BLOCK_SIZE},
    "text_encoder": {
        "vocab_size": VOCAB_SIZE,
        "block_size": BLOCK_SIZE,
        "num_outputs": NUM_OUTPUTS,
    },
}


def build(name: str, norm: NormFactory | None = None, **knobs: Any) -> nn.Module:
    """The model of conf/model/<name>.yaml with some knobs changed; transformers are SMALL."""
    facts = FACTS.get(name, {"input_shape": IMAGES, "num_outputs": NUM_OUTPUTS})
    knobs = (SMALL if name in TRANSFORMERS else {}) | facts | knobs
    values = OmegaConf.load(CONF / f"{name}.yaml")
    for key in ("weights", "replace"):  # read by build.py
        values.pop(key, None)
    norm = norm or NormFactory(layer_norm)
    if name != "torchvision":
        return instantiate(values)(norm=norm, **knobs)
    values["name"] = "resnet18"
    network = instantiate(values)(**knobs)
    replaced(network, taking_settings(norm.make), torch.randn(2, *IMAGES))
    return network


def draw_arguments(name: str, num_samples: int) -> tuple[Tensor, ...]:
    """Arguments of the forward in float64; strings have 3 tokens or more, padded."""
    if name not in ("gpt", "text_encoder"):
        return (torch.randn(num_samples, *IMAGES, dtype=torch.double),)
    tokens = torch.randint(VOCAB_SIZE, (num_samples, BLOCK_SIZE))
    if name == "gpt":
        return (tokens,)
    lengths = torch.randint(3, BLOCK_SIZE + 1, (num_samples, 1))
    return tokens, torch.arange(BLOCK_SIZE) < lengths
