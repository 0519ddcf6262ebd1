"""Describes where a result was computed: versions, a digest of the code, cores and GPUs."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import textwrap
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from normexp.records.sources import digest_of_package, is_installed

PACKAGE = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ("normexp", "torch", "pytorch-lightning", "torchvision", "numpy", "hydra-core")

CGROUP_LIMITS = (  # quota and period in microseconds: cgroups 2, then 1
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def describe_environment(gpu: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Returns plain values for result.json; unknown ones are absent.

    Args:
        gpu: its name; an argument because this package does not import torch.
        threads: CPU threads of the training.
    """
    values = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_count": usable_cores(),
        "gpu": gpu,
        "threads": threads,
        **{name: _version(name) for name in DISTRIBUTIONS},
        "git_commit": git_commit(),
        "code_version": code_version(),
    }
    return {key: value for key, value in values.items() if value is not None}


@cache
def code_version() -> str:
    """Digest of normexp's own sources: runs with the same digest were made by the same code."""
    return digest_of_package(PACKAGE)


@cache
def git_commit() -> str | None:
    """The commit of the checkout that normexp runs from; None for an installed copy."""
    if is_installed(PACKAGE):
        return None  # a checkout around a virtual environment is not normexp's
    # Inside a git hook, GIT_DIR names another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(PACKAGE), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or None


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
    if (_version("torch") or "").endswith("+cpu"):  # None if built from source
        return []
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        run = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line for line in run.stdout.splitlines() if line.startswith("GPU ")]
    if asked is None:
        return [str(index) for index in range(len(lines))]
    return [name.strip() for name in asked.split(",") if name.strip() not in ("", "-1")]


def command_of(process: int) -> tuple[int, str]:
    """The process of the command that a process belongs to, its parent for a worker, and its words.

    No words where the system does not tell, as without /proc.
    """
    try:
        folder = Path("/proc") / str(process)
        words = [word for word in (folder / "cmdline").read_text().split("\0") if word]
        if any("multiprocessing" in word for word in words):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            return command_of(int(parent))
    except (OSError, ValueError, IndexError):
        return process, ""
    words[:1] = [Path(word).name for word in words[:1]]
    return process, textwrap.shorten(shlex.join(words), 120, placeholder=" ...")
