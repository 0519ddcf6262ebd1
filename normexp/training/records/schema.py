"""The number of the form of records: result.json, and each line of study.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from normexp.errors import UserError

SCHEMA = 3
READERS = {1: "0.1", 2: "0.2"}  # the version of normexp that reads an earlier schema


def check_schema(schema: Any, path: Path, study: Path) -> None:
    """Raises UserError unless this normexp reads the schema of a file of a study."""
    if schema in READERS:
        raise UserError(
            f"{study} was trained by normexp {READERS[schema]}, and only that version reads it; "
            "train in a study of its own: study=..."
        )
    if schema != SCHEMA:
        raise UserError(
            f"{path}: schema={schema!r}, this normexp reads schema={SCHEMA}; move the file away"
        )
