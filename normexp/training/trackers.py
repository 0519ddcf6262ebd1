"""Loggers of trackers: one run of theirs per run of ours, also after a resume.

The environment of a tracker wins over what is shipped, and what is typed wins over both.
"""

from __future__ import annotations

import logging
import netrc
import os
import secrets
import ssl
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from pytorch_lightning.loggers import Logger, MLFlowLogger, WandbLogger

from normexp.errors import UserError, one_line
from normexp.training.config.target import Target
from normexp.training.records.layout import WANDB_ID_FILE

logger = logging.getLogger(__name__)

SECONDS_TO_REACH = 10  # a tracker
LONGEST_REASON = 300  # characters
SECONDS_UNTIL_RETRY = 600.0  # after which one that was not reached is tried again


class Trackers:
    """The trackers that a process logs to; one that has just failed is left alone for a while."""

    def __init__(self) -> None:
        self._lost: dict[str, float] = {}  # when a tracker was not reached, by its key

    def loggers(self, targets: Sequence[Target], available: Mapping[str, Any]) -> list[Logger]:
        """New loggers of one run; a training goes on if one fails.

        Args:
            targets: what they are, with keys such as `logger.wandb`.
            available: names and folders of the run, passed where a signature has an argument of
                that name and the config does not set it.
        """
        loggers = list[Logger]()
        for target in targets:
            folder = f"{available['save_dir']}/{target.key.removeprefix('logger.')}"
            target = target.filled_in({**available, "save_dir": folder})
            loggers.append(Guarded(target.key, partial(target.make, Logger), self))
        return loggers

    def lose(self, key: str) -> None:
        self._lost[key] = time.monotonic()

    def is_lost(self, key: str) -> bool:
        """True for a tracker that has just failed: each try may take long."""
        return key in self._lost and time.monotonic() - self._lost[key] < SECONDS_UNTIL_RETRY


class Guarded(Logger):
    """A logger that costs a warning when it fails, and never the training.

    Args:
        key: of the config, as `logger.mlflow`.
        make: returns the logger.
        trackers: is told of a failure.
    """

    def __init__(self, key: str, make: Callable[[], Logger], trackers: Trackers) -> None:
        self.key = key
        self.trackers = trackers
        self.logger: Logger | None = None
        if not trackers.is_lost(key):
            self.logger = self._try(make)

    def _try(self, act: Callable[..., Any], *args: Any) -> Any:
        try:
            return act(*args)
        except Exception as error:  # trackers raise many kinds, and users' own any
            self.trackers.lose(self.key)
            reason = f"{self.key} fails: {one_line(error)}"
            if isinstance(error, UserError):  # which names the key
                reason = str(error)
            reason = textwrap.shorten(reason, LONGEST_REASON, placeholder=" ...")
            logger.warning("%s; training goes on without it, metrics.csv has everything", reason)
            self.logger = None

    @property
    def name(self) -> str | None:
        return self.key

    @property
    def version(self) -> None:
        return None

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.logger is not None:
            self._try(self.logger.log_metrics, metrics, step)

    def log_hyperparams(self, params: dict[str, Any]) -> None:  # type: ignore[override]
        if self.logger is not None:
            self._try(self.logger.log_hyperparams, params)

    def finalize(self, status: str) -> None:
        if self.logger is not None:
            self._try(self.logger.finalize, status)


# --- Weights & Biases -----------------------------------------------------------------------------


class WandbRunLogger(WandbLogger):
    """A WandbLogger that ends its W&B run, which the next run of the process would else join."""

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.experiment.finish(exit_code=int(status != "success"))


def wandb_logger(
    *,
    save_dir: str,
    run_dir: str,
    name: str,
    version: str,
    labels: Sequence[str],
    notes: str | None,
    project: str | None = None,
    entity: str | None = None,
    group: str | None = None,
    offline: bool | None = None,
) -> WandbLogger:
    """Logs a run to a W&B run of its own; without a way to W&B, to an offline run.

    Args:
        save_dir: beside W&B's own files, unless WANDB_DIR is set.
        run_dir: keeps the W&B id of the run, so that a resumed run continues in W&B.
        name, version: of the cell and the seed.
        project: None: WANDB_PROJECT, otherwise normexp.
        group: None: WANDB_RUN_GROUP, otherwise `name`, since W&B's grouping shows mean and spread
            over seeds.
        offline: None: WANDB_MODE, otherwise true if W&B would find no API key.
    """
    import wandb

    settings = wandb.setup().settings  # of its files, and of the environment when it began

    def said(name: str) -> Any:
        return os.environ.get(f"WANDB_{name.upper()}") or getattr(settings, name)

    mode: Any = {"dryrun": "offline", "run": "online"}.get(said("mode"), said("mode"))
    if offline is not None:
        mode = "offline" if offline else "online"
    elif mode == "online" and not os.environ.get("WANDB_MODE") and is_logged_out(said("base_url")):
        mode = "offline"
    if mode == "online" and (reason := why_out_of_reach(said("base_url"))):
        logger.warning("W&B cannot be reached: %s", reason)
        mode = "offline"
    folder = Path(os.environ.get("WANDB_DIR") or Path(save_dir).parent)
    options: dict[str, Any] = {
        "project": project or said("project") or "normexp",
        "entity": entity or said("entity"),
        "group": group or said("run_group") or name,
        "name": f"{name}/{version}",
        "tags": labels,
        "notes": notes,
        "dir": folder,  # to which it adds a folder wandb
        "reinit": "create_new",
        "settings": wandb.Settings(silent=True, console="off"),
    }
    if mode != "disabled":
        folder.mkdir(parents=True, exist_ok=True)
        id_file = Path(run_dir, WANDB_ID_FILE)
        own_id = id_file.read_text() if id_file.is_file() else secrets.token_hex(8)
        options |= {"id": own_id, "resume": "allow"}
    run = wandb.init(mode=mode, **options)
    if mode != "disabled":
        _keep(Path(run_dir, WANDB_ID_FILE), run.id)  # inside the agent of a sweep, the agent's
    if mode == "offline":
        logger.info(
            "W&B is offline; upload its runs later: wandb sync %s/wandb/offline-run-*", folder
        )
    return WandbRunLogger(experiment=run)


def why_out_of_reach(url: str) -> str:
    """Why nothing answers there; empty if something does, if only with a refusal."""
    try:
        urlopen(url, timeout=SECONDS_TO_REACH).close()
    except HTTPError:
        return ""
    except OSError as error:  # W&B has certificates of its own
        reason = getattr(error, "reason", error)
        return "" if isinstance(reason, ssl.SSLError) else f"{url}: {reason}"
    return ""


def is_logged_out(base_url: str) -> bool:
    """True if W&B would find no API key: not in the environment, nor in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return False
    try:
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return True
    return not any("wandb" in host or host == urlsplit(base_url).hostname for host in hosts)


# --- MLflow ---------------------------------------------------------------------------------------


def mlflow_logger(
    *,
    save_dir: str,
    run_dir: str,
    run_name: str,
    tracking_uri: str | None = None,
    experiment_name: str | None = None,
    artifact_location: str | None = None,
    tags: dict[str, Any] | None = None,
) -> MLFlowLogger:
    """Logs a run to an MLflow run of its own.

    Args:
        save_dir: in the folder of the study.
        run_dir: keeps the MLflow id of the run, so that a resumed run continues.
        tracking_uri: None: MLFLOW_TRACKING_URI, otherwise mlflow.db beside the studies.
        experiment_name: None: MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, otherwise the study.
        tags: also name the run MLFLOW_RUN_ID as the parent, since each seed has a run of its own.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # of 7, which take minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(SECONDS_TO_REACH))
    study_dir, id_file = Path(save_dir).parent, Path(run_dir, "mlflow-id")
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    uri = uri or f"sqlite:///{study_dir.parent}/mlflow.db"
    experiment_name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if not experiment_name and (experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID")):
        client = import_module("mlflow").MlflowClient(uri)
        experiment_name = client.get_experiment(experiment_id).name
    if parent := os.environ.get("MLFLOW_RUN_ID"):
        tags = {"mlflow.parentRunId": parent, **(tags or {})}
    options: dict[str, Any] = {
        "tracking_uri": uri,
        "experiment_name": experiment_name or study_dir.name,
        "run_name": run_name,
        "artifact_location": artifact_location,
        "tags": tags,
    }
    if id_file.is_file():
        known = MLFlowLogger(run_id=id_file.read_text(), **options)
        with suppress(Exception):  # MLflow's own kind: that run is not of this server
            known.experiment.update_run(str(known.run_id), status="RUNNING")
            return known
    made = MLFlowLogger(**options)
    _keep(id_file, str(made.run_id))
    return made


def _keep(file: Path, content: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
