"""State of the batch family: ramps, running averages over steps, splits, merged parts."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from batch_cases import FAMILY
from norm_cases import EPS, C, gradients, random_mask, random_tensor, randomize
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.eval_norm import EvalNorm
from normexp.norms.none import FrozenBatchNorm
from normexp.norms.power import MovingAverageBatchNorm, PowerNorm
from normexp.norms.renorm import BatchRenorm
from normexp.norms.sharing import GhostBatchNorm
from normexp.norms.site import Site
from normexp.norms.state import merge_state, read_state, write_state

STATEFUL = [name for name in FAMILY if name != "frozen" and not name.startswith("ln_")]
POOLED = [n for n in STATEFUL if n not in ("l1_batch", "eval_norm", "ghost")]


def renorm(**knobs: float) -> BatchRenorm:
    ramps = {"r_max": 3, "d_max": 5, "warmup": 0, "r_ramp_end": 0, "d_ramp_end": 0}
    return BatchRenorm(C, **{**ramps, **knobs}).double()  # type: ignore[arg-type]


def batches(number: int) -> list[Tensor]:
    return [2 * random_tensor(6, C, 5, seed=step) + 1 for step in range(number)]


@pytest.mark.parametrize("name", ["batch_renorm", "sync", "bn_unbiased", "bn_eps_outside"])
def test_running_averages_are_those_of_torch(name):
    norm, theirs = FAMILY[name].make().double(), nn.BatchNorm1d(C).double()
    for x in batches(3):
        norm(x)
        theirs(x)
    state = norm.state_dict()
    for key, value in theirs.state_dict().items():
        if not key.startswith(("weight", "bias")):
            assert_close(state[key], value, rtol=0, atol=1e-12)


def test_renorm_is_batch_norm_until_its_warmup_is_over():
    norm, theirs = renorm(warmup=2, r_ramp_end=4, d_ramp_end=6), nn.BatchNorm1d(C).double()
    for step, x in enumerate(batches(4), start=1):
        same = torch.allclose(norm(x), theirs(x), rtol=0, atol=1e-12)
        assert same == (step <= 2)


def test_unclipped_renorm_gives_in_training_what_evaluation_gives():
    norm = randomize(renorm(r_max=1e9, d_max=1e9, r_ramp_end=1, d_ramp_end=1))
    (x,) = batches(1)
    expected = copy.deepcopy(norm).eval()(x)
    assert_close(norm(x), expected, rtol=0, atol=1e-12)


def test_renorm_has_the_gradient_of_batch_norm_times_r():
    norm = randomize(renorm(r_max=1.5, d_max=0.5, r_ramp_end=1, d_ramp_end=1))
    x = batches(1)[0].requires_grad_()
    r = torch.sqrt(x.var(dim=(0, 2), correction=0) + norm.eps)
    r = (r / torch.sqrt(norm.running_var + norm.eps)).detach().clamp(1 / 1.5, 1.5)
    theirs = nn.BatchNorm1d(C).double()
    theirs.weight.data = norm.state_dict()["weight"] * r
    assert_close(gradients(norm(x), [x]), gradients(theirs(x), [x]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("knobs", [{"r_max": 0.5}, {"d_max": -1}, {"warmup": 5}])
def test_renorm_refuses_what_makes_no_ramp(knobs):
    with pytest.raises(UserError, match="try norm"):
        renorm(**knobs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [2, 4, 7, 9])
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


def test_frozen_equals_torchvision_and_takes_the_state_of_a_batch_norm():
    theirs = torchvision.ops.FrozenBatchNorm2d(C)
    trained, ours = randomize(nn.BatchNorm2d(C)), FrozenBatchNorm(C)
    theirs.load_state_dict(trained.state_dict())
    nn.Sequential(ours).load_state_dict(nn.Sequential(trained).state_dict())
    x = random_tensor(4, C, 3, 3, dtype=torch.float)
    assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)
    assert torch.equal(ours(x), ours.eval()(x))
    assert {name for name, _ in ours.named_parameters()} == {"weight", "bias"}


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
        norm = PowerNorm(C, warmup=2, eps=EPS, affine=False).double()
        loop = LoopPower(warmup=2, a=0.1)
    else:
        knobs = {"memory": 3, "r_max": 1.3, "warmup": 4}
        norm = MovingAverageBatchNorm(C, **knobs, momentum=0.3, eps=EPS, affine=False).double()
        loop = LoopMovingAverage(**knobs, a=0.3)
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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [n for n in STATEFUL if n != "batch_instance"])
def test_groups_in_one_call_equal_each_group_alone(name, masked):
    norm = randomize(FAMILY[name].make().double())
    x = random_tensor(3, 4, C, 5) + torch.arange(3).view(3, 1, 1, 1)
    mask = random_mask(12, 5).unflatten(0, (3, 4)) if masked else None
    parts = [
        copy.deepcopy(norm)(part, None if mask is None else mask[i]) for i, part in enumerate(x)
    ]
    out = copy.deepcopy(norm).forward_groups(x, mask)
    assert_close(out, torch.stack(parts), rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", POOLED)
def test_merged_parts_are_the_state_after_one_forward_on_all(name, masked):
    norm = randomize(FAMILY[name].make().double())
    x = random_tensor(11, C, 5) + 3 * torch.arange(11).view(-1, 1, 1)
    mask = random_mask(11, 5) if masked else torch.ones(11, 5, dtype=torch.bool)
    whole, start, ends = copy.deepcopy(norm), read_state(norm), []
    whole(x, mask)
    for part, own in zip(x.split([5, 2, 4]), mask.split([5, 2, 4]), strict=True):
        norm(part, own)
        ends.append(read_state(norm))
        write_state(norm, start)
    merged = merge_state(norm, start, ends, [5 / 11, 2 / 11, 4 / 11])
    assert_close(merged, read_state(whole), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["power", "moving_average_batch"])
def test_a_split_moves_the_averages_of_gradients_once_unless_it_is_ragged(name):
    key = "running_product" if name == "power" else "past_products"
    for samples, moves in ((8, True), (7, False)):
        norm = FAMILY[name].make().double()
        before, x = read_state(norm)[key], random_tensor(samples, C, 5).requires_grad_()
        gradients(Site(norm, "map", 4)(x), [x])
        assert torch.equal(read_state(norm)[key], before) != moves


def test_eval_norm_finds_its_share_and_nears_batch_norm_as_it_falls():
    norm, theirs = EvalNorm(C, momentum=None).double(), nn.BatchNorm1d(C, momentum=None).double()
    for x in batches(2):
        norm(x)
        theirs(x)
    assert_close(dict(norm.named_buffers())["running_share"].item(), 1 / 6)
    (x,) = batches(1)
    norm.running_share.fill_(1e-9)
    assert_close(norm.eval()(x), theirs.eval()(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["power", "moving_average_batch"])
def test_equal_weights_of_all_steps_are_refused(name):
    knobs = {"power": {"warmup": 1}, "moving_average_batch": {"memory": 2, "r_max": 5, "warmup": 1}}
    with pytest.raises(UserError, match="momentum=null does not fit"):
        type(FAMILY[name].make())(C, momentum=None, **knobs[name])
