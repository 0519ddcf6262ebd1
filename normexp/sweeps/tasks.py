"""The tasks of a command, the board on which its workers take them, and the workers' slots.

A task is one cell, or several that may be one stack. A slot is what one worker may use: CPU
threads, and a GPU. Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from normexp.config.spec import CellSpec
from normexp.errors import UserError
from normexp.records.environment import usable_cores, visible_gpus
from normexp.records.files import file_lock

Task = tuple[int, ...]  # indices of cells

# The most runs in a task: on a CPU larger stacks gain little, and a grid of learning rates still
# keeps several workers busy. Counts requested runs, not missing ones, so that after an interruption
# the same command makes the same tasks.
MOST_RUNS = 16


def group_cells(cells: Sequence[CellSpec]) -> list[Task]:
    """Groups cells that differ only in `lr`, and may be stacked; ordered by their first cells."""
    tasks: list[list[int]] = []
    open_tasks: dict[str, list[int]] = {}  # the last task with this shared config
    for index, cell in enumerate(cells):
        shared = _config_without_lr(cell)
        task = open_tasks.get(shared or "")
        if task is not None and _has_room_for([cells[i] for i in task], cell):
            task.append(index)
            continue
        tasks.append([index])
        if shared is not None:
            open_tasks[shared] = tasks[-1]
    return [tuple(task) for task in tasks]


def _has_room_for(task: Sequence[CellSpec], cell: CellSpec) -> bool:
    assert cell.cfg is not None
    rates = [other.cfg.lr for other in task if other.cfg is not None]
    return cell.cfg.lr not in rates and (len(task) + 1) * len(cell.seeds) <= MOST_RUNS


def _config_without_lr(cell: CellSpec) -> str | None:
    """The config without `lr`, equal for cells that may be stacked; None for one that may not."""
    cfg = cell.cfg
    if cfg is None or not isinstance(cfg.lr, int | float) or cfg.lr <= 0:
        return None
    if cfg.get("stack") is False or cfg.get("dry_run") or needs_whole_machine(cfg):
        return None
    if "tensorboard" in (cfg.get("logger") or {}):  # its curves are means over the stack
        return None
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    del plain["lr"]
    return json.dumps([plain, dict(cell.choices)], sort_keys=True, default=str)


OPEN, ENDED = 0, -1  # of a cell; a positive number is the worker that has it


@dataclass
class TaskBoard:
    """Who trains which cell of a command, in memory that its workers share.

    Only spares workers from preparing the same cell: two may take a task at the same instant, and
    then the locks of its cells decide.

    Attributes:
        holders: of each cell: OPEN, ENDED, or the number of the worker that has it.
        is_alone: of each cell: 1 once it has become a task of its own.
    """

    tasks: Sequence[Task]
    holders: MutableSequence[int]
    is_alone: MutableSequence[int]

    def open_tasks(self) -> list[Task]:
        alone = [[(i,) for i in task] if self.is_alone[task[0]] else [task] for task in self.tasks]
        return [part for parts in alone for part in parts if self.holders[part[0]] == OPEN]

    def take(self, worker: int, busy: Collection[Task]) -> Task | None:
        """Gives the worker the first open task that is not busy; None if there is none."""
        task = next((task for task in self.open_tasks() if task not in busy), None)
        self._mark(task or (), worker)
        return task

    def put_back(self, task: Task, *, alone: bool) -> None:
        """Reopens a task; if `alone`, as one task per cell."""
        for index in task:
            self.is_alone[index] |= alone
        self._mark(task, OPEN)

    def end(self, task: Task) -> None:
        self._mark(task, ENDED)

    def taken_by(self, worker: int) -> Task:
        return tuple(i for i, holder in enumerate(self.holders) if holder == worker)

    @property
    def num_open(self) -> int:
        """The number of open cells (not tasks)."""
        return sum(holder == OPEN for holder in self.holders)

    def _mark(self, task: Task, state: int) -> None:
        for index in task:
            self.holders[index] = state


# --- Slots ----------------------------------------------------------------------------------------

_own_gpu: str | None = None  # the GPU that this process has trained on


@dataclass(frozen=True)
class WorkerSlot:
    """What one worker may use: CPU threads, and a GPU as CUDA_VISIBLE_DEVICES names it.

    Attributes:
        locks: names of lock files. A worker holds one while it trains. All commands of a user
            share them, so that two terminals do not train on one core.
    """

    threads: int
    gpu: str | None = None
    locks: Sequence[str] = ()

    def environment(self) -> AbstractContextManager[None]:
        """Sets the variables that a process started inside the block needs before it loads torch.

        Keeps a lower OMP_NUM_THREADS set by the user.
        """
        asked = os.environ.get("OMP_NUM_THREADS", "")
        is_set = asked.isdecimal() and int(asked)
        threads = min(self.threads, int(asked)) if is_set else self.threads
        own = {"OMP_NUM_THREADS": str(threads)}
        if self.gpu is not None:
            own["CUDA_VISIBLE_DEVICES"] = self.gpu
        return environment(own)

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Holds one of the locks inside the block; yields False, at once, if none is free."""
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()  # emptied at boot
        folder = Path(base) / f"normexp-{os.getuid()}"
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            locks = (held.enter_context(file_lock(folder / name)) for name in self.locks)
            yield not self.locks or any(locks)

    def is_taken(self) -> bool:
        """True if other workers hold all locks."""
        with self.claim() as is_free:
            return not is_free


@contextmanager
def environment(own: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables inside the block."""
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]
        os.environ.update(before)


def worker_slots(
    cfgs: Sequence[DictConfig], num_cells: int, workers: int | None = None
) -> tuple[list[WorkerSlot], int]:
    """The slots for training, and the number of workers; 0 if this process trains.

    There are more slots than workers if GPUs outnumber cells. `workers` overrides the configs.
    """
    asked = shared_value(cfgs, "workers") if workers is None else workers
    is_whole = any(needs_whole_machine(cfg) for cfg in cfgs)
    wants_gpu = any(cfg.trainer.accelerator in ("auto", "gpu", "cuda") for cfg in cfgs)
    gpus = visible_gpus() if wants_gpu else []
    cores = usable_cores()
    count = max(1, min(asked or (len(gpus) or cores), num_cells))
    num_workers = 0 if num_cells == 1 or asked == 0 or is_whole else count
    if num_workers and getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise UserError(
            f"workers={num_workers}: worker processes import the program that starts them, and one "
            "on stdin cannot be imported; save it as a file, or set workers=0"
        )
    threads = max(1, cores // count)
    if not gpus:
        locks = [f"core-{i}" for i in range(max(cores, count))]
        return [WorkerSlot(threads, None, locks)] * count, num_workers
    # Several workers share a GPU only if the command asks for more workers than GPUs.
    shares = -(-count // len(gpus))
    slots_of = {gpu: [f"gpu-{gpu}-{i}" for i in range(shares)] for gpu in gpus}
    if is_whole:  # must see all GPUs; the lock of the first stands for all
        return [WorkerSlot(threads, None, slots_of[gpus[0]])], num_workers
    in_turn = islice(cycle(gpus), max(count, len(gpus)))
    return [WorkerSlot(threads, gpu, slots_of[gpu]) for gpu in in_turn], num_workers


@contextmanager
def own_slot(slots: Sequence[WorkerSlot]) -> Iterator[WorkerSlot]:
    """The slot of this process: the first free one, else the first. Hides all other GPUs.

    A process keeps the GPU on which it has initialized CUDA.
    """
    global _own_gpu
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        slots = [slot for slot in slots if slot.gpu == _own_gpu] or slots[:1]
    slot = next((each for each in slots if not each.is_taken()), slots[0])
    _own_gpu = slot.gpu
    with environment({} if slot.gpu is None else {"CUDA_VISIBLE_DEVICES": slot.gpu}):
        yield slot


def shared_value(cfgs: Sequence[DictConfig], key: str) -> Any:
    """Returns a value that all cells of a command must share; None without a cell.

    Raises:
        UserError: the value varies.
    """
    values = list(dict.fromkeys(cfg[key] for cfg in cfgs))
    if len(values) > 1:
        raise UserError(f"{key}={','.join(map(str, values))}: must be the same in all cells")
    return values[0] if values else None


def needs_whole_machine(cfg: DictConfig) -> bool:
    """True if a cell is trained by several processes, one for each device."""
    return cfg.trainer.get("devices", 1) not in (1, "1") or cfg.trainer.get("num_nodes", 1) != 1
