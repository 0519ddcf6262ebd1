"""Step times: one seed against a hand-written loop and plain Lightning; replicas; ghost batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from bench_engine import make_cell, seconds_per_step
from bench_measure import Bench, Row, alternate, milliseconds, ratio
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from normexp.batching.replicas import suitable_threads
from normexp.cells.assembly import build_recipe, build_replicas
from normexp.cells.cell import Cell
from normexp.training.fit import quiet_lightning

BATCH_SIZES = (2, 16, 128)


def one_seed(bench: Bench) -> Iterator[Row]:
    for batch_size in BATCH_SIZES:
        steps = _steps(bench, batch_size)
        cell = make_cell(f"batch_size={batch_size}", f"steps={steps}")
        arms = {
            "ours": lambda cell=cell: seconds_per_step(bench, cell, [0]),
            "ours, recorded": lambda cell=cell: seconds_per_step(bench, cell, [0], records=True),
            "by hand": lambda cell=cell: hand_written(cell),
            "Lightning": lambda cell=cell: plain_lightning(cell, folder=bench.folder),
            "bare Lightning": lambda cell=cell: plain_lightning(cell),
        }
        times = alternate(arms, bench.rounds(9))
        what = f"step, batch {batch_size}, one seed"
        note = ", ".join(f"{name} {milliseconds(times, name)}" for name in arms)
        yield Row(what, "hand-written loop", ratio(times, "ours", "by hand"), 1.10, note=note)
        yield Row(what, "plain Lightning", ratio(times, "Lightning", "ours, recorded"), 1.7, ">=")
        bare = ratio(times, "bare Lightning", "ours")
        yield Row(what, "Lightning without logger, bar and checkpoints", bare)


def replicas(bench: Bench) -> Iterator[Row]:
    for batch_size, aim in ((2, 5.0), (16, 2.5), (128, 1.0)):
        steps = _steps(bench, batch_size) // 4
        cell = make_cell(f"batch_size={batch_size}", f"steps={steps}")
        form = build_replicas(cell, list(range(16))).is_stacked
        arms = {
            "16": lambda cell=cell: seconds_per_step(bench, cell, list(range(16))),
            "1": lambda cell=cell: seconds_per_step(bench, cell, [0]),
        }
        times = alternate(arms, bench.rounds(9))
        note = f"{'stacked' if form else 'in turn'}, {milliseconds(times, '16')} a step of all"
        gain = 16 * ratio(times, "1", "16")
        yield Row(
            f"16 replicas, batch {batch_size}", "one after another", gain, aim, ">=", note=note
        )


def ghost(bench: Bench) -> Iterator[Row]:
    common = ["batch_size=256", f"steps={24 if bench.quick else 60}"]
    cells = {
        "ghost": make_cell(*common, "norm_batch_size=2"),
        "accumulated": make_cell(*common, "micro_batch_size=2"),
        "plain": make_cell(*common),
    }
    arms = {
        name: lambda cell=cell: seconds_per_step(bench, cell, [0]) for name, cell in cells.items()
    }
    times = alternate(arms, bench.rounds(7))
    note = ", ".join(f"{name} {milliseconds(times, name)}" for name in arms)
    what = "norm batch 2 at batch 256"
    yield Row(what, "accumulation", ratio(times, "accumulated", "ghost"), 2.5, ">=", note=note)
    yield Row(what, "plain batch norm", ratio(times, "plain", "ghost"), 0.85, ">=")


def _steps(bench: Bench, batch_size: int) -> int:
    steps = {2: 1200, 16: 800, 128: 240}[batch_size]
    return steps // 4 if bench.quick else steps


def hand_written(cell: Cell) -> float:
    """Seconds per step of a loop that somebody writes who has the data in memory."""
    network, inputs, targets = _network(cell), *_tensors(cell)
    recipe, steps = build_recipe(cell), cell.plan.num_steps
    optimizer = _optimizer(network, cell)
    size, done, losses = recipe.sizes.batch_size, 0, []
    begun, first = 0.0, steps // 4
    with suitable_threads(cell.elements_per_forward):
        while done < steps:
            order = torch.randperm(len(inputs))
            for start in range(0, len(inputs) - size + 1, size):
                if done == first:
                    begun = time.perf_counter()
                chosen = order[start : start + size]
                for group in optimizer.param_groups:
                    group["lr"] = recipe.lr * recipe.schedule.factor(done)
                optimizer.zero_grad()
                loss = F.cross_entropy(network(inputs[chosen]), targets[chosen])
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                if len(losses) == 10:
                    torch.stack(losses).mean().item()
                    losses = []
                done += 1
                if done == steps:
                    break
    return (time.perf_counter() - begun) / (steps - first)


class LightningNetwork(pl.LightningModule):
    """The network as the tutorial of Lightning has it; `logs`: its loss, too."""

    def __init__(self, cell: Cell, *, logs: bool) -> None:
        super().__init__()
        self.network = _network(cell)
        self.cell = cell
        self.logs = logs

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.network(inputs), targets)
        if self.logs:
            self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = _optimizer(self.network, self.cell)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, build_recipe(self.cell).schedule.factor
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class StepWatch(pl.Callback):
    """Time from the end of step `first` to that of the last one."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.begun = self.ended = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        self.ended = time.perf_counter()
        if trainer.global_step == self.first and not self.begun:  # once, for all its micro-batches
            self.begun = self.ended


def plain_lightning(cell: Cell, *, accumulate: int = 1, folder: Path | None = None) -> float:
    """Seconds per optimizer step of Lightning's automatic loop.

    Args:
        accumulate: micro-batches per optimizer step.
        folder: with all that a Trainer has by default, left there; None: with nothing switched on.
    """
    module = LightningNetwork(cell, logs=folder is not None)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    extras = off if folder is None else {"default_root_dir": folder / "lightning"}
    size = cell.plan.sizes.batch_size // accumulate
    loader = DataLoader(TensorDataset(*_tensors(cell)), size, shuffle=True, drop_last=True)
    steps = cell.plan.num_steps
    watch = StepWatch(max(1, steps // 4))
    threads = suitable_threads(cell.elements_per_forward // accumulate)
    with quiet_lightning(), threads, redirect_stdout(StringIO()):
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            accumulate_grad_batches=accumulate,
            enable_model_summary=False,
            callbacks=[watch],
            **extras,
        )
        trainer.fit(module, loader)
    return (watch.ended - watch.begun) / (steps - watch.first)


class HandWritten(nn.Module):
    """model=convnet in plain PyTorch."""

    def __init__(self, num_channels: int, num_outputs: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_channels, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(F.max_pool2d(x, 2))))
        x = F.relu(self.norm3(self.conv3(x)))
        return self.head(x.mean(dim=(2, 3)))


def _network(cell: Cell) -> nn.Module:
    network = HandWritten(cell.data.input_shape[0], cell.data.num_outputs, width=16)
    assert sum(p.numel() for p in network.parameters()) == cell.num_parameters
    return network


def _optimizer(network: nn.Module, cell: Cell) -> torch.optim.Optimizer:
    """optim=sgd: weight decay on all but the norms."""
    norms = [p for name, p in network.named_parameters() if "norm" in name]
    others = [p for name, p in network.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 5e-4}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=cell.plan.lr, momentum=0.9, nesterov=True, fused=True)


def _tensors(cell: Cell) -> tuple[Tensor, Tensor]:
    train = cell.data.train.gather(torch.arange(len(cell.data.train)))
    return cell.data.model_inputs(train["inputs"]), train["targets"]


MEASUREMENTS = {"step": one_seed, "replicas": replicas, "ghost": ghost}
