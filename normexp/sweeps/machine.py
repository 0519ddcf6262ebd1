"""The slots of a machine: what one worker may use, CPU threads and a GPU. Imports no torch."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from normexp.config.cells import CellSpec
from normexp.errors import UserError
from normexp.records.environment import command_of, usable_cores, visible_gpus
from normexp.records.files import file_lock, holder_of

_own_gpu: str | None = None  # the GPU that this process has trained on


@dataclass(frozen=True)
class WorkerSlot:
    """What one worker may use: CPU threads, and a GPU as CUDA_VISIBLE_DEVICES names it.

    Attributes:
        locks: names of lock files. A worker holds one while it trains. All commands of a user
            share them, so that two terminals do not train on one core.
        waits: train only while holding a lock; False: also beside other commands.
    """

    threads: int
    gpu: str | None = None
    locks: Sequence[str] = ()
    waits: bool = True

    def environment(self) -> AbstractContextManager[None]:
        """Sets the variables that a process started inside the block needs before it loads torch.

        Keeps a lower OMP_NUM_THREADS set by the user.
        """
        asked = os.environ.get("OMP_NUM_THREADS", "")
        is_set = asked.isdecimal() and int(asked)
        threads = min(self.threads, int(asked)) if is_set else self.threads
        variables = {"OMP_NUM_THREADS": str(threads)}
        if self.gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpu
        return environment(variables)

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Holds one of the locks inside the block; yields False, at once, if it must wait."""
        with self._hold() as is_free:
            yield is_free or not self.waits

    def is_taken(self) -> bool:
        """True if other workers hold all locks."""
        with self._hold() as is_free:
            return not is_free

    def commands(self) -> list[str]:
        """The other commands that hold locks: `python -m normexp.train ... (process 12)`."""
        holders = (holder_of(_lock_folder() / name) for name in self.locks)
        known = dict(command_of(holder) for holder in holders if holder is not None)
        return [
            f"{words} (process {process})" if words else f"process {process}"
            for process, words in sorted(known.items())
            if process not in (os.getpid(), os.getppid())  # a worker's parent is its command
        ]

    @contextmanager
    def _hold(self) -> Iterator[bool]:
        with ExitStack() as held:
            paths = (_lock_folder() / name for name in self.locks)
            locks = (held.enter_context(file_lock(path)) for path in paths)
            yield not self.locks or any(locks)


def _lock_folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()  # emptied at boot
    folder = Path(base) / f"normexp-{os.getuid()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables inside the block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def worker_slots(
    cells: Sequence[CellSpec], workers: int | None = None
) -> tuple[list[WorkerSlot], int]:
    """The slots for training, and the number of workers; 0 if this process trains.

    There are more slots than workers if GPUs outnumber cells. `workers` overrides the configs; 0
    does not wait for other commands.
    """
    asked = shared_value(cells, "workers") if workers is None else workers
    waits = asked != 0
    trainers = [cell.config["trainer"] for cell in cells if cell.config is not None]
    is_whole = any(needs_whole_machine(trainer) for trainer in trainers)
    wants_gpu = any(trainer["accelerator"] in ("auto", "gpu", "cuda") for trainer in trainers)
    gpus = visible_gpus() if wants_gpu else []
    cores = usable_cores()
    count = max(1, min(asked or (len(gpus) or cores), len(cells)))
    num_workers = 0 if len(cells) == 1 or asked == 0 or is_whole else count
    if num_workers and getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise UserError(
            f"workers={num_workers}: worker processes import the program that starts them, and one "
            "on stdin cannot be imported; save it as a file, or set workers=0"
        )
    threads = max(1, cores // count)
    if not gpus:
        locks = [f"core-{i}" for i in range(max(cores, count))]
        return [WorkerSlot(threads, None, locks, waits)] * count, num_workers
    # Several workers share a GPU only if the command asks for more workers than GPUs.
    shares = -(-count // len(gpus))
    slots_of = {gpu: [f"gpu-{gpu}-{i}" for i in range(shares)] for gpu in gpus}
    if is_whole:  # must see all GPUs; the lock of the first stands for all
        return [WorkerSlot(threads, None, slots_of[gpus[0]], waits)], num_workers
    in_turn = islice(cycle(gpus), max(count, len(gpus)))
    return [WorkerSlot(threads, gpu, slots_of[gpu], waits) for gpu in in_turn], num_workers


@contextmanager
def own_slot(slots: Sequence[WorkerSlot]) -> Iterator[WorkerSlot]:
    """The slot of this process: the first free one, else the first. Hides all other GPUs.

    A process keeps the GPU on which it has initialized CUDA.
    """
    global _own_gpu
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        slots = [slot for slot in slots if slot.gpu == _own_gpu] or slots[:1]
    slot = next((slot for slot in slots if not slot.is_taken()), slots[0])
    _own_gpu = slot.gpu
    with environment({} if slot.gpu is None else {"CUDA_VISIBLE_DEVICES": slot.gpu}):
        yield slot


def shared_value(cells: Sequence[CellSpec], key: str) -> Any:
    """The value that all cells of a command must share; None if none of them composes.

    Raises:
        UserError: the value varies.
    """
    values = list(dict.fromkeys(cell.config[key] for cell in cells if cell.config))
    if len(values) > 1:
        raise UserError(f"{key}={','.join(map(str, values))}: must be the same in all cells")
    return values[0] if values else None


def needs_whole_machine(trainer: Mapping[str, Any]) -> bool:
    """True if a cell with these values of `trainer` has a process for each of several devices."""
    return trainer.get("devices", 1) not in (1, "1") or trainer.get("num_nodes", 1) != 1
