"""Which runs are trained together: members.json, in the folder of their stack.

Written before step 1 and removed when the last member has its result. A command that claims a
member in between trains all of them together again, so that interruptions never change a run's
numbers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from normexp.errors import UserError
from normexp.records.files import read_json, write_json
from normexp.records.paths import (
    CHECKPOINT_FILE,
    MEMBERS_FILE,
    PROGRESS_FILE,
    seed_dir,
    subfolders,
)
from normexp.records.result import Status, read_if_ended

Member = tuple[str, int]  # cell id and seed


@dataclass(frozen=True)
class StackRecord:
    """The runs of a stack that has begun.

    Attributes:
        id: names the stack in the history; a later stack in the same folder has another.
        rates: the `lr` of each cell, the only key in which the cells of a stack differ.
        apart: why a run is trained apart from its former stack; None for a stack as planned.
        attempts: of a stack of one: how often its run had failed before.
    """

    directory: Path
    id: str
    members: Sequence[Member]
    rates: Mapping[str, float]
    apart: str | None = None
    attempts: int = 0

    @property
    def checkpoint(self) -> Path:
        return self.directory / CHECKPOINT_FILE

    @property
    def resumes_at(self) -> str:
        """`resumes at step 268 of 2400`; empty without a checkpoint."""
        try:
            progress = read_json(self.directory / PROGRESS_FILE)
        except (OSError, UserError):
            return ""
        words = f"resumes at step {progress.get('step')} of {progress.get('total_steps')}"
        return words if self.checkpoint.is_file() else ""

    @property
    def checkpointed_at(self) -> int:
        """When the checkpoint was written, in ns; 0 without one."""
        try:
            return self.checkpoint.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def has_ended(self, study_dir: Path, member: Member) -> bool:
        """True if a member has its result of this stack, not of an earlier attempt."""
        result = read_if_ended(seed_dir(study_dir / member[0], member[1]))
        if result is None:
            return False
        return result.status != Status.FAILED or result.attempts > self.attempts


def begin_stack(
    study_dir: Path,
    members: Sequence[Member],
    rates: Mapping[str, float],
    *,
    apart: str | None = None,
    attempts: int = 0,
) -> StackRecord:
    """Writes the members of a new stack. The caller must hold the locks of its cells."""
    directory = directory_of(study_dir, members)
    directory.mkdir(parents=True, exist_ok=True)
    record = StackRecord(directory, secrets.token_hex(8), members, rates, apart, attempts)
    content = {key: value for key, value in asdict(record).items() if key != "directory"}
    write_json(directory / MEMBERS_FILE, content)
    return record


def end_stack(record: StackRecord) -> None:
    """Removes what a stack needs only while it runs. Its log stays."""
    record.checkpoint.unlink(missing_ok=True)
    (record.directory / PROGRESS_FILE).unlink(missing_ok=True)
    (record.directory / MEMBERS_FILE).unlink(missing_ok=True)


def directory_of(study_dir: Path, members: Sequence[Member]) -> Path:
    """The folder of a stack: in its cell, or in the study if it spans several."""
    cell_ids = {cell_id for cell_id, _ in members}
    if len(cell_ids) == 1:
        seeds = sorted(seed for _, seed in members)
        return study_dir / cell_ids.pop() / "stacks" / f"{seeds[0]}-{seeds[-1]}"
    text = json.dumps([list(member) for member in members])
    return study_dir / "stacks" / hashlib.sha256(text.encode()).hexdigest()[:16]


def list_stacks(study_dir: Path, cell_ids: Iterable[str]) -> list[StackRecord]:
    """The stacks with members in these cells that have begun and not ended; ignores copied ones.

    Raises:
        UserError: a members.json that cannot be read.
    """
    cell_ids = set(cell_ids)
    folders = [study_dir, *(study_dir / cell_id for cell_id in sorted(cell_ids))]
    paths = [path / MEMBERS_FILE for folder in folders for path in subfolders(folder / "stacks")]
    records = [record for path in paths if (record := _read(path)) is not None]
    return [
        record
        for record in records
        if cell_ids & {cell_id for cell_id, _ in record.members}
        and record.directory == directory_of(study_dir, record.members)
    ]


def _read(path: Path) -> StackRecord | None:
    """None if another process has just ended the stack."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["members"] = [(str(cell_id), int(seed)) for cell_id, seed in content["members"]]
        return StackRecord(path.parent, **content)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read; remove its folder and run again") from error
