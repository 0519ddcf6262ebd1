"""What holds for every shipped model: shapes, initial weights, stacking, dropout, sites."""

from __future__ import annotations

import pytest
import torch
from model_cases import (
    BLOCK_SIZE,
    BUILDERS,
    NUM_OUTPUTS,
    VOCAB_SIZE,
    PositionNorm,
    build_gpt,
    build_text_encoder,
    build_vit,
    draw_arguments,
)
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from normexp.batching.draws import Dropout
from normexp.models.initialization import modules_outside_sites
from normexp.norms.factory import NormFactory
from normexp.norms.site import Site, named_sites

NAMES = list(BUILDERS)


def groups_of_two(num_features: int) -> nn.Module:
    return nn.GroupNorm(num_features // 2, num_features)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", NAMES)
def test_output_shape(name: str) -> None:
    model = BUILDERS[name](NormFactory(PositionNorm))
    expected = (3, BLOCK_SIZE, VOCAB_SIZE) if name == "gpt" else (3, NUM_OUTPUTS)
    assert model(*draw_arguments(name, 3)).shape == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("view", ["token", "sequence"])
def test_model_trains_with_each_view_of_a_token_site(name: str, view) -> None:
    model = BUILDERS[name](NormFactory(PositionNorm, view=view))
    model(*draw_arguments(name, 3)).square().sum().backward()
    without = [
        key for key, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0
    ]
    assert without == []


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, PositionNorm) for name in NAMES),
        ("resnet", nn.BatchNorm2d),
        ("convnet", nn.BatchNorm2d),
        ("resnet", groups_of_two),
    ],
)
def test_stacked_replicas_equal_a_loop(name: str, make) -> None:
    norm = NormFactory(make)
    models = [BUILDERS[name](norm).double() for _ in range(3)]
    arguments = [tuple(widen(a) for a in draw_arguments(name, 4)) for _ in models]
    params, buffers = stack_module_state(models)

    def loss(own_params, own_buffers, own_arguments):
        out = functional_call(models[0], {**own_params, **own_buffers}, own_arguments)
        return out.square().mean(), out

    stacked = tuple(torch.stack(parts) for parts in zip(*arguments, strict=True))
    losses, outputs = vmap(loss)(params, buffers, stacked)
    losses.sum().backward()
    for index, (model, own) in enumerate(zip(models, arguments, strict=True)):
        out = model(*own)
        out.square().mean().backward()
        torch.testing.assert_close(outputs[index], out, rtol=0, atol=1e-10)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(
                params[key].grad[index], parameter.grad, rtol=0, atol=1e-10, msg=key
            )
        for key, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[key][index], buffer, msg=key)


def widen(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("build", [build_vit, build_gpt, build_text_encoder])
def test_dropout_noise_does_not_depend_on_the_split_of_the_batch(build) -> None:
    model = build(NormFactory(PositionNorm), dropout=0.4).double().train()
    arguments = [widen(a) for a in draw_arguments(build.__name__.removeprefix("build_"), 6)]
    drops = [module for module in model.modules() if isinstance(module, Dropout)]
    for index, dropout in enumerate(drops):
        dropout.key.fill_(1000 + index)
    whole = model(*arguments)
    parts = []
    for first, last in [(0, 1), (1, 4), (4, 6)]:
        for dropout in drops:
            dropout.first_sample.fill_(first)
        parts.append(model(*[a[first:last] for a in arguments]))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)
    assert not torch.allclose(whole, model.eval()(*arguments))


class DrawingNorm(PositionNorm):
    """A norm with a random start of its own."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.mix = nn.Linear(num_features, num_features)
        self.start = self.mix.weight.detach().clone()


@pytest.mark.parametrize("name", NAMES)
def test_initialisation_leaves_what_is_inside_a_norm_alone(name: str) -> None:
    model = BUILDERS[name](NormFactory(DrawingNorm))
    for _, site in named_sites(model):
        assert torch.equal(site.norm.mix.weight, site.norm.start)  # pyright: ignore
    outside = list(modules_outside_sites(model))
    assert not any(isinstance(module, Site | DrawingNorm) for module in outside)


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_start_whatever_the_norm(name: str) -> None:
    starts = []
    for make in (PositionNorm, lambda _: nn.Identity()):
        torch.manual_seed(3)
        model = BUILDERS[name](NormFactory(make))
        own = [m for m in modules_outside_sites(model) if isinstance(m, nn.Linear | nn.Conv2d)]
        starts.append([module.weight for module in own])
    assert all(torch.equal(a, b) for a, b in zip(*starts, strict=True))
