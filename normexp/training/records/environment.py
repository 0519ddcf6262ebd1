"""What a run was computed by: versions, cores, GPUs, the code of normexp."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from normexp.errors import PACKAGE, is_installed
from normexp.training.records.source import digest_of

DISTRIBUTIONS = ("torch", "pytorch-lightning", "torchvision", "numpy", "hydra-core")


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
        **{name: version(name) for name in DISTRIBUTIONS},
        "git_commit": git_commit(),
        "code_version": code_version(),
    }
    return {key: value for key, value in values.items() if value is not None}


@cache
def code_version() -> str:
    """Digest of normexp's own sources: runs with the same digest were made by the same code."""
    return digest_of(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))


@cache
def git_commit() -> str | None:
    """The commit of the checkout that normexp runs from; None for an installed copy."""
    if is_installed(PACKAGE):
        return None  # a checkout around a virtual environment is not normexp's
    return _output_of("git", "-C", str(PACKAGE), "rev-parse", "--verify", "HEAD").strip() or None


def usable_cores() -> int:
    """The number of cores that this process may use, by its affinity and its container's quota."""
    from joblib import cpu_count  # takes a moment

    return cpu_count()


def visible_gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them; none if torch was built without CUDA."""
    if version("torch").endswith("+cpu"):
        return []
    lines = [line for line in _output_of("nvidia-smi", "-L").splitlines() if line[:4] == "GPU "]
    if not lines or (asked := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [str(index) for index in range(len(lines))]
    return [name.strip() for name in asked.split(",") if name.strip() not in ("", "-1")]


def _output_of(*command: str) -> str:
    """What a program prints; empty if it fails or is missing."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return [*names, platform.processor() or platform.machine()][0] or None
