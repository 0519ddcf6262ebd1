"""Records metrics: metrics.csv and W&B get the rows of each run, Lightning's loggers the mean."""

from __future__ import annotations

import math
import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pytorch_lightning.loggers import Logger


@dataclass(frozen=True)
class Position:
    """A position in training; `step` counts optimizer steps done."""

    step: int
    epoch: int
    samples_seen: int


class RunSink(Protocol):
    """Takes the rows of one run, like `records.MetricsWriter`."""

    def add(
        self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]
    ) -> None: ...
    def flush(self) -> None: ...
    def truncate_after(self, step: int) -> None: ...


class Recorder:
    """Passes each run's values to its sinks, and the mean over the stack to Lightning's loggers.

    Args:
        sinks: of each replica's run.
        loggers: Lightning loggers of the whole stack.
    """

    def __init__(self, sinks: Sequence[Sequence[RunSink]], loggers: Sequence[Logger] = ()) -> None:
        self.sinks = sinks
        self.loggers = loggers

    def record(self, position: Position, values: dict[str, list[float]]) -> None:
        """Records a number per replica by metric; leaves out what is not finite."""
        for index, run_sinks in enumerate(self.sinks):
            row = {name: column[index] for name, column in values.items()}
            finite = {name: value for name, value in row.items() if math.isfinite(value)}
            for sink in run_sinks:
                sink.add(position.step, position.epoch, position.samples_seen, finite)
        means = {name: finite_mean(column) for name, column in values.items()}
        present = {name: mean for name, mean in means.items() if mean is not None}
        for logger in self.loggers:
            logger.log_metrics(present, step=position.step)

    def flush(self) -> None:
        """Writes everything recorded so far to disk; called before a checkpoint."""
        for sink in (sink for run_sinks in self.sinks for sink in run_sinks):
            sink.flush()

    def truncate_after(self, step: int) -> None:
        """Removes the rows after `step`, from which training resumes."""
        for sink in (sink for run_sinks in self.sinks for sink in run_sinks):
            sink.truncate_after(step)


def finite_mean(column: Sequence[float]) -> float | None:
    """Returns the mean of the finite values; None if there are none."""
    finite = [value for value in column if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


class WandbRun:
    """A sink that logs one run to Weights & Biases.

    Args:
        mode: auto, online, offline or disabled; see `resolve_mode`.
        directory: for W&B's own files.
        group: the cell, so that W&B's grouping shows mean and spread over seeds.
        id_file: keeps the W&B id of this run, so that a resumed run continues in W&B.
    """

    def __init__(
        self,
        *,
        project: str,
        entity: str | None,
        mode: str,
        directory: Path,
        group: str,
        seed: int,
        id_file: Path,
        tags: list[str],
        config: Mapping[str, Any],
    ) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        self.mode = resolve_mode(mode)
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            project=project,
            entity=entity,
            mode=self.mode,  # type: ignore[arg-type]
            dir=directory,
            name=f"{group}/seed-{seed}",
            group=group,
            tags=tags,
            config=dict(config),
            id=id_file.read_text(),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def add(self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]) -> None:
        self.run.log({**metrics, "epoch": epoch, "samples_seen": samples_seen}, step=step)

    def flush(self) -> None:
        """W&B writes on its own."""

    def truncate_after(self, step: int) -> None:
        """W&B itself ignores a second value of a step, so nothing needs removing."""

    def finish(self, *, failed: bool) -> None:
        """Ends the run; otherwise W&B would merge the next run of this process into it."""
        self.run.finish(exit_code=1 if failed else 0)


def resolve_mode(mode: str) -> str:
    """Resolves `auto` to `online` if there is a login, else to `offline`."""
    if mode != "auto":
        return mode
    return "online" if has_login() else "offline"


def has_login() -> bool:
    """True if W&B would find an API key, in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)
