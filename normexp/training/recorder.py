"""Where the numbers of a training go: the files and trackers of each run, loggers of the stack."""

from __future__ import annotations

import math
import netrc
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pytorch_lightning.loggers import Logger

from normexp.errors import UserError

# Charts of TensorBoard's custom scalars: a title, and the metrics that share the chart.
LAYOUT = {
    "loss": ["train/loss", "val/loss", "test/loss"],
    "accuracy": ["val/accuracy", "test/accuracy"],
    "bits per byte": ["val/bits_per_byte", "test/bits_per_byte"],
    "optimizer": ["train/lr"],
    "gradient": ["train/grad_norm"],
    "speed": ["train/samples_per_second"],
}
Columns = dict[str, list[float]]  # a value per replica, by metric


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, where runs are logged."""

    mode: str  # auto, online, offline or disabled
    project: str
    entity: str | None
    name: str | None  # of runs; None: the id of the cell
    group: str | None  # None: the id of the cell


@dataclass(frozen=True)
class Loggers:
    """Where a training logs besides metrics.csv, and the words that each logger gets."""

    wandb: Wandb | None
    tensorboard: bool
    custom: Callable[[Mapping[str, Any]], Logger] | None  # from names and folders of the run
    is_per_run: bool  # a custom logger for each run, not for the mean of a cell
    names: Mapping[str, str | None]  # study and experiment
    tags: tuple[str, ...]
    notes: str | None


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
        sinks: for each replica, those that get recorded values only.
        trackers: for each replica, those that get recorded and tracked values.
        loggers: Lightning loggers of the whole stack; they get both as means over replicas.
    """

    def __init__(
        self,
        sinks: Sequence[Sequence[RunSink]],
        loggers: Sequence[Logger] = (),
        trackers: Sequence[Sequence[RunSink]] | None = None,
    ) -> None:
        self.trackers = trackers or [[] for _ in sinks]
        self.sinks = [
            [*sinks_of_run, *more] for sinks_of_run, more in zip(sinks, self.trackers, strict=True)
        ]
        self.loggers = loggers

    @property
    def tracks(self) -> bool:
        """True if tracked values have a receiver."""
        return bool(self.loggers) or any(self.trackers)

    def record(self, position: Position, values: Columns) -> None:
        """Records a value per replica for each metric, except those that are not finite."""
        self._pass_on(self.sinks, position, values)

    def track(self, position: Position, values: Columns) -> None:
        """Like `record`, but not into metrics.csv, which a rerun must reproduce."""
        self._pass_on(self.trackers, position, values)

    def _pass_on(
        self, sinks: Sequence[Sequence[RunSink]], position: Position, values: Columns
    ) -> None:
        for index, run_sinks in enumerate(sinks):
            row = _finite({name: column[index] for name, column in values.items()})
            for sink in run_sinks:
                sink.add(position.step, position.epoch, position.samples_seen, row)
        means = _finite({name: finite_mean(column) for name, column in values.items()})
        for logger in self.loggers:
            logger.log_metrics(means, step=position.step)

    def flush(self) -> None:
        """Writes everything recorded so far to disk; called before a checkpoint."""
        for sink in (sink for run_sinks in self.sinks for sink in run_sinks):
            sink.flush()

    def truncate_after(self, step: int) -> None:
        """Removes the rows after `step`, from which training resumes."""
        for sink in (sink for run_sinks in self.sinks for sink in run_sinks):
            sink.truncate_after(step)


def _finite(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if math.isfinite(value)}


def finite_mean(column: Sequence[float]) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = [value for value in column if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


class WandbRun:
    """A sink that logs one run to Weights & Biases.

    Args:
        mode: auto, online, offline or disabled; see `resolve_mode`.
        directory: for W&B's own files.
        id_file: keeps the W&B id of this run, so that a resumed run continues in W&B.
        options: further arguments of wandb.init: project, entity, name, group, tags, notes, config.
    """

    def __init__(self, *, mode: str, directory: Path, id_file: Path, **options: Any) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            mode=resolve_mode(mode),  # type: ignore[arg-type]
            dir=directory,
            id=id_file.read_text(),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
            **options,
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


class LoggerRun:
    """A sink that passes one run to a Lightning logger."""

    def __init__(self, logger: Logger, params: Mapping[str, Any]) -> None:
        self.logger = logger
        logger.log_hyperparams(dict(params))

    def add(self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]) -> None:
        del samples_seen
        self.logger.log_metrics({**metrics, "epoch": epoch}, step=step)

    def flush(self) -> None:
        self.logger.save()

    def truncate_after(self, step: int) -> None:
        """A Lightning logger cannot take rows back: those after the checkpoint appear twice."""

    def finish(self, *, failed: bool) -> None:
        self.logger.finalize("failed" if failed else "success")


def tensorboard(folder: Path, version: str) -> Logger:
    """A TensorBoard logger with the charts of `LAYOUT`, in a folder named after `version`.

    Raises:
        UserError: tensorboard is not installed.
    """
    from pytorch_lightning.loggers import TensorBoardLogger

    if find_spec("tensorboard") is None:
        raise UserError(
            "logger=tensorboard needs the package tensorboard; pip install 'normexp[tensorboard]'"
        )
    tensorboard_logger = TensorBoardLogger(folder, "tensorboard", version, default_hp_metric=False)
    charts = {title: ["Multiline", names] for title, names in LAYOUT.items()}
    tensorboard_logger.experiment.add_custom_scalars({"normexp": charts})
    return tensorboard_logger


def resolve_mode(mode: str) -> str:
    """Resolves `auto` to `online` if W&B would find an API key, else to `offline`.

    The key stands in the environment or in the user's netrc file.
    """
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return "online" if any("wandb" in host for host in hosts) else "offline"
