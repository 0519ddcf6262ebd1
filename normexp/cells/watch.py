"""Repeats two questions during a training: do samples mix, and is the future read?

A norm may behave differently later: in every tenth step, after a warm-up, or once its weights have
moved. Only code that is not ours is watched. No state of a shipped norm changes what it depends
on, except by a counter, and `after_many_steps` asks about those before the training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from normexp.batching.draws import generator
from normexp.batching.replicas import Batch, model_arguments
from normexp.cells.cell import Cell
from normexp.cells.description import describe_cell
from normexp.checks.network import WholeNetwork
from normexp.checks.probe import Probe, along, cuts, fixed_draws, holds
from normexp.checks.sites import PROBE_SAMPLES, expose_branches
from normexp.config.outcome import measured_versions
from normexp.errors import first_line
from normexp.norms.state import read_state
from normexp.records.history import AliasEntry, append_entries, read_history
from normexp.training.chunks import WINDOW
from normexp.training.module import TrainingModule

logger = logging.getLogger(__name__)

STILL = 2  # steps without a change of state, after which the rest of a window is the same
MOST_TIME = 0.05  # share of the training's time
# Beyond that, once per process: a single training of seconds is watched too, and a sweep of such
# trainings loses no time.
FREE_SECONDS = 0.5

_spent_beyond = 0.0  # seconds of this process


@dataclass
class Findings:
    """What a training showed that the checks before it did not: the step of the first time.

    Attributes:
        mixing: a sample depends on other samples.
        leak: a later position moves an earlier output in evaluation.
        leak_in_training: the same in training mode.
    """

    mixing: int | None = None
    leak: int | None = None
    leak_in_training: int | None = None


class Watch(pl.Callback):
    """Looks at `recipe.watched_steps`, the likeliest first, as time allows.

    At each a copy of one replica takes up to WINDOW training steps on a few samples, without an
    optimizer; each step is asked the questions, and the last in evaluation too. The training
    itself is not affected. Seconds of looks are those of the CPU, so a busy machine costs no look.

    Attributes:
        findings: survive an interruption, in the checkpoint.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.findings = Findings()
        self._looked: list[int] = []
        self._asks_samples = not cell.traits.mixes_samples
        self._asks_positions = cell.data.task == "language_modeling"
        self._clock: tuple[float, int] | None = None  # seconds and step, after the first chunk
        self._spent = 0.0  # seconds of the CPU
        self._cost: float | None = None  # seconds of a look

    @property
    def timing(self) -> dict[str, float]:
        """What it took, for the record of a run; empty if nothing is watched."""
        if not self.cell.recipe.watched_steps:
            return {}
        return {"watch_seconds": round(self._spent, 3), "watched_points": len(self._looked)}

    def state_dict(self) -> dict[str, Any]:
        return {"findings": asdict(self.findings), "looked": self._looked}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.findings = Findings(**state_dict["findings"])
        self._looked = list(state_dict["looked"])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        del trainer
        assert isinstance(pl_module, TrainingModule)
        if self._clock is None:
            self._clock = time.perf_counter(), pl_module.step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        assert isinstance(pl_module, TrainingModule)
        is_due = trainer.is_global_zero and pl_module.step in pl_module.recipe.watched_steps
        if not is_due or not any(self._questions(True)):
            return
        affordable = self._affordable(pl_module)
        if affordable <= 0 or (self._cost is not None and self._cost > affordable):
            return
        started = time.process_time()
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.enable_grad():
                is_complete = self._look(pl_module, affordable)
        except Exception as error:  # of foreign code, any kind: it trains, but cannot be copied
            self._asks_samples = self._asks_positions = is_complete = False
            logger.warning("step %d could not be watched: %s", pl_module.step, first_line(error))
        cost = time.process_time() - started
        self._spent += cost
        if is_complete:
            self._looked.append(pl_module.step)
            self._cost = cost

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        global _spent_beyond
        del trainer
        assert isinstance(pl_module, TrainingModule)
        _spent_beyond += max(0.0, self._spent - self._share(pl_module))
        num_steps = len(pl_module.recipe.watched_steps)
        if num_steps and self.findings == Findings():
            logger.info(
                "watched %d of %d points of the training in %.2f s (%.0f %% of its time are "
                "allowed, or %.1f s once): %s",
                *(len(self._looked), num_steps, self._spent, 100 * MOST_TIME, FREE_SECONDS),
                "samples and positions stay independent" if self._looked else "too short for more",
            )

    # --- Time ----------------------------------------------------------------------------------

    def _affordable(self, module: TrainingModule) -> float:
        """The most seconds for a look now, so that steps that are likelier to show more can follow.

        0 until the time of a step is known.
        """
        if self._clock is None or module.step == self._clock[1]:
            return 0.0
        left = max(self._share(module), FREE_SECONDS - _spent_beyond) - self._spent
        steps = module.recipe.watched_steps
        likelier = steps[: steps.index(module.step)]
        return left / (1 + sum(step > module.step for step in likelier))

    def _share(self, module: TrainingModule) -> float:
        """MOST_TIME of the seconds that the whole training takes at its speed so far."""
        if self._clock is None or module.step == self._clock[1]:
            return 0.0
        seconds, first = self._clock
        per_step = (time.perf_counter() - seconds - self._spent) / (module.step - first)
        return MOST_TIME * per_step * module.total_steps

    # --- Looking -------------------------------------------------------------------------------

    def _look(self, module: TrainingModule, affordable: float) -> bool:
        """False if the steps of the window would take more than the affordable seconds."""
        started = time.process_time()
        index = len(self._looked) % module.replicas.num_replicas
        network = expose_branches(module.replicas.replica(index).cpu())
        batches = self._batches(network, module.step)
        still, first = 0, started
        for count in range(WINDOW):
            before, batch = read_state(network), next(batches)
            self._ask(network, batch, count, module.step, training=True)
            _train_once(network, batch)
            after = read_state(network)
            still = still + 1 if all(after[n].equal(old) for n, old in before.items()) else 0
            if still == STILL or not any(self._questions(True)):
                break
            now = time.process_time()
            if count == 0:  # also the copy, and what a first forward sets up
                first = now
            elif count == 1:
                self._cost = now - started + (WINDOW - 2) * (now - first)
                if self._cost > affordable:
                    return False
        self._ask(network, next(batches), 0, module.step, training=False)
        return True

    def _batches(self, network: nn.Module, step: int) -> Iterator[Batch]:
        """Training samples, other ones for each step of a window."""
        data, dtype = self.cell.data, next(network.parameters()).dtype
        draws = generator(self.cell.spec.seeds[0], "watch", step)
        while True:
            indices = torch.randint(len(data.train), (PROBE_SAMPLES,), generator=draws)
            batch = data.train.gather(indices)
            yield batch | {"inputs": data.model_inputs(batch["inputs"], dtype)}

    def _questions(self, training: bool) -> tuple[bool, bool]:
        """Whether samples, and positions, are still to be asked about."""
        traits, findings = self.cell.traits, self.findings
        known = traits.leaks_future_in_training if training else traits.leaks_future
        leak = findings.leak_in_training if training else findings.leak
        return (
            self._asks_samples and findings.mixing is None,
            self._asks_positions and not known and leak is None,
        )

    def _ask(
        self, network: nn.Module, batch: Batch, count: int, step: int, *, training: bool
    ) -> None:
        whole = WholeNetwork(network, batch, self.cell.data.vocab_size)
        samples, positions = self._questions(training)
        if not (samples or positions):
            return
        (probe,) = whole.probes(training)
        mode = "in training" if training else "in evaluation"
        if samples:
            masks = holds(len(batch["targets"]))
            what = _influence(probe, masks[count % len(masks)], count, state=True)
            if what is not None:
                self.findings.mixing = step
                logger.warning(
                    "at step %d a sample depends on other samples %s (they move the %s), which no "
                    "check before the training showed: norm_batch_size has an effect",
                    *(step, mode, what),
                )
        if positions:
            length = batch["inputs"].shape[1]
            cut = cuts(length)[count % len(cuts(length))]
            if _influence(probe, along(torch.arange(length) < cut, 1), count) is not None:
                self._note_leak(step, mode, training=training)
        network.train()

    def _note_leak(self, step: int, mode: str, *, training: bool) -> None:
        if training:
            self.findings.leak_in_training, what = step, "train/loss is meaningless"
        else:
            self.findings.leak, what = step, "every number is marked INVALID"
        logger.warning(
            "at step %d a later position moves an earlier output %s, which no check before the "
            "training showed: %s",
            *(step, mode, what),
        )


def with_findings(cell: Cell, findings: Findings) -> Cell:
    """The cell with the traits that its training has shown."""
    changes: dict[str, Any] = {}
    if findings.mixing is not None:
        changes["mixes_samples"] = True
    if findings.leak_in_training is not None:
        changes["leaks_future_in_training"] = True
    if findings.leak is not None:
        changes["leak"] = f"step {findings.leak} of the training, as not before it"
    traits = replace(cell.traits, **changes)
    description = describe_cell(cell.spec, cell.recipe, cell.build, cell.data, traits)
    return replace(cell, traits=traits, description=cell.description | description)


def withdraw_aliases(cell: Cell) -> None:
    """Tells the history that a norm has mixed samples, for the cell and all that followed it."""
    history, versions = read_history(cell.study_dir), measured_versions()
    followers = [alias.cell for alias in history.aliases.values() if alias.same_as == cell.spec.id]
    append_entries(
        cell.study_dir, [AliasEntry(name, None, versions) for name in (cell.spec.id, *followers)]
    )
    if followers:
        logger.warning(
            "cells that were the same as this one, as it mixed no samples, are missing again: %s",
            ", ".join(followers),
        )


def _influence(probe: Probe, keep: torch.Tensor, count: int, *, state: bool = False) -> str | None:
    """Names a result of the kept samples or positions that all others move."""
    before = probe.observe(upstream=keep)
    return probe.influence(keep, before=before, state=state, first_way=2 * count + 1)


def _train_once(network: nn.Module, batch: Batch) -> None:
    """A forward and a backward, which leave no gradient behind."""
    with fixed_draws():
        output = network.train()(*model_arguments(batch))
        if output.requires_grad:
            output.sum().backward()
    network.zero_grad()
