"""Evaluation with precise and with batch statistics, against passes written out by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_cases import build_task, image_data, state_of, text_data, text_encoder

from normexp.batching.sizes import Sizes
from normexp.data.dataset import Data
from normexp.errors import UserError
from normexp.norms.batch import BatchNorm
from normexp.norms.contract import named_sites
from normexp.norms.group import GroupNorm
from normexp.tasks.evaluation import completed_blocks, score_batch, score_precise
from normexp.tasks.frozen import STACK_SAMPLES, gather, shuffled
from normexp.tasks.population import Population, measure_population
from normexp.tasks.training import TrainingTask

FORMS = {
    "one": {"seeds": (0,)},
    "in turn": {"seeds": (0, 1)},
    "stacked": {"seeds": (0, 1), "stacked": True},
}


def foreign(num_features: int) -> nn.Module:
    """A norm that the project does not know: torch's own, 3-D maps."""
    return nn.BatchNorm2d(num_features, momentum=0.3)


def backwards(num_features: int) -> nn.Module:
    """A norm whose momentum is the weight of the old value."""

    class Backwards(BatchNorm):
        def _factor(self, step: Tensor, dtype: torch.dtype):
            del step, dtype
            assert self.momentum is not None
            return 1 - self.momentum

    return Backwards(num_features, momentum=0.9)


def trained(**choices) -> TrainingTask:
    """A task in float64 whose running averages have seen a few noisy steps."""
    task = build_task(**choices)
    task.double()
    task.train()
    for seed in range(3):
        source = torch.Generator().manual_seed(seed)
        indices = torch.randint(0, len(task.data.train), (8,), generator=source)
        batch = gather(task.replicas, task.data, "train", indices)
        with torch.no_grad():
            task.replicas.measure(batch, task.measure, shared=True)
    return task


def population_of(task: TrainingTask, num_samples: int = 1000, group_size: int = 8) -> Population:
    found = measure_population(
        task.replicas, task.data, num_samples=num_samples, group_size=group_size
    )
    assert found is not None
    return found


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
@pytest.mark.parametrize("make_norm", [BatchNorm, foreign], ids=["shipped", "foreign"])
def test_precise_statistics_equal_one_pass_over_all_values(make_norm, num_samples, form):
    task = trained(make_norm=make_norm, sizes=Sizes(8), **form)
    found = population_of(task, num_samples, group_size=4)
    indices = shuffled(task.data, "train")[:num_samples]
    for index in range(len(form["seeds"])):
        expected = brute_force(task, index, indices, 4)
        states = own(task, found.states, index)
        assert states.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(states[name], value, rtol=0, atol=1e-10)
