"""What an optimizer step does to a stack of replicas, through Lightning's own loop."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_cases import (
    StopAt,
    build_task,
    image_data,
    rows_of,
    state_of,
    stopped_and_resumed,
    text_data,
    text_encoder,
    train,
)

import normexp.training.fit
from normexp.batching.sizes import Sizes
from normexp.data.dataset import Examples
from normexp.norms.batch import BatchNorm
from normexp.norms.group import GroupNorm
from normexp.training.module import shuffled

ADAMW = partial(torch.optim.AdamW, fused=True)


def group_norm(num_features: int) -> nn.Module:
    return GroupNorm(num_features, eps=1e-5, num_groups=4)


def assert_states_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float):
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=atol, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize(
    "sizes", [Sizes(8), Sizes(8, 4), Sizes(8, None, 2), Sizes(8, 4, 2)], ids=str
)
@pytest.mark.parametrize("optimizer", [None, ADAMW], ids=["sgd", "adamw"])
def test_stacked_run_equals_the_same_seed_trained_alone(tmp_path: Path, sizes, optimizer):
    chosen = {} if optimizer is None else {"optimizer": optimizer, "lr": 0.003}
    stack = build_task(seeds=(3, 4, 5), stacked=True, sizes=sizes, max_grad_norm=1.0, **chosen)
    train(stack, tmp_path / "a.ckpt")
    alone = build_task(seeds=(4,), sizes=sizes, max_grad_norm=1.0, **chosen)
    train(alone, tmp_path / "b.ckpt")
    assert_states_close(state_of(stack, 1), state_of(alone), atol=1e-9)
    assert stack.final["test/loss"][1] == pytest.approx(alone.final["test/loss"][0], abs=1e-9)


def test_dropout_of_a_stacked_run_is_that_of_the_run_alone(tmp_path: Path):
    model = partial(text_encoder, dropout=0.3)
    common = {"model": model, "data": text_data(), "sizes": Sizes(8, 4, 2)}
    stack = train(build_task(seeds=(1, 2), stacked=True, **common), tmp_path / "a.ckpt")
    alone = train(build_task(seeds=(2,), **common), tmp_path / "b.ckpt")
    assert_states_close(state_of(stack, 1), state_of(alone), atol=1e-9)


def test_dropout_does_not_depend_on_how_the_batch_is_split(tmp_path: Path):
    model = partial(text_encoder, dropout=0.3)
    common = {"model": model, "make_norm": group_norm, "data": text_data()}
    full = train(build_task(sizes=Sizes(8), **common), tmp_path / "a.ckpt")
    split = train(build_task(sizes=Sizes(8, 2), **common), tmp_path / "b.ckpt")
    assert_states_close(state_of(full), state_of(split), atol=1e-12)


@pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])
def test_size_of_a_chunk_leaves_no_trace(tmp_path: Path, stacked: bool):
    runs = [build_task(seeds=(0, 1), stacked=stacked, max_chunk=k) for k in (1, 32)]
    for index, run in enumerate(runs):
        train(run, tmp_path / f"{index}.ckpt", precision="32-true")
    for name, value in state_of(runs[0], 1).items():
        assert torch.equal(value, state_of(runs[1], 1)[name]), name
    assert rows_of(runs[0], 1) == rows_of(runs[1], 1)


@pytest.mark.parametrize("stop_at", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])
def test_resumed_run_equals_an_undisturbed_one_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, stacked: bool
):
    def build():  # 5 steps an epoch, 10 in all
        return build_task(seeds=(0, 1), stacked=stacked, sizes=Sizes(8, 4, 2), max_chunk=2)

    undisturbed = train(build(), tmp_path / "whole.ckpt", precision="32-true")
    second = stopped_and_resumed(build, stop_at, tmp_path / "last.ckpt", monkeypatch)
    for replica in (0, 1):
        for name, value in state_of(undisturbed, replica).items():
            assert torch.equal(value, state_of(second, replica)[name]), name
        assert rows_of(second, replica) == rows_of(undisturbed, replica)
    assert second.final == undisturbed.final


def test_stop_at_the_end_of_training_comes_too_late(tmp_path: Path, monkeypatch):
    stopper = StopAt(10)
    monkeypatch.setattr(normexp.training.fit, "StopRequest", stopper.request)
    task = train(build_task(), tmp_path / "last.ckpt", [stopper])
    assert task.step == 10
    assert "test/loss" in task.final
    assert not (tmp_path / "last.ckpt").exists()  # resumed there, it would lose what ends it


def test_losses_of_a_checkpoint_go_where_the_training_will_be(monkeypatch):
    task, checkpoint, devices = build_task(), {}, []
    task.on_save_checkpoint(checkpoint)
    gpu = torch.device("cuda", 1)  # while Lightning has not moved the networks there yet
    task.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=gpu))  # type: ignore[assignment]
    monkeypatch.setattr(task.losses, "load_state_dict", lambda _, device: devices.append(device))
    task.on_load_checkpoint(checkpoint)
    assert devices == [gpu]


@pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])
def test_replica_that_diverges_is_noted_and_leaves_the_others_alone(tmp_path: Path, stacked: bool):
    def build():
        return build_task(seeds=(0, 1), stacked=stacked)

    healthy = train(build(), tmp_path / "a.ckpt")
    broken = build()
    tree = broken.replicas.trees[0]
    with torch.no_grad():
        weight = tree.head.weight[0] if stacked else tree.head.weight  # of replica 0
        weight.fill_(torch.inf)
    train(broken, tmp_path / "b.ckpt")
    assert broken.losses.diverged_at == [1, None]  # its first step
    assert_states_close(state_of(broken, 1), state_of(healthy, 1), atol=1e-12)
    assert rows_of(broken, 1) == rows_of(healthy, 1)
    assert all("train/loss" not in values for _, _, _, values in rows_of(broken, 0))


def test_training_stops_early_where_every_replica_diverged(tmp_path: Path):
    task = build_task(lr=1e30, max_chunk=1)
    train(task, tmp_path / "a.ckpt", precision="32-true")
    assert task.losses.diverged_at[0] is not None
    assert task.step < 10
    assert math.isnan(task.final["test/accuracy"][0])  # no result, rather than class 0's share


def test_rows_of_the_loss_stand_at_multiples_of_log_every(tmp_path: Path):
    task = train(build_task(), tmp_path / "a.ckpt")
    losses = [
        (step, samples) for step, _, samples, values in rows_of(task) if "train/loss" in values
    ]
    assert losses == [(3, 24), (6, 48), (9, 72)]
    validations = [
        (step, epoch) for step, epoch, _, values in rows_of(task) if "val/loss" in values
    ]
    assert validations == [(5, 0), (10, 1)]


def test_first_step_is_the_one_written_by_hand(tmp_path: Path):
    """Cross-entropy, SGD with momentum, decay on all but the norms: as a plain loop does."""
    task = build_task()
    task.batches.dtype = torch.float64
    batches = [*task.batches.chunk(0, 5), *task.batches.chunk(5, 5)]  # two epochs of 5 steps
    network = task.replicas.replica(0).double().train()
    norms = {id(p) for n, p in network.named_parameters() if "norm" in n}
    decayed = [p for p in network.parameters() if id(p) not in norms]
    kept = [p for p in network.parameters() if id(p) in norms]
    groups = [{"params": decayed, "weight_decay": 1e-3}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    schedule = task.recipe.schedule
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * schedule.factor(step)
        optimizer.zero_grad()
        output = network(batch["inputs"][0])  # of the only replica
        loss = nn.functional.cross_entropy(output, batch["targets"][0])
        loss.backward()
        optimizer.step()
    train(task, tmp_path / "a.ckpt")
    expected = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    assert_states_close(state_of(task), expected, atol=1e-12)


def test_ragged_last_batch_is_dropped_or_kept(tmp_path: Path):
    kept = build_task(data=image_data(43), drop_last=False)
    assert kept.batches.steps_per_epoch == 6
    assert [len(b["targets"][0]) for b in kept.batches.chunk(4, 2)] == [8, 3]
    train(kept, tmp_path / "a.ckpt")
    assert kept.step == 12
    assert kept.position(12).samples_seen == 86
    dropped = build_task(data=image_data(43))
    assert dropped.batches.steps_per_epoch == 5


def test_score_under_batch_statistics_depends_on_neither_order_nor_neighbours(tmp_path: Path):
    """A norm without running averages mixes samples in evaluation too: here in groups of 5."""
    no_average = partial(BatchNorm, eps=1e-5, track_running_stats=False)
    data = image_data()
    ascending = torch.argsort(data.test.targets, stable=True)
    by_class = Examples(data.test.inputs[ascending], data.test.targets[ascending])
    common = {"make_norm": no_average, "eval_group": 5}
    alone = train(build_task(data=data, **common), tmp_path / "a.ckpt")
    beside = train(build_task(data=data, seeds=(0, 1, 2, 3), **common), tmp_path / "b.ckpt")
    assert beside.final["test/loss"][0] == pytest.approx(alone.final["test/loss"][0], abs=1e-12)
    ordered = build_task(data=dataclasses.replace(data, test=by_class), **common)
    train(ordered, tmp_path / "c.ckpt")
    network = ordered.replicas.trees[0]
    images = data.model_inputs(by_class.inputs, torch.float64)
    order = shuffled(ordered.data, "test").tolist()
    groups = [order[0:5], order[5:10], order[10:12] + order[0:3]]
    kept = (5, 5, 2)
    with torch.no_grad():
        total = sum(
            nn.functional.cross_entropy(
                network(images[group])[:num], by_class.targets[group[:num]], reduction="sum"
            )
            for group, num in zip(groups, kept, strict=True)
        )
    assert ordered.final["test/loss"][0] == pytest.approx(float(total) / 12, abs=1e-12)
