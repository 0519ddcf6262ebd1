"""Diagnostics of each norm site against formulas; they do not change the training."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_cases import (
    assert_same_state,
    batch_norm,
    build_module,
    image_data,
    rows_of,
    text_data,
    text_encoder,
    train,
)

from normexp.batching.replicas import Batch
from normexp.norms.factory import NormFactory
from normexp.norms.none import NoNorm
from normexp.training.diagnostics import Diagnostics, measure_groups, measure_sites


class Tanh(nn.Module):
    """weight * tanh(x)."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_features,), 2.0))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = torch.tanh(x) * self.weight.view(-1, *[1] * (x.ndim - 2))
        return out if mask is None else torch.where(mask.unsqueeze(1), out, 0)


class OneSite(nn.Module):
    """A lone norm with a mean of squares as loss."""

    def __init__(self, factory: NormFactory, num_features: int, *, tokens: bool = False) -> None:
        super().__init__()
        self.norm = factory.tokens(num_features) if tokens else factory(num_features)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor, *mask: Tensor) -> Tensor:
        return self.gain * self.norm(inputs, *mask)


def squares(output: Tensor, batch: Batch) -> Tensor:
    del batch
    return output.square().sum()


def measure_one(make, x: Tensor, mask: Tensor | None = None, **options) -> dict[str, float]:
    network = OneSite(NormFactory(make), x.shape[-1 if mask is not None else 1], **options)
    batch = {"inputs": x, "targets": torch.zeros(len(x))}
    if mask is not None:
        batch["mask"] = mask
    rows = measure_sites(network, batch, squares, elementwise=make is not batch_norm)
    return {name.removeprefix("norm/"): value for name, value in rows.items()}


def test_numbers_of_a_map_site_follow_their_formulas():
    x = torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(0)) * 2 + 1
    rows = measure_one(batch_norm, x)
    moments = {"input_mean": x.mean(), "input_std": x.std(correction=0)}
    # Before this forward the running mean is 0 and the running variance 1.
    gap = x.mean(dim=(0, 2, 3)).abs().mean()
    y = functional.batch_norm(x, None, None, training=True)
    weight_gradient = 2 * y.square().sum(dim=(0, 2, 3)) / len(x)
    bias_gradient = 2 * y.sum(dim=(0, 2, 3)) / len(x)
    gradient = torch.cat([weight_gradient, bias_gradient]).norm()
    expected = moments | {"running_gap": gap, "output_rms": 1.0, "grad_norm": gradient}
    for name, value in expected.items():
        assert rows[name] == pytest.approx(float(value), rel=1e-4), name
    affine = {"weight_mean": 1.0, "weight_std": 0.0, "bias_mean": 0.0, "bias_std": 0.0}
    assert {name: rows[name] for name in affine} == affine
    assert "saturated" not in rows


def test_channel_counts_as_dead_where_no_output_is_above_zero():
    x = torch.ones(2, 4, 3)
    x[:, 1] = -1
    x[:, 2] = 0
    x[1, 3] = -1  # alive in the other sample
    assert measure_one(NoNorm, x)["dead"] == 0.5


def test_saturated_share_is_of_slopes_below_a_hundredth_of_the_largest():
    # The slope of tanh is 1 - tanh^2, below 0.01 from atanh(sqrt(0.99)) = 2.993 on.
    x = torch.tensor([0.5, 2.9, 3.1, -8.0, 9.0]).view(5, 1)
    assert measure_one(Tanh, x)["saturated"] == pytest.approx(3 / 5)
    assert measure_one(Tanh, torch.full((5, 1), 9.0))["saturated"] == 1.0  # all of them alike
    assert measure_one(NoNorm, x)["saturated"] == 0.0


def test_padding_is_left_out_of_every_number():
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).abs() + 0.1
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    x[~mask] = 50.0
    rows = measure_one(Tanh, x, mask, tokens=True)
    real = x[mask]  # (7, 3)
    assert rows["input_mean"] == pytest.approx(real.mean().item())
    assert rows["input_std"] == pytest.approx(real.std(correction=0).item())
    rms = (2 * real.tanh()).square().mean().sqrt().item()
    assert rows["output_rms"] == pytest.approx(rms)
    assert rows["saturated"] == 0.0 and rows["dead"] == 0.0


@pytest.mark.parametrize(
    "choices",
    [{}, {"stacked": True}, {"model": partial(text_encoder, dropout=0.3), "data": text_data()}],
    ids=["in_turn", "stacked", "text"],
)
def test_training_is_the_same_with_and_without(tmp_path: Path, choices):
    seeds = (0, 1)
    plain = train(build_module(seeds=seeds, **choices), tmp_path / "a.ckpt")
    watched = build_module(seeds=seeds, **choices)
    generator = torch.get_rng_state()
    train(watched, tmp_path / "b.ckpt", [Diagnostics(1, elementwise=False)])
    assert torch.equal(generator, torch.get_rng_state())
    for index in range(len(seeds)):
        assert_same_state(plain, watched, 0, replica=index)
        kept = [row for row in rows_of(watched, index) if not is_diagnostic(row)]
        assert kept == rows_of(plain, index)


def is_diagnostic(row) -> bool:
    return all(name.startswith("diagnostics/") for name in row[3])


def test_rows_come_at_each_interval_and_at_the_end(tmp_path: Path):
    for every, steps in ((1, [5, 10]), (2, [10]), (3, [10])):  # two epochs of five steps
        module = build_module(seeds=(0, 1), data=image_data(40))
        train(module, tmp_path / f"{every}.ckpt", [Diagnostics(every, elementwise=False)])
        for index in range(2):
            rows = [row for row in rows_of(module, index) if is_diagnostic(row)]
            assert [row[0] for row in rows] == steps
            assert all(math.isfinite(value) for row in rows for value in row[3].values())
            sites = {name.split("/")[1] for name in rows[0][3]}
            assert sites == {"norm1", "norm2", "norm3"}
        first, second = (rows_of(module, index)[-1][3] for index in range(2))
        assert first != second  # each replica has its own


def test_model_without_norms_has_no_rows():
    network = nn.Linear(3, 2)
    batch = {"inputs": torch.ones(2, 3), "targets": torch.zeros(2)}
    assert measure_sites(network, batch, squares, elementwise=False) == {}


def test_groups_scatter_and_averages_stand_apart_as_the_formulas_say():
    x = torch.randn(32, 3, 5, generator=torch.Generator().manual_seed(0)) * 2 + 1
    network = OneSite(NormFactory(batch_norm), 3)
    norm = network.norm.norm
    norm.running_mean.fill_(0.5)
    norm.running_var.fill_(3.0)
    parts = [{"inputs": half, "targets": torch.zeros(16)} for half in x.split(16)]
    rows = measure_groups(network, parts, 4)
    groups = x.unflatten(0, (8, 4))  # four samples share statistics
    means, variances = groups.mean(dim=(1, 3)), groups.var(dim=(1, 3), correction=0)  # (8, 3)
    mean, var = x.mean(dim=(0, 2)), x.var(dim=(0, 2), correction=0)
    expected = {
        "norm/mean_scatter": means.std(dim=0) / var.sqrt(),
        "norm/var_scatter": variances.std(dim=0) / var,
        "norm/mean_distance": (0.5 - mean).abs() / means.std(dim=0),
        "norm/var_distance": (3.0 - var).abs() / variances.std(dim=0),
    }
    assert rows == {name: pytest.approx(v.mean().item(), 1e-4) for name, v in expected.items()}
    assert norm.running_mean.eq(0.5).all()  # as before


def test_effective_rate_is_that_of_the_weights_before_a_norm():
    convolution = nn.Conv1d(2, 3, 1)
    network = nn.Sequential(convolution, nn.ReLU(), NormFactory(batch_norm)(3))
    batch = {"inputs": torch.randn(4, 2, 5), "targets": torch.zeros(4)}
    assert "2/effective_lr" not in measure_sites(network, batch, squares, elementwise=False, lr=0.1)
    network = nn.Sequential(convolution, NormFactory(batch_norm)(3))
    rows = measure_sites(network, batch, squares, elementwise=False, lr=0.1)
    assert rows["1/effective_lr"] == pytest.approx(0.1 / convolution.weight.norm().item() ** 2)
