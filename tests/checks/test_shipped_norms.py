"""Every shipped norm: its card, and a network that mixes what the norm by itself mixes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from checks_cases import (
    LENGTH,
    WIDTH,
    convnet,
    declared,
    defaults,
    encoder,
    gpt,
    image_data,
    padded_data,
    shipped,
    text_data,
)
from torch import Tensor, nn
from torch.nn import functional
from train_cases import takes_maps

from normexp.errors import UserError
from normexp.norms.build import build_norm
from normexp.norms.factory import NormFactory
from normexp.norms.site import View
from normexp.training.checks.card import measure_norm
from normexp.training.checks.network import BuiltNetwork, probe_batch
from normexp.training.checks.padding import check_padding
from normexp.training.checks.preflight import examine
from normexp.training.config.compose import compose_config
from normexp.training.config.groups import group_choices
from normexp.training.config.sizes import Sizes

FAST = ("batch", "batch_per_position", "layer", "instance", "causal_group")
SHIPPED = [name for name in group_choices("norm") if name not in ("custom", "as_built")]
VIEWS: tuple[View, View] = ("token", "sequence")
MODES = (True, False)


def case(name: str, *view: str) -> Any:
    marks = () if name in FAST else pytest.mark.slow
    return pytest.param(name, *view, id="-".join((name, *view)), marks=marks)


NORMS = pytest.mark.parametrize("name", [case(name) for name in SHIPPED])
NORMS_IN_VIEWS = pytest.mark.parametrize(
    ("name", "view"), [case(name, view) for name in SHIPPED for view in VIEWS]
)


def takes(norm: NormFactory) -> bool:
    try:
        norm.tokens(WIDTH)(torch.randn(6, LENGTH, WIDTH))
    except UserError:
        return False
    return True


def skip_unless_taken(norm: NormFactory, name: str, view: View) -> None:
    if view != declared(name)["view"] and not takes(norm):
        pytest.skip(f"{name} does not take tokens as {view}")


class Mixed(NamedTuple):
    """What a norm does to tokens, in training and in evaluation."""

    samples: tuple[bool, ...]
    future: tuple[bool, ...]


def mixed_by(norm: nn.Module, view: View) -> Mixed:
    """What a change of the last sample or token moves in a norm by itself, or in its state."""
    torch.manual_seed(0)
    x = torch.randn(6, WIDTH, LENGTH).double()
    x = x if view == "sequence" else x[..., 0]
    other_sample, other_token = x.clone(), x.clone()
    other_sample[-1] *= -2
    other_token[..., -1] *= -2
    norm = deepcopy(norm).double()
    with torch.no_grad():
        for parameter in norm.parameters():  # some start where the norm changes nothing
            parameter += 0.1 * torch.randn(parameter.shape)

    def run(x: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        fresh = deepcopy(norm).train(training)
        out, state = fresh(x), [buffer.double().flatten() for buffer in fresh.buffers()]
        return out, torch.cat([*state, torch.zeros(0).double()])

    samples, future = [], []
    for training in MODES:
        (out, state), (other, other_state) = run(x, training), run(other_sample, training)
        moves = not torch.allclose(out[:-1], other[:-1], rtol=0, atol=1e-9)
        samples.append(moves or not torch.equal(state, other_state))
        if view == "sequence":
            other, _ = run(other_token, training)
            moves = not torch.allclose(out[..., :-1], other[..., :-1], rtol=0, atol=1e-9)
        future.append(moves)  # in view token, other samples are other tokens
    return Mixed(tuple(samples), tuple(future))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_norm_is_declared_not_to_mix_samples_if_it_mixes_none_in_either_view(name: str):
    factories = {view: shipped(name, padded_data(), view) for view in VIEWS}
    mixing = [any(mixed_by(f.bare(WIDTH), v).samples) for v, f in factories.items() if takes(f)]
    assert declared(name).get("mixes_samples") is (None if any(mixing) else False)


@NORMS_IN_VIEWS
def test_samples_and_future_that_a_network_mixes_are_those_of_its_norm(name: str, view: View):
    data = text_data()
    norm = shipped(name, data, view)
    skip_unless_taken(norm, name, view)
    traits = examine(gpt(norm), data, Sizes(8), drop_last=True, allow_leak=True)
    mixes = (traits.mixes_samples, traits.mixes_samples_in_evaluation)
    leaks = (traits.leaks_future_in_training, traits.leaks_future)
    assert (mixes, leaks) == mixed_by(norm.bare(WIDTH), view)


def test_sub_batches_of_a_norm_that_count_padded_tokens_are_refused():
    """No other shipped norm reads padding, as tests/norms asks of each."""
    data = padded_data()
    network = BuiltNetwork(encoder(shipped("ghost", data, "token")), data, Sizes(8), drop_last=True)
    with pytest.raises(UserError, match="reads padding"):
        check_padding(network, probe_batch(data, 4))


# Deviations that are shipped to be seen, and backwards that are an approximation by definition.
BREAKS = {
    "deviations/no_eps": {"finite"},
    "deviations/ln_no_eps": {"finite"},
    "moving_average_batch": {"gradient"},
    "power": {"gradient"},
}


@NORMS
def test_card_of_a_shipped_norm_has_no_false_line(name: str):
    card = measure_norm(name, compose_config([f"norm={name}"]))
    assert {line.name for line in card.failures} == BREAKS.get(name, set())
    view = declared(name)["view"]
    mixed = mixed_by(shipped(name, padded_data(), view).bare(WIDTH), view)
    for mode, mixes_samples in zip(("in training", "in evaluation"), mixed.samples, strict=True):
        says = {line.name: line.value in ("yes", mode) for line in card.lines}
        assert says["mixes samples"] == mixes_samples
        assert says["pools positions"] or not says["reads the future"]
        assert not says["reads padding"] and says["statistics wide in bfloat16"]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_norm_learns_in_a_network(name: str):
    is_text = not takes_maps(name)
    data = padded_data() if is_text else image_data()
    config = {**defaults(), "norm": declared(name)}
    norm = build_norm(config, num_positions=data.input_shape[-1])
    network, batch = (encoder if is_text else convnet)(norm), data.train.gather(torch.arange(6))
    scores = network(data.model_inputs(batch["inputs"]), *([batch["mask"]] if is_text else []))
    functional.cross_entropy(scores, batch["targets"]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
