"""Saves the panels for normexp's runs as a view of a W&B project.

    pip install wandb-workspaces
    python scripts/wandb_layout.py --entity ME [--project normexp]

The runs are grouped by norm and norm batch size, so that a curve is the mean over the seeds of one
setting, against the samples seen. Needs a login at W&B.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from normexp.training.recorder import LAYOUT

GROUPS = ("norm", "norm_batch_size")


def layout(entity: str, project: str) -> Any:
    """The view, not yet saved: a section for each chart of `LAYOUT`, a panel for each metric."""
    from wandb_workspaces import workspaces
    from wandb_workspaces.reports.v2 import LinePlot

    sections = [
        workspaces.Section(
            name=title,
            is_open=True,
            panels=[LinePlot(title=name, x="samples_seen", y=[name]) for name in names],
        )
        for title, names in LAYOUT.items()
    ]
    groups = [workspaces.Config(key) for key in GROUPS]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="normexp",
        sections=sections,
        runset_settings=workspaces.RunsetSettings(groupby=groups),
    )


def main() -> int:
    """Exit code: 0, or 2 if the package is missing or W&B refuses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--entity", required=True, help="user or team name at W&B")
    parser.add_argument("--project", default="normexp")
    options = parser.parse_args()
    try:
        view = layout(options.entity, options.project)
        view.save()
    except ImportError:
        print("wandb_layout: needs the package; pip install wandb-workspaces", file=sys.stderr)
        return 2
    except Exception as error:  # of W&B's client, any kind
        print(f"wandb_layout: {options.entity}/{options.project}: {error}", file=sys.stderr)
        return 2
    print(view.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
