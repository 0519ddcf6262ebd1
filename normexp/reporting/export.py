"""A written report in Weights & Biases: one run in the project of the study's own runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from normexp.errors import UserError
from normexp.records.paths import CONFIG_FILE
from normexp.reporting.report import Report

DEFAULT_PROJECT = "normexp"  # as in conf/logger/wandb.yaml


def log_to_wandb(report: Report) -> str:
    """Logs figures, main table and verdict of a written report; returns a line saying where.

    The run has the job type `report` and the study as its group. Each call is a new run, online if
    logged in, unless WANDB_MODE says otherwise.

    Raises:
        UserError: W&B refuses, as without a network; the report itself stands.
    """
    import wandb

    from normexp.training.recorder import resolve_mode

    project, entity = find_project(Path(cell) for cell in report.cells["cell"])
    mode = resolve_mode(os.environ.get("WANDB_MODE", "auto"))
    try:
        run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,  # type: ignore[arg-type]
            dir=report.directory.parent,
            name=f"{report.title}/report",
            group=report.title,
            job_type="report",
            tags=["report"],
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.log(_content(report))
        run.finish()
    except wandb.Error as error:
        raise UserError(f"log=wandb: {error}; try WANDB_MODE=offline") from error
    if mode == "offline":
        return f"W&B was offline; send the report later: wandb sync {Path(run.dir).parent}"
    return f"W&B: {run.url or mode}"


def find_project(cell_dirs: Iterable[Path]) -> tuple[str, str | None]:
    """Project and entity of the first cell trained with logger=wandb, else the default project.

    Skips a config.yaml that cannot be read, because the report does not need it.
    """
    for cell_dir in cell_dirs:
        try:
            config = yaml.safe_load((cell_dir / CONFIG_FILE).read_text(encoding="utf-8"))
            chosen = config["logger"]["wandb"]
            return chosen["project"], chosen.get("entity")
        except (OSError, yaml.YAMLError, KeyError, TypeError):
            continue
    return DEFAULT_PROJECT, None


def _content(report: Report) -> dict[str, Any]:
    """Tables as text: W&B wants one type per column, and a norm batch size may be `any`."""
    import wandb

    main, folder = report.main_table, report.directory / "figures"
    rows: list[Any] = main.texts()
    verdict: list[Any] = [
        [section.answer.heading, one.kind, one.text]
        for section in report.sections
        for one in section.answer.sentences
    ]
    images = {
        f"figures/{figure.name}": wandb.Image(
            str(folder / f"{figure.name}.png"), caption=figure.caption
        )
        for figure in report.figures
    }
    return images | {
        f"tables/{main.name}": wandb.Table(columns=list(main.columns), data=rows),
        "tables/verdict": wandb.Table(columns=["setting", "kind", "text"], data=verdict),
    }
