"""Sites in each view, with ghost sub-batches, and the running state of norms over steps."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from norm_cases import (
    EPS,
    C,
    S,
    assert_stack_equals_loop,
    gradients,
    make,
    make_fresh,
    random_mask,
    random_tensor,
    randomize,
)
from torch import Tensor, nn
from torch.testing import assert_close
from wild_norms import StrangerNorm

from normexp.norms import kernel
from normexp.norms.batch import BatchNorm, GhostBatchNorm
from normexp.norms.factory import NormFactory
from normexp.norms.sample import LayerNorm
from normexp.norms.site import Site, read_state
from normexp.norms.zoo.batch import BatchRenorm, EvalNorm
from normexp.norms.zoo.power import MovingAverageBatchNorm, PowerNorm
from normexp.norms.zoo.rms import TaperNorm


@pytest.mark.parametrize("size", [2, 4, 5])
def test_an_unknown_norm_is_split_as_a_loop_over_its_groups(size):
    """Ten samples: sizes 2 and 5 divide, 4 leaves a group of two that weighs two tenths."""
    norm = randomize(StrangerNorm(C).double())
    by_hand = copy.deepcopy(norm)
    x = random_tensor(10, C).requires_grad_()
    outputs, averages = [], []
    for part in x.split(size):
        fresh = copy.deepcopy(by_hand)
        fresh.weight = by_hand.weight
        outputs.append(fresh(part))
        averages.append(fresh.size * len(part) / 10)
    expected = torch.cat(outputs)
    site = Site(norm, "map", size)
    out = site(x)
    assert_close(out, expected, rtol=0, atol=1e-14)
    found = gradients(out, [x, norm.weight])
    assert_close(found, gradients(expected, [x, by_hand.weight]), rtol=0, atol=1e-14)
    assert_close(norm.size, torch.stack(averages).sum(dim=0), rtol=0, atol=1e-14)
    assert norm.count == 1
    assert torch.equal(site.eval()(x), norm(x))  # evaluation is not split


@pytest.mark.parametrize("loop_from", [0, 2**16], ids=["looped", "folded"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("view", ["map", "token", "sequence"])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_batch_norm_is_split_by_sample_with_the_state_of_one_forward(
    size, view, masked, loop_from, monkeypatch
):
    """Seven samples leave a ragged group; under the mask two groups of 2 are of padding alone.

    torch's batch norm has the state.
    """
    monkeypatch.setattr(kernel, "LOOP_FROM_ELEMENTS", loop_from)
    x = (random_tensor(7, 5, C) + torch.arange(7).view(7, 1, 1)).requires_grad_()
    mask = random_mask(7, 5) & (torch.arange(7) < 4)[:, None] if masked else None
    site = Site(randomize(BatchNorm(C).double()), view, size)
    alone, theirs = copy.deepcopy(site.norm), nn.BatchNorm1d(C).double()
    theirs.load_state_dict(alone.state_dict())
    out = site(x.mT, mask).mT if view == "map" else site(x, mask)
    parts = x.split(size)
    masks = [None] * len(parts) if mask is None else mask.split(size)
    outs = [alone(part.mT, real).mT for part, real in zip(parts, masks, strict=True)]
    expected = torch.cat(outs)
    assert_close(out, expected, rtol=0, atol=1e-12)
    found = gradients(out, [x, *site.parameters()])
    assert_close(found, gradients(expected, [x, *alone.parameters()]), rtol=0, atol=1e-12)
    values = x[torch.ones(7, 5, dtype=torch.bool) if mask is None else mask]
    theirs(values)
    assert_close(site.norm.state_dict(), theirs.state_dict(), rtol=0, atol=1e-12)
    assert site.norm.num_values == len(values)


def test_torch_batch_norm_in_ghost_batches_has_the_gradients_of_each_group():
    """Its kernel keeps the running averages for its backward; writing them before would raise."""
    x = random_tensor(7, C, 3, 3).requires_grad_()
    norm = nn.BatchNorm2d(C).double()
    expected = torch.cat([copy.deepcopy(norm)(part) for part in x.split(3)])
    found = gradients(Site(norm, "map", 3)(x), [x])
    assert_close(found, gradients(expected, [x]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("view", ["token", "sequence"])
@pytest.mark.parametrize("name", ["batch", "evonorm_b0", "switchable", "batch_per_position"])
def test_stacked_sites_in_ragged_groups_equal_sites_alone(name, view, masked):
    """Seven samples in groups of 4 and 3, so that states are merged under vmap as well."""
    if name == "batch_per_position" and view == "token":
        pytest.skip("takes sequences alone")
    mask = random_mask(S * 7, 5).unflatten(0, (S, -1)) if masked else None
    sites: list[nn.Module] = [Site(make(name, seed=k), view, 4) for k in range(S)]
    assert_stack_equals_loop(sites, random_tensor(S, 7, 5, C), mask)


@pytest.mark.parametrize(("view", "axes"), [("token", (2,)), ("sequence", (1, 2))])
def test_layer_norm_pools_a_token_or_in_view_sequence_a_sample(view, axes):
    x = random_tensor(4, 5, C)
    site = NormFactory(lambda n: LayerNorm(n).double(), view=view).tokens(C)
    var, mean = torch.var_mean(x, dim=axes, correction=0, keepdim=True)
    assert_close(site(x), (x - mean) / (var + 1e-5).sqrt(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", [4, 24])  # groups fold into channels, or run one by one
def test_ghost_batches_of_maps_equal_each_other_however_they_lie(side: int):
    site = Site(BatchNorm(C).double(), "map", 2)
    x = random_tensor(8, C, side, side)
    found = []
    for lies in (torch.contiguous_format, torch.channels_last):
        laid_out = x.contiguous(memory_format=lies).requires_grad_()
        out = site(laid_out)
        found.append((out, *gradients(out, [laid_out, *site.parameters()])))
    for plain, last in zip(*found, strict=True):
        assert_close(last, plain, rtol=1e-12, atol=1e-12)
    if side == 24:
        assert out.stride() == laid_out.stride() != x.stride()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("name", ["batch", "frozen", "batch_per_position"])
def test_a_stack_folded_into_channels_equals_each_norm_alone(
    name, size, shared, training, monkeypatch
):
    monkeypatch.setattr(kernel, "FOLD_FROM_ELEMENTS", 0)
    sites: list[nn.Module] = [
        Site(make(name, seed=k), "map", size).train(training) for k in range(S)
    ]
    x = random_tensor(*([] if shared else [S]), 4, C, 5)
    assert_stack_equals_loop(sites, x, shared=shared, bends=True)


SHARES = {"num_training_steps": 10}


def batches(number: int) -> list[Tensor]:
    return [2 * random_tensor(6, C, 5, seed=step) + 1 for step in range(number)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [2, 4, 9])
def test_ghost_equals_batch_norm_at_a_site_that_splits(size, masked):
    x = random_tensor(7, C, 5).requires_grad_()
    mask = random_mask(7, 5) if masked else None
    norm = randomize(GhostBatchNorm(C, ghost_size=size).double())
    site = Site(randomize(BatchNorm(C).double()), "map", size)
    out, expected = norm(x, mask), site(x, mask)
    assert_close(out, expected, rtol=0, atol=1e-12)
    found = gradients(out, [x, *norm.parameters()])
    assert_close(found, gradients(expected, [x, *site.parameters()]), rtol=0, atol=1e-12)
    assert_close(norm.state_dict(), site.norm.state_dict(), rtol=0, atol=1e-12)


def test_renorm_is_batch_norm_until_its_warmup_is_over():
    ramps = {"warmup": 0.2, "r_ramp_end": 0.4, "d_ramp_end": 0.6, **SHARES}
    norm, theirs = BatchRenorm(C, r_max=3, d_max=5, **ramps).double(), nn.BatchNorm1d(C).double()
    for step, x in enumerate(batches(4), start=1):
        same = torch.allclose(norm(x), theirs(x), rtol=0, atol=1e-12)
        assert same == (step <= 2)


class LoopPower:
    """Algorithm 2 of arXiv:2003.07845 over rows (number, C), with a gradient handed in."""

    def __init__(self, warmup: int, a: float) -> None:
        self.q, self.nu = torch.ones(C).double(), torch.zeros(C).double()
        self.step, self.warmup, self.a = 0, warmup, a

    def __call__(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        warm = self.step < self.warmup
        q = (x**2).mean(dim=0) if warm else self.q
        z = x / (q + EPS) ** 0.5
        nu = (g * z).mean(dim=0) if warm else self.nu
        grad = (g - nu * z) / (q + EPS) ** 0.5
        gamma, lam = (z**2).mean(dim=0), (g * z).mean(dim=0)
        self.nu = self.nu * (1 - self.a * gamma) + self.a * lam
        self.q = self.q + self.a * ((x**2).mean(dim=0) - self.q)
        self.step += 1
        return z, grad


class LoopMovingAverage:
    """MABN over rows (number, C), its averages as lists of the last `memory` steps."""

    def __init__(self, memory: int, r_max: float, warmup: int, a: float) -> None:
        self.memory, self.r_max, self.warmup, self.a = memory, r_max, warmup, a
        self.q = torch.ones(C).double()
        self.squares: list[Tensor] = []
        self.products: list[Tensor] = []

    def __call__(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        self.squares.append((x**2).mean(dim=0))
        warm = len(self.squares) <= max(self.memory, self.warmup)
        last = -1 if warm else -self.memory
        square = torch.stack(self.squares[last:]).mean(dim=0)
        r = ((square + EPS) / (self.q + EPS)) ** 0.5
        r = torch.ones(C).double() if warm else r.clamp(1 / self.r_max, self.r_max)
        z, g = x / (square + EPS) ** 0.5, g * r
        self.products.append((g * z).mean(dim=0))
        product = torch.stack(self.products[last:]).mean(dim=0)
        self.q = (1 - self.a) * self.q + self.a * self.squares[-1]
        return z * r, (g - product * z) / (square + EPS) ** 0.5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["power", "moving_average"])
def test_a_norm_that_averages_gradients_equals_its_loop_over_steps(name, masked):
    """Nine steps: warm-up, and the memory filled more than twice."""
    if name == "power":
        norm = PowerNorm(C, warmup=0.2, **SHARES, eps=EPS, affine=False).double()
        loop = LoopPower(warmup=2, a=0.1)
    else:
        knobs = {"memory": 3, "r_max": 1.3}
        build = partial(MovingAverageBatchNorm, warmup=0.4, momentum=0.3, eps=EPS, affine=False)
        norm = build(C, **knobs, **SHARES).double()
        loop = LoopMovingAverage(**knobs, warmup=4, a=0.3)
    for step, x in enumerate(batches(9)):
        mask = random_mask(6, 5, seed=step) if masked else torch.ones(6, 5, dtype=torch.bool)
        g = random_tensor(6, C, 5, seed=100 + step)
        x = x.requires_grad_()
        out = norm(x, mask if masked else None)
        (grad,) = torch.autograd.grad(out, x, g)
        rows, row_grads = (t.movedim(1, -1)[mask] for t in (x.detach(), g))
        expected, expected_grad = loop(rows, row_grads)
        assert_close(out.movedim(1, -1)[mask], expected, rtol=0, atol=1e-12)
        assert_close(grad.movedim(1, -1)[mask], expected_grad, rtol=0, atol=1e-12)
    x = batches(1)[0]
    by_average = x / (loop.q[:, None] + EPS) ** 0.5
    assert_close(norm.eval()(x), by_average, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["power", "moving_average_batch"])
def test_a_split_moves_the_averages_of_gradients_once_unless_it_is_ragged(name):
    key = "running_product" if name == "power" else "past_products"
    for samples, moves in ((8, True), (7, False)):
        norm = make_fresh(name)
        before, x = read_state(norm)[key], random_tensor(samples, C, 5).requires_grad_()
        gradients(Site(norm, "map", 4)(x), [x])
        assert torch.equal(read_state(norm)[key], before) != moves


def test_eval_norm_measures_its_share_and_nears_batch_norm_as_it_falls():
    norm, theirs = EvalNorm(C, momentum=None).double(), nn.BatchNorm1d(C, momentum=None).double()
    for x in batches(2):
        norm(x)
        theirs(x)
    assert_close(norm.running_share.item(), 1 / 6)
    (x,) = batches(1)
    norm.running_share.fill_(1e-9)
    assert_close(norm.eval()(x), theirs.eval()(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_taper_finds_its_scale_in_the_warm_up_and_keeps_the_weight_that_ends_it(masked):
    """The loop of arXiv:2602.10408 over rows; the weight moves at every step."""
    norm = TaperNorm(C, warmup=0.3, taper_end=0.7, **SHARES, momentum=0.2, eps=EPS).double()
    assert norm.weight is not None
    nn.init.constant_(norm.drift, 0.1)
    scaled = energy = 0.0
    kept = torch.ones(C).double()
    for step, x in enumerate(batches(9), start=1):
        nn.init.normal_(norm.weight, mean=1, std=0.1, generator=torch.Generator().manual_seed(step))
        mask = random_mask(6, 5, seed=step) if masked else torch.ones(6, 5, dtype=torch.bool)
        rows = x.requires_grad_().movedim(1, -1)[mask]
        expected = norm.weight * rows / ((rows**2).mean(dim=1, keepdim=True) + EPS) ** 0.5
        if step <= 3:
            fit, square = (expected * norm.weight * rows).sum(1), ((norm.weight * rows) ** 2).sum(1)
            scaled += 0.2 * (fit.mean().item() - scaled)
            energy += 0.2 * (square.mean().item() - energy)
        else:
            kept = norm.weight.detach().clone() if step == 4 else kept
            gate = (1 + math.cos(math.pi * min((step - 3) / 4, 1))) / 2
            fixed = scaled / energy * (kept + norm.drift) * rows
            expected = gate * expected + (1 - gate) * fixed
        shown = (x, mask) if masked else (x,)
        out = norm(*shown).movedim(1, -1)[mask]
        assert_close(out, expected, rtol=0, atol=1e-12)
        if step > 3:  # nothing that evaluation uses moves any more
            assert_close(norm.eval()(*shown).movedim(1, -1)[mask], out, rtol=0, atol=1e-12)
            norm.train()
        wanted = [x, norm.weight, *([norm.drift] if step > 3 else [])]
        assert_close(gradients(out, wanted), gradients(expected, wanted), rtol=0, atol=1e-12)
    x = batches(1)[0]
    assert_close(norm.eval()(2 * x), 2 * norm(x), rtol=0, atol=1e-12)  # a map without statistics
