"""What the tests of evaluation share: trained tasks, and all that is borrowed of them."""

from __future__ import annotations

import torch
from torch import nn
from training_cases import build_task

from normexp.training.evaluation import Population, measure_population
from normexp.training.module import TrainingTask, gather

FORMS = {
    "one": {"seeds": (0,)},
    "in turn": {"seeds": (0, 1)},
    "stacked": {"seeds": (0, 1), "stacked": True},
}


def foreign(num_features: int) -> nn.Module:
    """A norm that the project does not know: torch's own, 3-D maps."""
    return nn.BatchNorm2d(num_features, momentum=0.3)


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


def snapshot(task: TrainingTask) -> dict[str, object]:
    """Everything of the replicas that evaluation borrows."""
    modules = dict(task.replicas.named_modules())
    taken: dict[str, object] = {f"{n}.training": m.training for n, m in modules.items()}
    taken |= {f"{n}.momentum": getattr(m, "momentum", None) for n, m in modules.items()}
    taken |= {f"{n}.size": getattr(m, "norm_batch_size", None) for n, m in modules.items()}
    taken |= {f"{n}.names": tuple(sorted(vars(m))) for n, m in modules.items()}
    taken |= {n: (id(b), b.tolist()) for n, b in task.replicas.named_buffers()}
    return taken
