"""A choice of networks of torchvision, timm and transformers, with random weights."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from zoo_case import UNKNOWN, Case, Collate, Sample, as_lists, call, normal

NUM_EACH = {"torchvision": 8, "timm": 9, "transformers": 8}
MOST_PARAMETERS = 7e6
SIDE = 64  # of an image, in pixels
IMAGE, VIDEO = normal(3, SIDE, SIDE), normal(3, 8, SIDE, SIDE)
VOCABULARY = 60
# Sizes in a config of transformers, by the names that configs use.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "mlp_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "num_local_experts"), 2),
    **dict.fromkeys(("image_size", "patch_size"), 32),
    **{"head_dim": 8, "d_kv": 8, "patch_size": 8, "max_position_embeddings": 32},
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
KINDS = {
    nn.modules.batchnorm._BatchNorm: "batch",
    nn.modules.instancenorm._InstanceNorm: "instance",
    nn.GroupNorm: "group",
    nn.LayerNorm: "layer2d",  # over the channels of each position, in maps too
    nn.RMSNorm: "rms",
}


@dataclass(frozen=True)
class Inputs:
    """What a network may take: samples, and several of them as arguments."""

    draw: Callable[[], Sample]
    collate: Collate | None = None


def choose(seed: int) -> list[Case]:
    """The first of each package's list, shuffled, that are small and run."""
    sources: dict[str, tuple[Callable[[Any], Iterator[Case]], list[Any]]] = {
        "torchvision": (of_torchvision, torchvision.models.list_models(exclude="quantized_*")),
        "timm": (of_timm, timm.list_models()),
        "transformers": (
            of_transformers,
            sorted(transformers.MODEL_MAPPING.keys(), key=lambda kind: kind.__name__),
        ),
    }
    cases: list[Case] = []
    for package, (cases_of, names) in sources.items():
        shuffled = random.Random(seed).sample(names, len(names))
        cases += islice((case for name in shuffled for case in cases_of(name)), NUM_EACH[package])
    return cases


def of_torchvision(name: str) -> Iterator[Case]:
    if torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"] > MOST_PARAMETERS:
        return
    weights: dict[str, None] = {"weights": None}
    builder = torchvision.models.get_model_builder(name)
    if "weights_backbone" in inspect.signature(builder).parameters:
        weights["weights_backbone"] = None  # else they are downloaded
    build = partial(builder, **weights)
    if "ssd" in name or "rcnn" in name:
        yield from first_that_runs(name, build, [Inputs(image_and_boxes, as_lists)])
    else:
        yield from first_that_runs(name, build, [Inputs(IMAGE), Inputs(VIDEO)])


def of_timm(name: str) -> Iterator[Case]:
    for settings in ({"img_size": SIDE}, {}):
        build = partial(timm.create_model, name, num_classes=5, **settings)
        if is_small(build):
            yield from first_that_runs(name, build, [Inputs(IMAGE)])
            return


def of_transformers(kind: type) -> Iterator[Case]:
    def build() -> nn.Module:
        default = kind()
        config = kind(**{name: value for name, value in SMALL.items() if hasattr(default, name)})
        config.use_cache = False
        model: Any = transformers.MODEL_MAPPING[kind]
        model = model[0] if isinstance(model, tuple) else model
        return model(config)

    tokens = Inputs(lambda: (words(),), partial(named, ("input_ids",)))
    pairs = Inputs(lambda: (words(), words()), partial(named, ("input_ids", "decoder_input_ids")))
    pixels = Inputs(normal(3, 32, 32), partial(named, ("pixel_values",)))
    wave = Inputs(normal(2000), partial(named, ("input_values",)))
    if is_small(build):
        yield from first_that_runs(kind.__name__, build, [tokens, pairs, pixels, wave])


def first_that_runs(
    name: str, build: Callable[[], nn.Module], candidates: Sequence[Inputs]
) -> Iterator[Case]:
    """A case with the first inputs that the network takes, if it has any norm."""
    try:
        network = build()
    except Exception:  # of any kind: as a library is missing
        return
    if not any("norm" in type(module).__name__.lower() for module in network.modules()):
        return
    for inputs in candidates:
        own, knobs = own_norm(network)
        case = Case(name, build, inputs.draw, UNKNOWN, own, knobs, collate=inputs.collate)
        batch = case.inputs([case.draw(), case.draw()])
        try:
            for training in (True, False):
                call(network.train(training), batch)
        except Exception:  # of any kind, for inputs of another kind
            continue
        yield case
        return


def is_small(build: Callable[[], nn.Module]) -> bool:
    """False also where the network cannot be built without values."""
    try:
        with torch.device("meta"):
            network = build()
    except Exception:  # of any kind
        return False
    return sum(parameter.numel() for parameter in network.parameters()) < MOST_PARAMETERS


def own_norm(network: nn.Module) -> tuple[str | None, dict[str, Any]]:
    """The norm that replaces all norms of a network by the same, and its knobs."""
    found = {kind for kind in KINDS for module in network.modules() if isinstance(module, kind)}
    groups = {module.num_groups for module in network.modules() if isinstance(module, nn.GroupNorm)}
    if len(found) != 1 or len(groups) > 1:
        return None, {}
    return KINDS[found.pop()], {"num_groups": min(groups)} if groups else {}


def words() -> Tensor:
    return torch.randint(3, VOCABULARY, (8,))


def image_and_boxes() -> Sample:
    corners = torch.randint(SIDE // 2, (3, 2))
    boxes = torch.cat([corners, corners + SIDE // 4], 1).float()
    return (*IMAGE(), {"boxes": boxes, "labels": torch.ones(3, dtype=torch.long)})


def named(names: Sequence[str], samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The arguments of a forward by name."""
    stacked = (torch.stack(values) for values in zip(*samples, strict=True))
    return dict(zip(names, stacked, strict=True))
