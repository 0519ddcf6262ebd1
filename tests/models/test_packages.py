"""Networks of other packages, as `model=` builds them: with the same norm, no number changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from normexp.data import Data, Examples, build_image_data, build_text_data
from normexp.errors import UserError
from normexp.norms.build import build_norm
from normexp.norms.site import named_sites
from normexp.training.config.compose import compose_config
from normexp.training.models.build import NetworkBuilder, _take_scores, build_network
from normexp.training.models.packages import build_timm_model, build_torchvision_model


@pytest.mark.parametrize("build", [build_torchvision_model, build_timm_model])
def test_networks_take_grey_images_of_any_size(build: Callable[..., nn.Module]) -> None:
    images = torch.randn(2, 1, 8, 8)
    assert build((1, 8, 8), 7, name="resnet18")(images).shape == (2, 7)
    model = build((1, 8, 8), 7, name="resnet18", image_size=33)
    sizes = []
    model.maxpool.register_forward_hook(lambda _m, _x, out: sizes.append(out.shape[-1]))
    assert model(images).shape == (2, 7) and sizes == [9]


@pytest.mark.parametrize(
    ("build", "name", "shape", "message"),
    [
        (build_torchvision_model, "resnet51", (3, 32, 32), "model.name=resnet51.*resnet50"),
        (build_torchvision_model, "alexnet", (1, 8, 8), "alexnet.*1x8x8.*model.image_size=64"),
        (build_torchvision_model, "vit_b_16", (3, 30, 30), "model.name=vit_b_16.*3x30x30"),
        (build_timm_model, "resnet1", (3, 32, 32), "model.name=resnet1 .*resnet18"),
        (build_timm_model, "test_vit", (1, 8, 8), "model.name=test_vit.*8x8.*model.image_size"),
        (build_timm_model, "test_vit", (64,), r"model=timm.*\(64,\)"),
    ],
)
def test_networks_that_cannot_be_built_are_refused(
    build: Callable[..., nn.Module], name: str, shape: tuple, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(shape, 3, name=name)


BATCH, LAYER, POSITION = "batch", "layer", "layer2d"
NETWORKS = [
    *(("torchvision", name, BATCH) for name in ("resnet18", "mobilenet_v3_small", "googlenet")),
    *(("torchvision", name, BATCH) for name in ("shufflenet_v2_x0_5", "densenet121")),
    ("torchvision", "convnext_tiny", POSITION),
    ("torchvision", "swin_t", LAYER),
    *(("timm", name, BATCH) for name in ("resnet18", "resnetv2_18", "mobilenetv3_small_050")),
    *(("timm", name, BATCH) for name in ("ghostnet_050", "repvgg_a0", "levit_128s", "regnety_002")),
    *(("timm", name, LAYER) for name in ("vit_tiny_patch16_224", "mixer_s32_224")),
    *(("timm", name, POSITION) for name in ("convnext_atto", "edgenext_xx_small")),
    ("timm", "test_efficientnet_ln", POSITION),
    ("timm", "poolformer_s12", "group1"),
]
OTHER = {BATCH: ["norm=group", "norm.groups_policy=nearest"]}  # rms in place of all others
LANGUAGE = ["vocab_size=11", "hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2"]
SEQUENCES = {
    "LlamaForCausalLM": ["config._target_=transformers.LlamaConfig", "config.intermediate_size=32"]
    + [f"config.{word}" for word in LANGUAGE],
    "T5ForTokenClassification": ["config._target_=transformers.T5Config", "config.d_model=16"]
    + ["config.vocab_size=11", "config.num_labels=11", "config.num_layers=2", "config.d_ff=32"]
    + ["config.num_heads=2", "config.d_kv=8"],
}


def images() -> Data:
    pixels = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    part = Examples(pixels, torch.arange(8) % 5)
    return build_image_data("noise", part, part, num_classes=5, val_fraction=0.25, split_seed=0)


def text() -> Data:
    return build_text_data("letters", "abcdefghijk" * 40, 12, 0.25, 0.25)


def builder_of(words: list[str], data: Data) -> NetworkBuilder:
    config = compose_config(words)
    return build_network(config["model"], build_norm(config), data)


def train(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Scores of two training steps and of an evaluation, in float64."""
    network.double().train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    scores = []
    for step in range(2):
        torch.manual_seed(step)  # dropout
        scores.append(network(inputs))
        functional.cross_entropy(scores[-1].flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    scores.append(network.eval()(inputs))
    return torch.stack(scores).detach()


def check(model: list[str], same: str, other: list[str], data: Data) -> None:
    """Trains with `other`; with its original norm by surgery and untouched, results agree."""
    batch = data.train.gather(torch.arange(4))
    inputs, targets = data.model_inputs(batch["inputs"]), batch["targets"]
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    builder = builder_of([*model, f"norm={same}"], data)
    scores = train(builder(0), inputs, targets)
    with pytest.MonkeyPatch.context() as patch:  # without surgery
        patch.setattr(
            NetworkBuilder, "_finish", lambda _, net: net.register_forward_hook(_take_scores)
        )
        untouched = builder(0)
    expected = train(untouched, inputs, targets)
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)  # T5 works in float32
    network = builder_of([*model, *other], data)(0)
    assert len(list(named_sites(network))) == len(list(named_sites(builder(0))))
    assert train(network, inputs, targets).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name", "same"), NETWORKS)
def test_the_same_norm_changes_no_number_and_another_one_trains(
    package: str, name: str, same: str
) -> None:
    other = OTHER.get(same, ["norm=rms"])
    check([f"model={package}", f"model.name={name}"], same, other, images())


@pytest.mark.slow
def test_a_class_of_several_can_be_replaced() -> None:
    words = ["model=timm", "model.name=mobilevit_xxs", "model.replace=[BatchNormAct2d]"]
    check(words, BATCH, OTHER[BATCH], images())


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQUENCES)
def test_networks_of_transformers_keep_their_numbers(name: str) -> None:
    pytest.importorskip("transformers")
    knobs = [f"model.{word}" for word in SEQUENCES[name]]
    words = ["model=custom", f"model._target_=transformers.{name}", *knobs]
    check(words, "rms", ["norm=layer"], text())
