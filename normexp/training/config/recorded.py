"""The cell of a folder, from its config.yaml and one of its results. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from normexp.errors import UserError, one_line
from normexp.training.config.groups import (
    OPTIONAL_GROUPS,
    PARTS,
    shipped_config,
    shipped_defaults,
)
from normexp.training.config.identity import OPTIM_SCHEDULE
from normexp.training.config.keys import with_values
from normexp.training.config.spec import CellSpec
from normexp.training.records.layout import CONFIG_FILE
from normexp.training.records.result import Result


def recorded_spec(cell_dir: Path, result: Result, changes: Mapping[str, Any]) -> CellSpec:
    """The cell of a folder.

    Args:
        result: of one of its runs.
        changes: values in place of those in its config.yaml.

    Raises:
        UserError: a torn or foreign file.
    """
    path = cell_dir / CONFIG_FILE
    try:
        values = with_values(yaml.safe_load(path.read_text(encoding="utf-8")), changes)
        assert all(values[part] for part in (*PARTS, "trainer"))
    except (yaml.YAMLError, AssertionError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({one_line(error)}); remove the cell's folder and train it "
            "again"
        ) from error
    values = {**shipped_config(), **values}  # a key may have been added since
    choices = choices_of(result)
    for group in set(PARTS) - changes.keys():  # a class may have moved since, a key been added
        if shipped := shipped_defaults(group, choices[group]):
            removed = {key for key in shipped if f"~{key}" in result.defines.get(group, {})}
            added = {key: value for key, value in shipped.items() if key not in removed}
            values[group] = {**added, **values[group], "_target_": shipped["_target_"]}
    return CellSpec(values, choices)


def choices_of(result: Result) -> dict[str, str]:
    """The choice in each config group of a recorded cell, as `compose_cell` returned them."""
    groups = [group for group in (*PARTS, *OPTIONAL_GROUPS) if group in result.settings]
    choices = {
        group: result.defines.get(group, {}).get("choice", result.settings[group])
        for group in groups
    }
    shipped_schedule = result.settings.get("optim.schedule", OPTIM_SCHEDULE["schedule"])
    return {"schedule": shipped_schedule, **choices}
