"""What a cell of the page opens: its runs, their curves, its config, and the command for it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from normexp.errors import UserError
from normexp.records.history import History, read_history
from normexp.records.metrics import MetricRow, read_metrics
from normexp.records.paths import METRICS_FILE
from normexp.reporting.charts import CONFIG, ROWS
from normexp.reporting.frame import config_columns, metric_names, plain_rows
from normexp.reporting.metric import choose_metric, describe_metric
from normexp.reporting.tables import show

MOST_POINTS = 40  # of the curve of one run
DIGITS = 5  # of the values of a curve
RUN_COLUMNS = ["seed", "status", "diverged_at_step", "steps", "stopped", "error"]
# Keys of the typed command that say where, when and how often; this cell has its own.
NOT_REPEATED = ("tune", "hydra", "dry_run", "workers", "seed", "replicas", "study", "runs_dir")


def cell_details(cells: pd.DataFrame, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """For each cell, in order, the data that the page shows when it is opened."""
    histories: dict[Path, History] = {}
    for study in {Path(cell).parent for cell in cells["cell"]}:
        histories[study] = History()
        with suppress(UserError):  # a report does not depend on the history
            histories[study] = read_history(study)
    by_cell = dict(list(runs.groupby("cell", sort=False)))
    return [_detail(Path(cell), by_cell[cell], histories) for cell in cells["cell"]]


def _detail(cell: Path, runs: pd.DataFrame, histories: dict[Path, History]) -> dict[str, Any]:
    names = metric_names(runs)
    shown = runs[[*RUN_COLUMNS, *names]].dropna(axis="columns", how="all")
    config, environment = runs[config_columns(runs)], runs.filter(regex=r"^environment\.")
    selected = describe_metric(choose_metric(names, None) or "val/loss").selection_name
    return {
        "directory": str(cell),
        "command": repeat_command(histories[cell.parent], cell, sorted(runs["seed"])),
        "columns": [
            name.replace("_", " ").replace("@", " @").replace("/", "/\u200b")
            for name in map(str, shown)
        ],
        "runs": shown.map(show).to_numpy().tolist(),
        "curves": _curves(runs, ["train/loss", selected]),
        "config": _values(config),
        "environment": {key.partition(".")[2]: text for key, text in _values(environment).items()},
    }


def _values(table: pd.DataFrame) -> dict[str, str]:
    """Each key with its values in any row, without those that are not recorded."""
    found = {
        key: [show(x) for x in table[key].dropna().unique()] for key in sorted(map(str, table))
    }
    return {key: ", ".join(texts) for key, texts in found.items() if texts}


def _curves(runs: pd.DataFrame, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """For each metric the curve of each seed that recorded it, thinned, the last point kept."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in plain_rows(runs, ["seed", "directory"]):
        history: list[MetricRow] = []
        with suppress(UserError):  # a torn file does not fail the report
            history = read_metrics(Path(run["directory"]) / METRICS_FILE)
        for metric in map(describe_metric, dict.fromkeys(names)):
            own = [x for x in history if x.name == metric.name and math.isfinite(x.value)]
            every = math.ceil(len(own) / MOST_POINTS)
            rows = (
                [
                    {
                        "seed": run["seed"],
                        "samples": x.samples_seen,
                        "value": metric.scale * x.value,
                    }
                    for x in own[(len(own) - 1) % every :: every]
                ]
                if own
                else []
            )
            if rows:
                found.setdefault(metric.label, []).extend(rows)
    for rows in found.values():
        for row in rows:
            row["value"] = float(f"{row['value']:.{DIGITS}g}")
    return found


def repeat_command(history: History, cell: Path, seeds: Sequence[int]) -> str:
    """The command that trains the cell again, or finds it recorded; empty if none is known.

    That is the command that asked for it, with the values of this cell where it named several.
    """
    known = [(digest, one) for digest, one in history.cells.items() if one.cell_id == cell.name]
    asked = [
        (entry.command, one.title)
        for digest, one in known
        for entry in history.commands
        if digest in entry.cells
    ]
    if not asked:
        return ""
    typed, title = asked[-1]
    own = re.split(r" (?=[+~]*[\w./@]+=)", title)
    keys = {_key(word) for word in own}
    kept = [
        word
        for word in typed[1:]
        if word not in ("-m", "--multirun")
        and _key(word) not in keys
        and _key(word).partition(".")[0] not in NOT_REPEATED
    ]
    place = [f"study={cell.parent.name}"]
    place += [] if cell.parent.parent == Path("runs") else [f"runs_dir={cell.parent.parent}"]
    count = [f"seed={seeds[0]}", f"replicas={len(seeds)}"]
    return f"python -m normexp.train {shlex.join([*kept, *own, *place, *count])}"


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def seed_chart() -> dict[str, Any]:
    """The chart of one metric of a cell, a line per seed; the page fills in rows and label."""
    x = alt.X("samples:Q", title="training samples seen").axis(format="~s", tickCount=5)
    y = alt.Y("value:Q").scale(zero=False)
    colour = alt.Color("seed:N").scale(scheme="tableau10").legend(orient="right", columns=1)
    tip = [alt.Tooltip("seed:N"), alt.Tooltip("samples:Q"), alt.Tooltip("value:Q")]
    line = alt.Chart(ROWS).mark_line(strokeWidth=1.2, point=alt.OverlayMarkDef(size=12))
    chart = line.encode(x, y, colour, tooltip=tip).properties(width=300, height=180)
    return chart.to_dict(validate=False) | {"config": CONFIG, "usermeta": {"fit": "width"}}
