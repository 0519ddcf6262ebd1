"""What a sweep's process and its workers say to each other, pickled over a pipe."""

from __future__ import annotations

from dataclasses import dataclass

from normexp.config.spec import Outcome


@dataclass(frozen=True)
class Stop:
    """To a worker: leave a checkpoint and end. The pipe's end, as it closes, says the same."""


@dataclass(frozen=True)
class Ready:
    """From a worker: everything is imported."""


@dataclass(frozen=True)
class Begins:
    """From a worker: the cell at this position of its task starts to train."""

    position: int
    begun: Outcome


@dataclass(frozen=True)
class Steps:
    """From a worker: optimizer steps done of the stack that it trains."""

    done: int
    total: int


@dataclass(frozen=True)
class Note:
    """From a worker: a line of normexp's own log."""

    level: int
    text: str


@dataclass(frozen=True)
class Ended:
    """From a worker: its task has ended; one that is `spent` takes no other.

    outcomes: of each cell, in the order of the task.
    """

    outcomes: list[Outcome]
    spent: bool
