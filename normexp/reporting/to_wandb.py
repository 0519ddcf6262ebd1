"""A written report in Weights & Biases: one run of the study, beside its runs of cells."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normexp.errors import UserError
from normexp.reporting.report import Report
from normexp.reporting.table import Table, show


@dataclass(frozen=True)
class WandbTarget:
    """Where a study's own runs went: the project, and a team or user, or the login's own."""

    project: str
    entity: str | None


def log_to_wandb(report: Report, target: WandbTarget) -> str:
    """Logs figures, main table and verdict of a written report; returns where they are, in words.

    The run has the job type `report` and the study as its group. Each call is a run of its own,
    online where a login is there, unless WANDB_MODE says otherwise.

    Raises:
        UserError: W&B refuses, as without a network; the report itself stands.
    """
    import wandb

    from normexp.training.recorder import resolve_mode

    mode = resolve_mode(os.environ.get("WANDB_MODE", "auto"))
    try:
        run = wandb.init(
            project=target.project,
            entity=target.entity,
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


def _content(report: Report) -> dict[str, Any]:
    import wandb

    main = report.tables[0]
    images = {
        f"figures/{figure.name}": wandb.Image(
            str(report.directory / "figures" / f"{figure.name}.png"), caption=figure.caption
        )
        for section in report.sections
        for figure in section.figures
    }
    tables = {
        f"tables/{main.name}": _wandb_table(main),
        "tables/verdict": _wandb_table(_verdict(report)),
    }
    return tables | images


def _verdict(report: Report) -> Table:
    rows = [
        {"setting": verdict.heading, "kind": one.kind, "text": one.text}
        for verdict in report.verdicts
        for one in [*verdict.losses, *verdict.comparisons]
    ]
    return Table("verdict", "Verdict", ["setting", "kind", "text"], rows)


def _wandb_table(table: Table) -> Any:
    """All as text: W&B wants one type per column, and a norm batch size may be `any`."""
    import wandb

    rows: list[Any] = [[show(row.get(column)) for column in table.columns] for row in table.rows]
    return wandb.Table(columns=list(table.columns), data=rows)
