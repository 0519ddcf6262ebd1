"""An optimizer step of a stack through Lightning's own loop, and the numbers that it records."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import pytorch_lightning as pl
import torch
from marks import slow_but
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import Logger
from torch import nn
from torch.optim import lr_scheduler
from training_cases import (
    assert_same_state,
    batch_norm,
    build_module,
    image_data,
    resnet20,
    rows_of,
    state_of,
    stopped_and_resumed,
    text_data,
    text_encoder,
    train,
)

from normexp.errors import UserError
from normexp.norms.build import build_norm
from normexp.norms.factory import NormFactory
from normexp.training.batching.replicas import InTurn, Stacked
from normexp.training.config.compose import compose_config
from normexp.training.config.keys import RunningFrom
from normexp.training.config.sizes import Sizes
from normexp.training.module import LossHistory, Recorder
from normexp.training.records.metrics import read_metrics
from normexp.training.schedule import own_schedule
from normexp.training.step import StepGradient

in_both_forms = pytest.mark.parametrize("stacked", [False, True], ids=["in_turn", "stacked"])


def test_each_step_has_its_own_draws_and_each_part_knows_its_place(monkeypatch):
    model = partial(text_encoder, dropout=0.5)
    module = build_module(model=model, data=text_data(), seeds=(0, 1))
    dropout, foreign = [], []
    replicas = module.replicas
    replicas.has_foreign_draws = True
    monkeypatch.setattr(
        replicas, "set_dropout", lambda keys, first: dropout.append((keys.tolist(), first))
    )
    monkeypatch.setattr(replicas, "seed_foreign_draws", foreign.extend)
    gradient = StepGradient(replicas, module.recipe.criterion, Sizes(8, 4), [0, 1])
    for step, batch in enumerate(module.batches.chunk(0, 2)):
        gradient.add(step, batch)
    assert [first for _, first in dropout] == [0, 4, 0, 4]
    assert dropout[0][0] == dropout[1][0] != dropout[2][0] == dropout[3][0]
    keys = [key for part in (dropout[0][0], dropout[2][0]) for row in part for key in row]
    assert len(set(keys)) == len(keys) == 2 * 3 * 2  # steps, dropouts, replicas
    assert len(set(foreign)) == len(foreign) == 2 * 2 * 2  # steps, parts, replicas


@in_both_forms
@pytest.mark.parametrize("running_from", get_args(RunningFrom))
def test_running_averages_come_from_the_step_its_first_group_or_group_by_group(
    stacked: bool, running_from: RunningFrom
):
    """Torch's batch norm on the same groups has the same averages."""
    sizes = Sizes(8, 4, 2)
    x, targets = torch.randn(2, 8, 3, 5).double(), torch.zeros(2, 8).long()
    parts = {"step": x.split(8, 1), "group": [x[:, :2]], "sequence": x.split(2, 1)}

    def build() -> nn.Module:
        norm = NormFactory(batch_norm, norm_batch_size=2, running_from=running_from)
        return nn.Sequential(norm(3), nn.Flatten(), nn.Linear(15, 2)).double()

    networks = [build(), build()]
    replicas = Stacked(networks) if stacked else InTurn(networks)
    criterion = build_module().recipe.criterion
    gradient = StepGradient(replicas, criterion, sizes, [0, 1], running_from)
    gradient.add(0, {"inputs": x, "targets": targets})
    for replica in (0, 1):
        expected = nn.BatchNorm1d(3).double()
        for part in parts[running_from]:
            expected(part[replica])
        norm: Any = replicas.replica(replica)[0].norm  # type: ignore[index]
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(getattr(norm, name), getattr(expected, name))


@pytest.mark.parametrize("name", ["power", "moving_average_batch"])
def test_a_first_group_keeps_what_its_backward_writes(name: str):
    """In ghost sub-batches as in micro-batches."""
    x, targets = torch.randn(1, 8, 3, 5).double(), torch.zeros(1, 8).long()
    states = []
    for sizes in (Sizes(8, 4), Sizes(8, None, 4)):
        words = [f"norm={name}", "norm.running_from=group"]
        factory = build_norm(compose_config(words), sizes.norm_batch_size, num_steps=10)
        torch.manual_seed(0)
        layers = [nn.Conv1d(3, 3, 1), factory(3), nn.Flatten(), nn.Linear(15, 2)]
        replicas = InTurn([nn.Sequential(*layers).double()])
        criterion = build_module().recipe.criterion
        StepGradient(replicas, criterion, sizes, [0], "group").add(
            0, {"inputs": x, "targets": targets}
        )
        states.append(dict(replicas.replica(0).named_buffers()))
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, msg=key)


STEP_LR = own_schedule(
    partial(lr_scheduler.StepLR, step_size=3, gamma=0.5), lr_scheduler.StepLR, 10, None, "step"
)
# Nothing improves by 10, so each validation but the first halves the rate.
PLATEAU = own_schedule(
    partial(
        lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5, threshold=10.0, threshold_mode="abs"
    ),
    lr_scheduler.ReduceLROnPlateau,
    10,
    "val/loss",
    "plateau",
)
# Choices of a training, what its schedule divides the learning rate by in the end, and the stops.
RESUMED: dict[str, tuple[dict[str, Any], int | None, tuple[int, ...]]] = {
    "in turn": ({}, None, (5, 8)),
    "stacked": ({"stacked": True}, None, (5, 8)),
    "step": ({"schedule": STEP_LR}, 8, (5,)),
    "plateau": ({"schedule": PLATEAU}, 2, (5,)),
}


@pytest.mark.parametrize("name", slow_but(("in turn", "stacked"), RESUMED))
def test_resumed_run_equals_an_undisturbed_one_to_the_bit(tmp_path: Path, device: str, name: str):
    own, divisor, stops = RESUMED[name]
    common: dict[str, Any] = {"lr_scales": (0.5, 1.0), "sizes": Sizes(8, 4, 2), "max_chunk": 2}

    def build():  # 5 steps an epoch, 10 in all
        return build_module(seeds=(0, 0), **common, **own)

    precision = "64-true" if name == "in turn" else "32-true"
    place = {"accelerator": device}
    undisturbed = train(build(), tmp_path / "whole.ckpt", precision=precision, **place)
    for stop_at in stops:
        checkpoint = tmp_path / f"{stop_at}.ckpt"
        resumed = stopped_and_resumed(build, stop_at, checkpoint, precision, **place)
        for module in (undisturbed, resumed) if divisor is not None else ():
            groups = module.trainer.optimizers[0].param_groups
            assert [group["lr"] for group in groups] == pytest.approx([0.05 / divisor] * 2)
        for replica in (0, 1):
            assert_same_state(undisturbed, resumed, 0, replica=replica)
            assert rows_of(resumed, replica) == rows_of(undisturbed, replica)
        assert resumed.metrics == undisturbed.metrics


@pytest.mark.parametrize("channels_last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_networks_in_turn_lie_as_their_recipe_says_and_resume_so(
    tmp_path: Path, channels_last: bool
):
    build = partial(
        build_module,
        model=resnet20,
        seeds=(0, 1),
        channels_last=channels_last,
        sizes=Sizes(8, 8, 4),
    )
    whole = train(build(), tmp_path / "whole.ckpt")
    resumed = stopped_and_resumed(build, 4, tmp_path / "resumed.ckpt", "64-true")
    momenta = resumed.trainer.optimizers[0].state
    for weight in (w for w in resumed.replicas.parameters() if w.ndim == 4):
        format = torch.channels_last if channels_last else torch.contiguous_format
        lies_so = [weight, momenta[weight]["momentum_buffer"]]
        assert all(tensor.is_contiguous(memory_format=format) for tensor in lies_so)
    for replica in (0, 1):
        assert_same_state(whole, resumed, 0, replica=replica)


def test_a_stack_never_lies_with_its_channels_last(tmp_path: Path):
    plain, stack = (
        train(
            build_module(seeds=(0, 1), stacked=True, channels_last=last), tmp_path / f"{last}.ckpt"
        )
        for last in (False, True)
    )
    assert_same_state(plain, stack, 0)


def test_a_run_diverges_at_the_first_step_whose_loss_is_not_finite():
    history = LossHistory(2, every=3)
    losses = torch.ones(5, 2)
    losses[2, 0] = losses[3, 0] = torch.nan
    losses[4, 1] = torch.inf
    history.unread = [*losses]
    rows = list(history.read(10))  # of steps 6 to 10
    assert history.diverged_at == [8, 10]
    assert [step for step, _ in rows] == [6, 9]


@in_both_forms
def test_a_diverged_run_ends_at_its_own_step_whatever_its_neighbours_and_chunks(
    tmp_path: Path, stacked: bool
):
    data = image_data(120)  # 15 steps an epoch
    common = {"data": data, "stacked": stacked, "lr": 1e30, "seeds": (0, 1), "log_every": 1}
    found, healthy = [], build_module(data=data, seeds=(1,), lr=1e-2, log_every=1)
    for max_chunk, scales in ((1, (1.0, 1.0)), (7, (1.0, 1e-32))):
        module = build_module(**common, lr_scales=scales, max_chunk=max_chunk)
        train(module, tmp_path / "a.ckpt", precision="32-true")
        assert module.has_ended == (scales[1] < 1)
        assert math.isnan(module.metrics["test/accuracy"][0])  # not the share of class 0
        found.append((module.losses.diverged_at[0], rows_of(module)))
    assert found[0] == found[1]
    assert max(row[0] for row in found[0][1]) < found[0][0] < 15
    train(healthy, tmp_path / "b.ckpt", precision="32-true")
    assert_same_state(module, healthy, 1e-4, replica=1, other=0)


def test_rows_of_the_loss_end_at_multiples_of_log_every_and_count_samples(tmp_path: Path):
    module = build_module(data=image_data(43), drop_last=False)  # a last batch of 3
    rows = rows_of(train(module, tmp_path / "a.ckpt"))
    losses = [(step, samples) for step, _, samples, values in rows if "train/loss" in values]
    assert losses == [(3, 24), (6, 43), (9, 67), (12, 86)]
    validations = [(step, epoch) for step, epoch, _, values in rows if "val/loss" in values]
    assert validations == [(6, 0), (12, 1)]


def test_training_equals_a_loop_written_by_hand(tmp_path: Path):
    """Cross-entropy, SGD with momentum, weight decay on all parameters but the norms'."""
    module = build_module()
    chunks = [module.batches.chunk(first, 5, torch.float64) for first in (0, 5)]
    network = module.replicas.replica(0).double().train()
    norms = [p for n, p in network.named_parameters() if "norm" in n]
    others = [p for n, p in network.named_parameters() if "norm" not in n]
    groups = [{"params": others, "weight_decay": 1e-3}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    for step, batch in enumerate(batch for chunk in chunks for batch in chunk):
        for group in optimizer.param_groups:  # warm-up of a step, then a cosine over nine
            group["lr"] = 0.05 * (1 + math.cos(math.pi * max(0, step - 1) / 9)) / 2
        optimizer.zero_grad()
        output = network(batch["inputs"][0])  # of the only replica
        nn.functional.cross_entropy(output, batch["targets"][0]).backward()
        optimizer.step()
    train(module, tmp_path / "a.ckpt")
    expected = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for name, value in state_of(module).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12, msg=name)


# The numbers of a training ------------------------------------------------------------------------


class KeepingLogger(Logger):
    name, version = "keeping", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_each_run_gets_its_own_finite_values_in_its_file_and_its_logger(tmp_path: Path):
    files, loggers = [tmp_path / "a.csv", None], [KeepingLogger(), KeepingLogger()]
    recorder = Recorder(files, [[logger] for logger in loggers])
    recorder.record((6, 1, 48), {"val/loss": [1.0, 3.0]})
    recorder.record((7, 1, 56), {"val/loss": [math.inf, 4.0], "val/accuracy": [math.nan] * 2})
    recorder.write()
    assert read_metrics(tmp_path / "a.csv") == [(6, 1, 48, "val/loss", 1.0)]
    assert [(step, row["val/loss"]) for step, row in loggers[1].rows] == [(6, 3), (7, 4)]
    assert loggers[0].rows == [(6, {"val/loss": 1.0, "epoch": 1, "samples_seen": 48})]


def test_loggers_get_the_rate_of_each_step_and_the_speed_and_files_do_not(tmp_path: Path):
    loggers = [KeepingLogger(), KeepingLogger()]
    module = build_module(seeds=(0, 1), stacked=True, lr_scales=(1.0, 0.25), log_every=1)
    module.recorder = Recorder([tmp_path / "a.csv", None], [[logger] for logger in loggers])
    train(module, tmp_path / "a.ckpt")
    schedule, lr = module.recipe.schedule, module.recipe.lr
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)
    scheduler, expected = schedule.build(optimizer), []
    for _ in range(schedule.total_steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    for logger, scale in zip(loggers, (1.0, 0.25), strict=True):
        rows = [row for _, row in logger.rows if "train/loss" in row]
        assert [row["train/lr"] for row in rows] == pytest.approx([scale * r for r in expected])
        assert all(row["train/samples_per_second"] > 0 for row in rows)
    names = {row.name for row in read_metrics(tmp_path / "a.csv")}
    assert "train/loss" in names and not names & {"train/lr", "train/samples_per_second"}


class LogsAStatistic(pl.Callback):
    """Logs the largest weight after each validation and, as `test/steps`, the steps at the end."""

    def __init__(self, name: str = "largest") -> None:
        self.name = name

    def on_validation_epoch_end(self, trainer, pl_module):  # noqa: ARG002
        pl_module.log(self.name, max(p.max() for p in pl_module.replicas.parameters()))

    def on_test_end(self, trainer, pl_module):
        trainer.logger.log_metrics({"test/steps": pl_module.step})


def test_what_callbacks_log_reaches_the_loggers_and_the_file_of_each_run(tmp_path: Path):
    loggers = [KeepingLogger(), KeepingLogger()]
    module = build_module(seeds=(0, 1), stacked=True, max_chunk=1, log_every=4)
    module.recorder = Recorder([tmp_path / "a.csv", None], [[logger] for logger in loggers])
    callbacks = [LogsAStatistic(), LearningRateMonitor(logging_interval="step")]
    train(module, tmp_path / "a.ckpt", callbacks)
    rates = [name for row in read_metrics(tmp_path / "a.csv") if "SGD" in (name := row.name)]
    names = {"largest", "test/steps", *rates}
    found = [(row.step, row.name) for row in read_metrics(tmp_path / "a.csv") if row.name in names]
    expected = [(5, "largest"), (10, "largest"), (10, "test/steps")]
    assert [entry for entry in found if entry[1] not in rates] == expected
    assert {step for step, name in found if name in rates} == {3, 7}
    for logger in loggers:
        assert [(step, name) for step, row in logger.rows for name in row if name in names] == found
    assert sum(row.name == "val/loss" for row in read_metrics(tmp_path / "a.csv")) == 2


@pytest.mark.parametrize("name", ["val/loss", "a,b"])
def test_a_callback_that_logs_a_name_of_ours_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match=f"callback: one logs {name}"):
        train(build_module(), tmp_path / "a.ckpt", [LogsAStatistic(name)])


@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*num_workers")
def test_the_logger_of_a_users_own_trainer_gets_the_means():
    keeping, module = KeepingLogger(), build_module(seeds=(0, 1), stacked=True)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=keeping, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    logged = {name: value for _, row in keeping.rows for name, value in row.items()}
    assert logged["val/loss"] == pytest.approx(sum(module.metrics["val/loss"]) / 2)
    assert "train/loss" in logged
