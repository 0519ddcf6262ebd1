"""How many workers this machine runs at once, and which cores and GPU each one gets. No torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from normexp.errors import UserError

CGROUP_LIMITS = (  # quota and period in microseconds: cgroups 2, then 1
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


@dataclass(frozen=True)
class Place:
    """What one worker may use: CPU threads, and a GPU as CUDA_VISIBLE_DEVICES names it."""

    threads: int
    gpu: str | None = None

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of the worker; keeps a lower OMP_NUM_THREADS set by the user."""
        asked = inherited.get("OMP_NUM_THREADS", "")
        threads = (
            min(self.threads, int(asked)) if asked.isdecimal() and int(asked) else self.threads
        )
        own = {"OMP_NUM_THREADS": str(threads)}
        if self.gpu is not None:
            own["CUDA_VISIBLE_DEVICES"] = self.gpu
        return {**inherited, **own}


def places_for(
    cfgs: Sequence[DictConfig], num_cells: int, workers: int | None = None
) -> list[Place]:
    """Returns one place per worker; none if the calling process trains.

    Args:
        cfgs: the configs of all cells; they must agree on `workers`.
        num_cells: the highest useful number of workers.
        workers: overrides the configs; None takes their value.
    """
    asked = shared_value(cfgs, "workers") if workers is None else workers
    if asked == 0 or any(needs_whole_machine(cfg) for cfg in cfgs):
        return []
    wants_gpu = any(cfg.trainer.accelerator in ("auto", "gpu", "cuda") for cfg in cfgs)
    gpus = visible_gpus() if wants_gpu else []
    cores = usable_cores()
    count = max(1, min(asked or (len(gpus) or cores), num_cells))
    threads = max(1, cores // count)
    return [Place(threads, gpus[i % len(gpus)] if gpus else None) for i in range(count)]


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


def usable_cores() -> int:
    """The number of cores that this process may use, by its affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    for files in CGROUP_LIMITS:
        try:
            words = " ".join(Path(file).read_text() for file in files).split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max": no limit
            continue
        if quota > 0:
            cores = min(cores, max(1, quota // period))
    return cores


def visible_gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them; none if torch was built without CUDA."""
    try:
        if version("torch").endswith("+cpu"):
            return []
    except PackageNotFoundError:  # built from source
        pass
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        run = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found = [line for line in run.stdout.splitlines() if line.startswith("GPU ")]
    if asked is None:
        return [str(index) for index in range(len(found))]
    return [name.strip() for name in asked.split(",") if name.strip() not in ("", "-1")]
