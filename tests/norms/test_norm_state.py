"""Running state: update rules, groups in one call, merged parts, ramps, averages of gradients."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from norm_cases import (
    APPROXIMATE,
    EPS,
    KNOBS,
    RUNNING,
    SHIPPED,
    C,
    gradients,
    make,
    make_fresh,
    random_mask,
    random_tensor,
    randomize,
)
from torch import Tensor, nn
from torch.testing import assert_close

from normexp.errors import UserError
from normexp.norms import running
from normexp.norms.batch import BatchNorm, BatchRenorm, EvalNorm, GhostBatchNorm, SyncBatchNorm
from normexp.norms.mixtures import ModeNorm
from normexp.norms.power import MovingAverageBatchNorm, PowerNorm
from normexp.norms.rms import BHyT, GatedRMSNorm
from normexp.norms.site import Site
from normexp.norms.state import merge_state, read_state, write_state
from normexp.norms.taper import TaperNorm

G, N, T = 3, 4, 5


def torch_after_one_forward(start: BatchNorm, values: Tensor) -> dict[str, Tensor]:
    """State of torch's batch norm after one forward on values (number, C), begun as `start`."""
    theirs = nn.BatchNorm1d(C, eps=start.eps, momentum=start.momentum).double()
    theirs.load_state_dict(start.state_dict())
    theirs(values)
    return dict(theirs.state_dict())


def batches(number: int) -> list[Tensor]:
    return [2 * random_tensor(6, C, 5, seed=step) + 1 for step in range(number)]


def test_running_averages_after_one_step_follow_the_update_rule():
    x = 2 * random_tensor(64, C) + 3
    norm = BatchNorm(C, momentum=0.25).double()
    norm(x)
    assert_close(norm.running_mean, 0.25 * x.mean(dim=0), rtol=0, atol=1e-12)
    expected = 0.75 + 0.25 * x.var(dim=0, correction=1)
    assert_close(norm.running_var, expected, rtol=0, atol=1e-12)
    assert norm.num_batches_tracked == 1
    assert norm.num_values == 64


@pytest.mark.parametrize("momentum", [0.0, -0.1, 1.5, None])
@pytest.mark.parametrize("name", ["batch", "power", "moving_average_batch", "batch_per_position"])
def test_momentum_outside_its_range_is_refused_and_null_where_averages_need_one(name, momentum):
    if name == "batch" and momentum is None:
        assert BatchNorm(C, momentum=None).momentum is None
        return
    norm, value = make(name), "null" if momentum is None else momentum
    with pytest.raises(UserError, match=f"momentum={value}.*try norm.momentum=0.1"):
        type(norm)(C, **{**KNOBS.get(name, {}), "momentum": momentum})


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loop_from", [0, 2**16], ids=["looped", "folded"])
def test_groups_in_one_call_equal_each_group_alone(monkeypatch, loop_from, masked, momentum):
    """One group, a mask's third, is of padding alone; it does not weigh."""
    monkeypatch.setattr(running, "LOOP_FROM_ELEMENTS", loop_from)
    grouped = randomize(BatchNorm(C, momentum=momentum).double())
    start, alone = copy.deepcopy(grouped), copy.deepcopy(grouped)
    x = random_tensor(G, N, C, T) + 5 * torch.arange(G).view(G, 1, 1, 1)
    mask = random_mask(G * N, T).unflatten(0, (G, N)) if masked else None
    if mask is not None:
        mask[2] = False
    rows = x.movedim(2, -1)
    values = rows.flatten(0, 2) if mask is None else rows[mask]
    x.requires_grad_()
    masks = [None] * G if mask is None else mask
    expected = torch.stack([alone(part, own) for part, own in zip(x, masks, strict=True)])
    out = grouped.forward_groups(x, mask)
    assert_close(out, expected, rtol=0, atol=1e-12)
    found = gradients(out, [x, *grouped.parameters()])
    assert_close(found, gradients(expected, [x, *alone.parameters()]), rtol=0, atol=1e-12)
    expected_state = torch_after_one_forward(start, values)
    assert_close(grouped.state_dict(), expected_state, rtol=0, atol=1e-12)
    assert grouped.num_values == len(values)


def run_in_parts(norm: nn.Module, parts: list[Tensor]):
    """States at the start of a step and after each of its parts, all begun from the start."""
    start, ends = read_state(norm), []
    for part in parts:
        norm(part)
        ends.append(read_state(norm))
        write_state(norm, start)
    return start, ends


@pytest.mark.parametrize("momentum", [1.0, 0.003, None])
def test_merged_parts_equal_one_forward_on_all_values_at_any_momentum(momentum):
    norm = randomize(BatchNorm(C, momentum=momentum).double())
    x = random_tensor(11, C) + 3 * torch.arange(11).view(-1, 1)
    expected = torch_after_one_forward(norm, x)
    start, ends = run_in_parts(norm, list(x.split([5, 2, 4])))
    merged = merge_state(norm, start, ends, [5 / 11, 2 / 11, 4 / 11])
    assert merged.pop("num_values") == 11
    assert_close(merged, {name: expected[name] for name in merged}, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in SHIPPED if hasattr(make(n), "merge_state")])
def test_merged_replicas_equal_each_merged_alone(name):
    """As many replicas as positions: axes must not be taken for one another."""
    runs, norm = [], make(name)
    for replica in range(T):
        parts = [random_tensor(n, C, T, seed=10 * replica + n) for n in (6, 3)]
        runs.append(run_in_parts(randomize(norm, seed=replica), parts))
    alone = [norm.merge_state(start, ends, [2 / 3, 1 / 3]) for start, ends in runs]
    start = {key: torch.stack([run[0][key] for run in runs]) for key in runs[0][0]}
    ends = [{key: torch.stack([run[1][i][key] for run in runs]) for key in start} for i in (0, 1)]
    for key, value in norm.merge_state(start, ends, [2 / 3, 1 / 3]).items():
        assert_close(value, torch.stack([own[key] for own in alone]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", [n for n in RUNNING if n not in APPROXIMATE])
def test_a_backward_may_come_after_another_forward(name):
    """A model may use a module twice; kernels keep buffers that the second forward moves."""
    norm, twin, x = make(name), make(name), random_tensor(6, C, T).requires_grad_()
    late, _ = norm(x), norm(2 * x.detach())
    found = gradients(late, [x, *norm.parameters()])
    assert_close(found, gradients(twin(x), [x, *twin.parameters()]), rtol=0, atol=1e-12)


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


def renorm(**knobs: float) -> BatchRenorm:
    """Shares are of ten steps."""
    ramps = {"r_max": 3, "d_max": 5, "warmup": 0, "r_ramp_end": 0, "d_ramp_end": 0}
    ramps["num_training_steps"] = 10
    return BatchRenorm(C, **{**ramps, **knobs}).double()  # type: ignore[arg-type]


def test_renorm_is_batch_norm_until_its_warmup_is_over():
    norm, theirs = renorm(warmup=0.2, r_ramp_end=0.4, d_ramp_end=0.6), nn.BatchNorm1d(C).double()
    for step, x in enumerate(batches(4), start=1):
        same = torch.allclose(norm(x), theirs(x), rtol=0, atol=1e-12)
        assert same == (step <= 2)


def test_renorm_has_the_gradient_of_batch_norm_times_r():
    norm = randomize(renorm(r_max=1.5, d_max=0.5, r_ramp_end=0.1, d_ramp_end=0.1))
    x = batches(1)[0].requires_grad_()
    r = torch.sqrt(x.var(dim=(0, 2), correction=0) + norm.eps)
    r = (r / torch.sqrt(norm.running_var + norm.eps)).detach().clamp(1 / 1.5, 1.5)
    theirs = nn.BatchNorm1d(C).double()
    theirs.weight.data = norm.state_dict()["weight"] * r
    assert_close(gradients(norm(x), [x]), gradients(theirs(x), [x]), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "knob"),
    [(ModeNorm, "num_modes=0"), (GatedRMSNorm, "rank=0"), (BHyT, "kappa=0")],
)
def test_knobs_that_make_no_norm_are_refused(make, knob):
    with pytest.raises(UserError, match=f"{knob}.*try norm"):
        make(C, **{knob.partition("=")[0]: 0})


@pytest.mark.parametrize(
    "knobs", [{"r_max": 0.5}, {"d_max": -1}, {"warmup": 0.5}, {"warmup": 5}, {"d_ramp_end": 1.5}]
)
def test_renorm_refuses_what_makes_no_ramp(knobs):
    ((key, value),) = knobs.items()
    with pytest.raises(UserError, match=f"{key}={value}.*try norm"):
        renorm(**knobs)


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
        norm = PowerNorm(C, warmup=0.2, num_training_steps=10, eps=EPS, affine=False).double()
        loop = LoopPower(warmup=2, a=0.1)
    else:
        knobs = {"memory": 3, "r_max": 1.3}
        shares = {"warmup": 0.4, "num_training_steps": 10, "momentum": 0.3}
        norm = MovingAverageBatchNorm(C, **knobs, **shares, eps=EPS, affine=False).double()
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


class LoopTaper:
    """TaperNorm over rows (number, C): gate, averages and least squares of arXiv:2602.10408."""

    def __init__(self, warmup: int, end: int, a: float) -> None:
        self.step, self.warmup, self.end, self.a = 0, warmup, end, a
        self.scaled = self.energy = 0.0

    def __call__(self, x: Tensor, gamma: Tensor, gamma_fixed: Tensor) -> Tensor:
        self.step += 1
        normal = gamma * x / ((x**2).mean(dim=1, keepdim=True) + EPS) ** 0.5
        if self.step <= self.warmup:
            square = ((gamma * x) ** 2).sum(dim=1)
            fit = (normal * gamma * x).sum(dim=1)
            self.scaled += self.a * (fit.mean().item() - self.scaled)
            self.energy += self.a * (square.mean().item() - self.energy)
            return normal
        done = min((self.step - self.warmup) / (self.end - self.warmup), 1)
        gate = (1 + math.cos(math.pi * done)) / 2
        return gate * normal + (1 - gate) * self.scaled / self.energy * gamma_fixed * x


@pytest.mark.parametrize("masked", [False, True])
def test_taper_equals_its_loop_over_steps_from_rms_norm_to_a_fixed_scale(masked):
    """The weight moves at every step, so that the end of the warm-up decides which one is kept."""
    knobs = {"warmup": 0.3, "taper_end": 0.7, "num_training_steps": 10}
    norm = TaperNorm(C, **knobs, momentum=0.2, eps=EPS).double()
    loop, fixed = LoopTaper(warmup=3, end=7, a=0.2), torch.ones(C).double()
    nn.init.constant_(norm.drift, 0.1)
    for step, x in enumerate(batches(9)):
        assert norm.weight is not None
        nn.init.normal_(norm.weight, mean=1, std=0.1, generator=torch.Generator().manual_seed(step))
        mask = random_mask(6, 5, seed=step) if masked else torch.ones(6, 5, dtype=torch.bool)
        fixed = norm.weight.detach().clone() if step <= 3 else fixed  # that of the fourth step
        x.requires_grad_()
        out = norm(x, mask if masked else None).movedim(1, -1)[mask]
        expected = loop(x.movedim(1, -1)[mask], norm.weight, fixed + norm.drift)
        assert_close(out, expected, rtol=0, atol=1e-12)
        wanted = [x, norm.weight, *([norm.drift] if step >= 3 else [])]
        assert_close(gradients(out, wanted), gradients(expected, wanted), rtol=0, atol=1e-12)
    x = batches(1)[0]
    assert_close(norm.eval()(2 * x), 2 * norm(x), rtol=0, atol=1e-12)  # a map without statistics


@pytest.mark.parametrize("knobs", [{"warmup": 0}, {"warmup": 0.7}, {"taper_end": 1.5}])
def test_taper_refuses_what_is_no_taper(knobs):
    ((key, value),) = knobs.items()
    with pytest.raises(UserError, match=f"{key}={value}.*try norm"):
        TaperNorm(C, **{"warmup": 0.1, "taper_end": 0.6, **knobs})


SPLITS = (4, 2), (6, 0)  # samples of each process of a synchronized norm
CASES = [(split, masked) for split in SPLITS for masked in (False, True)]


def random_batch(masked: bool) -> tuple[Tensor, Tensor | None]:
    x = random_tensor(6, C, 5) + 3 * torch.arange(6).view(-1, 1, 1)
    return x, random_mask(6, 5) if masked else None


def sync_in_one_process(rank: int, store: str, folder: str) -> None:
    """Takes its part of the batch, forward and backward, and writes the results into a file."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for index, (split, masked) in enumerate(CASES):
        x, mask = random_batch(masked)
        g = random_tensor(*x.shape, seed=5)
        norm = randomize(SyncBatchNorm(C).double())
        own = x.split(split)[rank].requires_grad_()
        out = norm(own, None if mask is None else mask.split(split)[rank])
        loss = (out * g.split(split)[rank]).sum()
        grads = torch.autograd.grad(loss, [own, *norm.parameters()])
        result = {"out": out.detach(), "grads": grads, "state": norm.state_dict()}
        torch.save(result, Path(folder) / f"{rank}-{index}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_synchronized_norm_in_two_processes_is_batch_norm_over_both(tmp_path: Path):
    mp.spawn(sync_in_one_process, (f"file://{tmp_path / 'store'}", str(tmp_path)), nprocs=2)
    for index, (_, masked) in enumerate(CASES):
        x, mask = random_batch(masked)
        norm = randomize(BatchNorm(C).double())
        x.requires_grad_()
        out = norm(x, mask)
        loss = (out * random_tensor(*x.shape, seed=5)).sum()
        expected = torch.autograd.grad(loss, [x, *norm.parameters()])
        parts = [torch.load(tmp_path / f"{rank}-{index}.pt") for rank in (0, 1)]
        assert_close(torch.cat([part["out"] for part in parts]), out, rtol=0, atol=1e-12)
        x_grads, *of_parameters = zip(*(part["grads"] for part in parts), strict=True)
        assert_close(torch.cat(x_grads), expected[0], rtol=0, atol=1e-11)
        for found, whole in zip(of_parameters, expected[1:], strict=True):
            assert_close(sum(found), whole, rtol=0, atol=1e-11)
        for part in parts:
            assert_close(part["state"], norm.state_dict(), rtol=0, atol=1e-12)
