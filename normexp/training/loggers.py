"""Loggers of a training: sinks for one run each, and TensorBoard for a stack."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


class WandbRun:
    """A sink that logs one run to Weights & Biases.

    Args:
        mode: auto, online, offline or disabled; see `resolve_mode`.
        directory: for W&B's own files.
        id_file: keeps the W&B id of this run, so that a resumed run continues in W&B.
        config: the run's hyperparameters.
        names: further arguments of wandb.init: project, entity, name, group, notes.
    """

    def __init__(
        self,
        *,
        mode: str,
        directory: Path,
        id_file: Path,
        tags: Sequence[str],
        config: Mapping[str, Any],
        **names: Any,
    ) -> None:
        import wandb

        directory.mkdir(parents=True, exist_ok=True)
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            mode=resolve_mode(mode),  # type: ignore[arg-type]
            dir=directory,
            tags=list(tags),
            config=dict(config),
            id=id_file.read_text(),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
            **names,
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


class OwnRun:
    """A sink that passes one run to a Lightning logger."""

    def __init__(self, own: Logger, params: Mapping[str, Any]) -> None:
        self.own = own
        own.log_hyperparams(dict(params))

    def add(self, step: int, epoch: int, samples_seen: int, metrics: Mapping[str, float]) -> None:
        del samples_seen
        self.own.log_metrics({**metrics, "epoch": epoch}, step=step)

    def flush(self) -> None:
        self.own.save()

    def truncate_after(self, step: int) -> None:
        """A Lightning logger cannot take rows back: those after the checkpoint appear twice."""

    def finish(self, *, failed: bool) -> None:
        self.own.finalize("failed" if failed else "success")


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
    own = TensorBoardLogger(folder, "tensorboard", version, default_hp_metric=False)
    charts = {title: ["Multiline", names] for title, names in LAYOUT.items()}
    own.experiment.add_custom_scalars({"normexp": charts})
    return own


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
