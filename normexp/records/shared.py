"""Stacks of several cells of a study: runs/<study>/stacks/<digest>/, with members.json in each.

A stack is named after its members, so that its checkpoint fits no other. Whoever trains it holds
the locks of all its cells; so whoever holds one of them knows that it is not being trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from normexp.errors import UserError
from normexp.records.layout import CHECKPOINT_FILE, MEMBERS_FILE
from normexp.records.reader import read_json
from normexp.records.writer import write_json

Member = tuple[str, int]  # cell id and seed


def shared_dir(study_dir: Path, members: Iterable[Member]) -> Path:
    """The directory of a stack of these runs, in this order."""
    text = json.dumps([list(member) for member in members])
    return study_dir / "stacks" / hashlib.sha256(text.encode()).hexdigest()[:16]


def write_members(stack_dir: Path, members: Iterable[Member]) -> None:
    """Who trains in a stack; before it has a checkpoint."""
    write_json(stack_dir / MEMBERS_FILE, {"members": [list(member) for member in members]})


def interrupted_stacks(study_dir: Path) -> Iterator[tuple[Path, list[Member]]]:
    """The stacks of several cells that have a checkpoint, by name, with their members.

    Raises:
        UserError: a members.json that cannot be read.
    """
    for checkpoint in sorted(study_dir.glob(f"stacks/*/{CHECKPOINT_FILE}")):
        path = checkpoint.parent / MEMBERS_FILE
        try:
            members = [(str(cell_id), int(seed)) for cell_id, seed in read_json(path)["members"]]
        except (UserError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} cannot be read; remove its folder and run again") from error
        yield checkpoint.parent, members
