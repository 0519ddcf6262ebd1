"""Running state: update rules, ramps, averages of gradients."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from norm_cases import EPS, C, gradients, make_fresh, random_mask, random_tensor, randomize
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.norms.batch import BatchNorm, GhostBatchNorm
from normexp.norms.site import Site, read_state
from normexp.norms.zoo.batch import BatchRenorm, EvalNorm
from normexp.norms.zoo.power import MovingAverageBatchNorm, PowerNorm
from normexp.norms.zoo.rms import TaperNorm

SHARES = {"num_training_steps": 10}


def batches(number: int) -> list[Tensor]:
    return [2 * random_tensor(6, C, 5, seed=step) + 1 for step in range(number)]


def test_counts_survive_a_cast_to_half_precision():
    norm = BatchNorm(C)
    norm(random_tensor(70_000, C, dtype=torch.float))
    assert norm.bfloat16().num_values == 70_000


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
    assert_close(norm.running_square, loop.q, rtol=0, atol=1e-12)


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
        out = norm(x, mask if masked else None).movedim(1, -1)[mask]
        assert_close(out, expected, rtol=0, atol=1e-12)
        wanted = [x, norm.weight, *([norm.drift] if step > 3 else [])]
        assert_close(gradients(out, wanted), gradients(expected, wanted), rtol=0, atol=1e-12)
    x = batches(1)[0]
    assert_close(norm.eval()(2 * x), 2 * norm(x), rtol=0, atol=1e-12)  # a map without statistics
