"""What this machine offers: slots for workers, and processes for devices. Imports no torch."""

from __future__ import annotations

import gc
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from multiprocessing import current_process
from pathlib import Path
from shlex import join

from rich.console import Console

from normexp.errors import UserError
from normexp.training.config.spec import CellSpec, shared_value
from normexp.training.records.environment import usable_cores, visible_gpus
from normexp.training.records.locks import file_lock, holder_of, other_holders, this_user


@dataclass(frozen=True)
class WorkerSlot:
    """What one worker may use: the CPUs, and a GPU as CUDA_VISIBLE_DEVICES names it.

    Attributes:
        locks: names of the lock files of the GPU. A worker holds one while it trains. All commands
            of a user share the files, so that two terminals do not train on one GPU.
        waits: True to train only while holding a lock; False to train beside other commands.
    """

    gpu: str | None = None
    locks: Sequence[str] = ()
    waits: bool = False

    def hide_other_gpus(self) -> None:
        """Sets CUDA_VISIBLE_DEVICES; has no effect once torch is loaded."""
        if self.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu

    @contextmanager
    def claim(self) -> Iterator[bool]:
        """Holds one of the locks inside the block; yields False if all are taken and it `waits`."""
        with ExitStack() as held:
            locks = (held.enter_context(file_lock(path)) for path in self.paths())
            yield any(locks) or not self.waits

    def is_in_use(self) -> bool:
        return all(map(holder_of, self.paths()))

    def paths(self) -> list[Path]:
        """The lock files; on a CPU one of this process, by which other commands count it."""
        return [_lock_folder() / name for name in self.locks or [f"cpu-{os.getpid()}"]]


def _lock_folder() -> Path:
    """A folder of this user that is emptied at boot; the temporary one if the session's is not."""
    name = f"normexp-{this_user()}"
    session = os.environ.get("XDG_RUNTIME_DIR", "")  # may be another user's, or of another machine
    if os.path.isabs(session):
        folder = Path(session, name)
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    folder = Path(tempfile.gettempdir(), name)
    folder.mkdir(exist_ok=True)
    return folder


def other_trainings() -> int:
    """The number of trainings of this user's other commands that run on this machine now."""
    return len(other_holders(_lock_folder().iterdir()))


def worker_slots(
    cells: Sequence[CellSpec], workers: int | None = None
) -> tuple[list[WorkerSlot], int]:
    """The slots for training, and the largest number of workers; 0 if this process trains all.

    There are more slots than workers if a command asks for fewer workers than GPUs.

    Args:
        workers: overrides the configs; 0 does not wait for other commands.
    """
    if workers is None:
        workers = shared_value(cells, "workers")
    accelerators = {cell.settings.trainer.accelerator for cell in cells if not cell.error}
    gpus = visible_gpus() if accelerators & {"auto", "gpu", "cuda"} else []
    count = workers or len(gpus) or usable_cores()
    is_one_of_many = started_processes()[1] > 1
    # A process of a Pool, say, may not start any; on Windows, a worker could not be interrupted.
    has_no_children = current_process().daemon or not hasattr(os, "setsid")
    num_workers = 0 if workers == 0 or is_one_of_many or has_no_children else count
    if not gpus:
        return [WorkerSlot()] * count, num_workers
    # Several workers share a GPU only if the command asks for more workers than GPUs.
    num_shares = math.ceil(count / len(gpus))
    slots = []
    for gpu in islice(cycle(gpus), max(count, len(gpus))):
        locks = [f"gpu-{gpu}-{share}" for share in range(num_shares)]
        slots.append(WorkerSlot(gpu, locks, waits=workers != 0))
    if is_one_of_many:  # torchrun or srun gives each process its GPU
        slots = [replace(slot, gpu=None) for slot in slots]
    return slots, num_workers


@contextmanager
def importing_torch() -> Iterator[None]:
    """Shows on a terminal that torch is imported, and lets its idle threads sleep.

    By default idle threads spin, and keep a busy core from the thread that they wait for. On four
    cores with a load of 12, a step of the convnet for MNIST-5k took 3.5 s on four threads that
    spin, 0.06 s on four that sleep and 0.013 s on one (medians, n = 3). No result depends on it.

    No garbage is looked for meanwhile, since what is imported stays. That spares 0.5 of 10 s of
    core time of a command of 20 steps (n = 2).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
    for name, value in os.environ.copy().items():
        # Lightning reads ranks when it is imported, and fails on one that is no number.
        if name.endswith(("RANK", "_PROCID")) and not value.isdecimal():
            del os.environ[name]
    # In a notebook, tqdm and rich ask for widgets.
    warnings.filterwarnings("ignore", "IProgress not found|install .ipywidgets")
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        with console_for_progress().status("importing torch"):
            yield
    finally:
        if collects_garbage:
            gc.enable()


def console_for_progress() -> Console:
    """Standard error, redrawn on a terminal alone: neither in a notebook nor in a log."""
    return Console(
        stderr=True,
        highlight=False,
        emoji=False,
        force_terminal=sys.stderr.isatty(),
        force_jupyter=False,
    )


# --- Several devices for one cell -----------------------------------------------------------------

# What torchrun and srun tell each process that they start: their number, and its index. (A batch
# script and an interactive job have SLURM_NTASKS too, but nothing has started their tasks.)
VARIABLES = (("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))


def started_processes() -> tuple[int, int]:
    """The rank of this process, and how many torchrun or srun has started; (0, 1) without them."""
    for names in VARIABLES:
        size, index = (os.environ.get(name, "") for name in names)
        if size.isdigit() and index.isdigit():
            return int(index), int(size)
    return 0, 1


def check_processes(cells: Sequence[CellSpec], words: Sequence[str]) -> int | None:
    """The rank of this process; None if it is alone.

    Raises:
        UserError: torchrun or srun has not started a process for each device of the only cell.
    """
    rank, started = started_processes()
    for cell in cells:
        if cell.error:
            continue
        trainer = cell.settings.trainer
        devices, num_nodes = trainer.devices, trainer.num_nodes
        remedy = "drop torchrun or srun"
        if trainer.num_processes > 1:
            command = f"torchrun --nnodes {num_nodes} --nproc-per-node {devices} -m normexp.train"
            remedy = f"type {command} {join(words[1:])}"
        if trainer.num_processes != started:
            raise UserError(
                f"trainer.devices={devices}, trainer.num_nodes={num_nodes}: needs as many "
                f"processes, and this command has {started}; {remedy}"
            )
    if started > 1 and len(cells) > 1:
        raise UserError(f"{len(cells)} cells in one torchrun or srun: start one cell each")
    return rank if started > 1 else None
