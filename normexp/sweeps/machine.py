"""The slots of a machine: what one worker may use, CPU threads and a GPU. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from normexp.config.cells import CellSpec
from normexp.errors import UserError
from normexp.records.files import file_lock
from normexp.records.provenance import usable_cores, visible_gpus


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

    def variables(self) -> dict[str, str]:
        """Those that a process needs before it loads torch; a lower OMP_NUM_THREADS stays."""
        asked = os.environ.get("OMP_NUM_THREADS", "")
        threads = min(self.threads, int(asked) if asked.isdecimal() else self.threads)
        gpu = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}
        return {"OMP_NUM_THREADS": str(max(threads, 1)), **gpu}

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Holds one of the locks inside the block; yields False, at once, if it must wait."""
        with ExitStack() as held:
            locks = (held.enter_context(file_lock(path)) for path in self.paths())
            yield not self.locks or any(locks) or not self.waits

    def is_free(self) -> bool:
        with self.claim() as is_free:
            return is_free

    def paths(self) -> list[Path]:
        """The lock files."""
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()  # emptied at boot
        folder = Path(base) / f"normexp-{os.getuid()}"
        folder.mkdir(parents=True, exist_ok=True)
        return [folder / name for name in self.locks]


def worker_slots(
    cells: Sequence[CellSpec], workers: int | None = None
) -> tuple[list[WorkerSlot], int]:
    """The slots for training, and the number of workers; 0 if this process trains.

    There are more slots than workers if GPUs outnumber cells. `workers` overrides the configs; 0
    does not wait for other commands.
    """
    asked = shared_value(cells, "workers") if workers is None else workers
    waits = asked != 0
    trainers = [cell.config["trainer"] for cell in cells]
    wants_gpu = any(trainer["accelerator"] in ("auto", "gpu", "cuda") for trainer in trainers)
    gpus = visible_gpus() if wants_gpu else []
    cores = usable_cores()
    count = max(1, min(asked or (len(gpus) or cores), len(cells)))
    num_workers = 0 if len(cells) == 1 or asked == 0 else count
    threads = max(1, cores // count)
    if not gpus:
        locks = [f"core-{i}" for i in range(max(cores, count))]
        return [WorkerSlot(threads, None, locks, waits)] * count, num_workers
    # Several workers share a GPU only if the command asks for more workers than GPUs.
    shares = -(-count // len(gpus))
    slots = [
        WorkerSlot(threads, gpu, [f"gpu-{gpu}-{i}" for i in range(shares)], waits)
        for gpu in islice(cycle(gpus), max(count, len(gpus)))
    ]
    if any(trainer["devices"] != 1 for trainer in trainers):  # of torchrun, which places them
        slots = [WorkerSlot(threads, None, slots[0].locks, waits)]
    return slots, num_workers


@contextmanager
def importing_torch() -> Iterator[None]:
    """Shows on a terminal that torch is imported, and lets its idle threads sleep.

    By default they spin while they wait for each other, and keep a busy core from the thread that
    they wait for. On four cores with a load of 12, a step of the convnet for MNIST-5k took 3.5 s on
    four threads that spin, 0.06 s on four that sleep and 0.013 s on one (medians, n = 3). No result
    depends on it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    with Console(stderr=True).status("importing torch"):
        yield


def own_slot(slots: Sequence[WorkerSlot]) -> WorkerSlot:
    """The slot of this process: the first free one, else the first. Hides all other GPUs."""
    slot = next((slot for slot in slots if slot.is_free()), slots[0])
    if slot.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot.gpu
    return slot


def shared_value(cells: Sequence[CellSpec], key: str) -> Any:
    """The value that all cells of a command must share; None without cells.

    Raises:
        UserError: the value varies.
    """
    values = list(dict.fromkeys(cell.config[key] for cell in cells))
    if len(values) > 1:
        raise UserError(f"{key}={','.join(map(str, values))}: must be the same in all cells")
    return values[0] if values else None
