"""Precise statistics, against passes written out by hand."""

from __future__ import annotations

import pytest
import torch
from evaluation_cases import FORMS, foreign, population_of, snapshot, trained
from torch import Tensor, nn
from training_cases import text_data, text_encoder

from normexp.batching.sizes import Sizes
from normexp.norms.batch import BatchNorm
from normexp.norms.deviations import BatchNormBiasedAverage
from normexp.norms.group import GroupNorm
from normexp.norms.site import named_sites
from normexp.training import module as frozen
from normexp.training.evaluation import measure_population
from normexp.training.module import TrainingTask, gather, shuffled


def group_norm(num_features: int) -> nn.Module:
    return GroupNorm(num_features, num_groups=4)


def no_running_state(num_features: int) -> nn.Module:
    return BatchNorm(num_features, track_running_stats=False)


def backwards(num_features: int) -> nn.Module:
    """A norm whose momentum is the weight of the old value."""

    class Backwards(BatchNorm):
        def kernel_moves_averages(self, x: Tensor) -> bool:
            del x
            return False  # the kernel takes the momentum as it is

        def new_weight(self, step: Tensor, dtype: torch.dtype):
            del step, dtype
            assert self.momentum is not None
            return 1 - self.momentum

    return Backwards(num_features, momentum=0.9)


def brute_force(task: TrainingTask, index: int, indices: Tensor, size: int) -> dict[str, Tensor]:
    """Moments of all values that reach each norm, group by group in training mode."""
    network = task.replicas.replica(index).train()
    seen: dict[str, list[Tensor]] = {}
    for name, site in named_sites(network):
        site.norm_batch_size = None

        def keep(_, args, name=name):
            x, mask = (*args, None)[:2]
            wide = x.flatten(0, 1)[mask.flatten()] if mask is not None else x
            seen.setdefault(name, []).append(wide.movedim(1, 0).flatten(1))  # (C, values)

        site.register_forward_pre_hook(keep)
    with torch.no_grad():
        for group in indices.split(size):
            batch = gather(task.replicas, task.data, "train", group)
            network(*(batch[k] for k in ("inputs", "mask") if k in batch))
    moments = {}
    for name, parts in seen.items():
        values = torch.cat(parts, dim=1)
        moments[f"{name}.norm.running_mean"] = values.mean(dim=1)
        moments[f"{name}.norm.running_var"] = values.var(dim=1, unbiased=False)
    return moments


def own(task: TrainingTask, states: list[dict[str, Tensor]], index: int) -> dict[str, Tensor]:
    if not task.replicas.is_stacked:
        return states[index]
    return {name: value[index] for name, value in states[0].items()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("num_samples", [40, 37, 3], ids="N={}".format)
@pytest.mark.parametrize(
    "make_norm",
    [BatchNorm, foreign, BatchNormBiasedAverage],
    ids=["shipped", "foreign", "biased"],
)
def test_precise_statistics_equal_one_pass_over_all_values(make_norm, num_samples, form):
    task = trained(make_norm=make_norm, sizes=Sizes(8), **form)
    found = population_of(task, num_samples, group_size=4)
    indices = shuffled(task.data, "train")[: num_samples - (num_samples % 4 == 1)]
    for index in range(len(form["seeds"])):
        expected = brute_force(task, index, indices, 4)
        states = own(task, found.states, index)
        assert states.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(states[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_precise_statistics_do_not_depend_on_the_blocks(monkeypatch, form):
    task = trained(sizes=Sizes(8), **form)
    whole = population_of(task, 38, group_size=4)
    monkeypatch.setattr(frozen, "STACK_SAMPLES", 8)
    blocks = population_of(task, 38, group_size=4)
    for states, others in zip(whole.states, blocks.states, strict=True):
        for name, value in states.items():
            torch.testing.assert_close(others[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stacked", [False, True])
def test_precise_statistics_of_padded_text_count_real_positions_only(stacked):
    choices = {"model": text_encoder, "data": text_data(), "seeds": (0, 1), "stacked": stacked}
    task = trained(sizes=Sizes(8), **choices)
    found = population_of(task, 22, group_size=4)
    expected = brute_force(task, 1, shuffled(task.data, "train")[:22], 4)
    for name, value in expected.items():
        torch.testing.assert_close(own(task, found.states, 1)[name], value, rtol=0, atol=1e-10)


def test_lone_last_sample_is_left_out_and_not_counted():
    task = trained(sizes=Sizes(8))
    assert population_of(task, 37, group_size=4).num_samples == 36
    assert population_of(task, 38, group_size=4).num_samples == 38
    assert population_of(task, 10_000, group_size=8).num_samples == 40


def test_gap_compares_running_with_population_moments_per_site():
    task = trained(seeds=(0, 1), stacked=True)
    found = population_of(task)
    gap = found.gaps[1]["norm2"]
    site = task.replicas.replica(1).get_submodule("norm2.norm")
    precise = own(task, found.states, 1)
    mean, var = precise["norm2.norm.running_mean"], precise["norm2.norm.running_var"]
    shift = (site.running_mean - mean).abs() / var.sqrt()  # type: ignore[operator]
    ratio = (site.running_var / var).log2()  # type: ignore[operator]
    assert gap["mean_shift"] == pytest.approx(
        {"mean": shift.mean().item(), "max": shift.max().item()}
    )
    assert gap["log2_var_ratio"]["mean"] == pytest.approx(ratio.mean().item())
    assert abs(gap["log2_var_ratio"]["max"]) == pytest.approx(ratio.abs().max().item())


@pytest.mark.parametrize("make_norm", [group_norm, backwards, no_running_state])
def test_no_precise_statistics_where_no_running_moments_can_be_replaced(make_norm):
    task = trained(make_norm=make_norm)
    before = snapshot(task)
    found = measure_population(task.replicas, task.data, num_samples=40, group_size=8)
    assert found is None
    assert snapshot(task) == before
