"""Loggers besides metrics.csv: Weights & Biases, TensorBoard, and any Lightning logger."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger

from normexp.build import build_logger
from normexp.cells.cell import Cell
from normexp.config.place import is_under_agent
from normexp.errors import UserError
from normexp.records.paths import seed_dir
from normexp.records.result import hyperparameters
from normexp.training.recorder import RunSink, resolve_mode

logger = logging.getLogger(__name__)

# Charts of TensorBoard's custom scalars: a title, and the metrics that share the chart.
LAYOUT = {
    "loss": ["train/loss", "val/loss", "test/loss"],
    "accuracy": ["val/accuracy", "test/accuracy"],
    "optimizer": ["train/lr"],
    "gradient": ["train/grad_norm"],
    "speed": ["train/samples_per_second"],
}


class WandbRun:
    """A sink that logs one run to Weights & Biases.

    Args:
        options: `logger.wandb` of the config.
        id_file: keeps the W&B id of this run, so that a resumed run continues in W&B.
    """

    def __init__(self, cell: Cell, seed: int, options: Mapping[str, Any], id_file: Path) -> None:
        import wandb

        config = _params(cell) | {"seed": seed}
        named = [config[key] for key in ("norm", "model", "data", "study", "experiment")]
        marks = [*(cell.cfg.tags or []), *(["INVALID"] if cell.invalid else [])]
        self.mode = resolve_mode(options["mode"])
        if not id_file.is_file():
            id_file.write_text(secrets.token_hex(8))
        self.run = wandb.init(
            project=options["project"],
            entity=options["entity"],
            mode=self.mode,  # type: ignore[arg-type]
            dir=cell.study_dir,
            name=f"{options['name'] or cell.id}/seed-{seed}",
            group=options["group"] or cell.id,  # W&B's grouping shows mean and spread over seeds
            notes=cell.cfg.notes,
            tags=list(dict.fromkeys(str(tag) for tag in (*named, *marks) if tag)),
            config=config,
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


@contextmanager
def run_loggers(cell: Cell, seed: int) -> Iterator[list[RunSink]]:
    """The loggers of one run, which are finished at the end, as failed if the block raises."""
    chosen = cell.cfg.logger
    opened: list[WandbRun | OwnRun] = []
    has_failed = True
    try:
        if "wandb" in chosen and not is_under_agent():
            id_file = seed_dir(cell.directory, seed) / "wandb-id"
            opened.append(WandbRun(cell, seed, chosen.wandb, id_file))
        if "custom" in chosen and chosen.custom.per == "run":
            place = _place(cell, f"seed-{seed}", seed_dir(cell.directory, seed))
            params = _params(cell) | {"seed": seed}
            opened.append(OwnRun(build_logger(cell.cfg, place), params))
        yield list(opened)
        has_failed = False
    finally:
        for run in opened:
            run.finish(failed=has_failed)
        if opened and isinstance(opened[0], WandbRun) and opened[0].mode == "offline":
            logger.info(
                "W&B was offline; upload: wandb sync %s/wandb/offline-run-*", cell.study_dir
            )


def stack_loggers(cell: Cell, seeds: Sequence[int]) -> list[Logger]:
    """The Lightning loggers of a stack, which get the mean over its runs and say so."""
    first, last = seeds[0], seeds[-1]
    version = f"seed-{first}" if first == last else f"mean-of-seeds-{first}-to-{last}"
    params = _params(cell) | {"curves": version.replace("-", " ")}
    opened: list[Logger] = []
    if "tensorboard" in cell.cfg.logger:
        opened.append(_tensorboard(cell, version))
    if "custom" in cell.cfg.logger and cell.cfg.logger.custom.per == "cell":
        opened.append(build_logger(cell.cfg, _place(cell, version, cell.directory)))
        logger.info("logger=custom gets one instance per cell: %s", params["curves"])
    for one in opened:
        one.log_hyperparams(params)
    return opened


def _params(cell: Cell) -> dict[str, Any]:
    cfg = cell.cfg
    return hyperparameters(cell.record, study=cfg.study, experiment=cfg.get("experiment"))


def _place(cell: Cell, version: str, folder: Path) -> dict[str, Any]:
    """What loggers call their run and where they write, by the names of their arguments."""
    return {
        "save_dir": str(folder),
        "name": cell.id,
        "version": version,
        "experiment_name": cell.cfg.study,
        "run_name": f"{cell.id}/{version}",
    }


def _tensorboard(cell: Cell, version: str) -> Logger:
    from pytorch_lightning.loggers import TensorBoardLogger

    if find_spec("tensorboard") is None:
        raise UserError(
            "logger=tensorboard needs the package tensorboard; pip install 'normexp[tensorboard]'"
        )
    own = TensorBoardLogger(cell.directory, "tensorboard", version, default_hp_metric=False)
    charts = {title: ["Multiline", names] for title, names in LAYOUT.items()}
    own.experiment.add_custom_scalars({"normexp": charts})
    return own
