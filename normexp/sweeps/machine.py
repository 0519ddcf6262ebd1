"""How many workers this machine runs at once, and which cores and GPU each one gets. No torch."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from normexp.errors import UserError
from normexp.records.environment import usable_cores, visible_gpus
from normexp.records.files import FileLock

_own_gpu: str | None = None  # that this process has trained on


@dataclass(frozen=True)
class Place:
    """What one worker may use: CPU threads, and a GPU as CUDA_VISIBLE_DEVICES names it.

    Attributes:
        slots: names of locks; the worker holds one while it trains. All commands of a user share
            them, so that two terminals do not train on one core.
    """

    threads: int
    gpu: str | None = None
    slots: Sequence[str] = ()

    def environment(self) -> AbstractContextManager[None]:
        """What a process that is started inside the block inherits, before it loads torch.

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
    def slot(self) -> Iterator[bool]:
        """Holds one of the slots inside the block; yields False, at once, if none is free."""
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()  # no reboot keeps it
        folder = Path(base) / f"normexp-{os.getuid()}"
        folder.mkdir(parents=True, exist_ok=True)
        locks = [FileLock(folder / name) for name in self.slots]
        has_slot = not locks or any(lock.acquire() for lock in locks)
        try:
            yield has_slot
        finally:
            for lock in locks:
                lock.release()

    def is_taken(self) -> bool:
        """True if other workers hold all slots."""
        with self.slot() as has_slot:
            return not has_slot


@contextmanager
def environment(own: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment inside the block."""
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]
        os.environ.update(before)


def places_for(
    cfgs: Sequence[DictConfig], num_cells: int, workers: int | None = None
) -> tuple[list[Place], int]:
    """The places where cells may be trained, and the number of workers: 0 for this process.

    There are more places than workers if GPUs outnumber cells; `workers` overrides the configs.
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
        slots = [f"core-{i}" for i in range(max(cores, count))]
        return [Place(threads, None, slots)] * count, num_workers
    # Several workers share a GPU only where a command asks for that.
    shares = -(-count // len(gpus))
    slots_of = {gpu: [f"gpu-{gpu}-{i}" for i in range(shares)] for gpu in gpus}
    if is_whole:  # it needs to see all GPUs, and the slot of the first stands for them
        return [Place(threads, None, slots_of[gpus[0]])], num_workers
    in_turn = islice(cycle(gpus), max(count, len(gpus)))
    return [Place(threads, gpu, slots_of[gpu]) for gpu in in_turn], num_workers


@contextmanager
def own_place(places: Sequence[Place]) -> Iterator[Place]:
    """The place of this process: the first that is free, else the first; it sees no other GPU.

    A process keeps the GPU on which CUDA has started.
    """
    global _own_gpu
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        places = [place for place in places if place.gpu == _own_gpu] or places[:1]
    place = next((each for each in places if not each.is_taken()), places[0])
    _own_gpu = place.gpu
    with environment({} if place.gpu is None else {"CUDA_VISIBLE_DEVICES": place.gpu}):
        yield place


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
