"""Alternating measurements, and the rows of the benchmark's table."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
Sense = Literal["<=", ">="]


@dataclass(frozen=True)
class Bench:
    """How much to measure, and where to leave temporary files."""

    quick: bool
    folder: Path

    def rounds(self, full: int, quick: int = 3) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Row:
    """One line of the table; without an aim the value is stated and not judged."""

    what: str
    against: str
    value: float | None  # None: not measured, `note` says why
    aim: float | None = None
    sense: Sense = "<="
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None or self.aim is None:
            return None
        return self.value <= self.aim if self.sense == "<=" else self.value >= self.aim

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3g}{self.unit}"
        aim = "" if self.aim is None else f"(aim {self.sense} {self.aim:g}{self.unit})"
        verdict = {True: "met", False: "MISSED", None: "-"}[self.met]
        note = f"  # {self.note}" if self.note else ""
        return f"{self.what} | {self.against} | {value} {aim} {verdict}{note}"


def alternate(
    arms: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each arm, called in turn; every second round in the reverse order.

    Args:
        arms: each returns its own time, so that it can leave out its preparation.
        warm_up: rounds whose times are thrown away.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(warm_up + rounds):
        names = list(arms) if index % 2 == 0 else list(arms)[::-1]
        for name in names:
            seconds = arms[name]()
            if index >= warm_up:
                times[name].append(seconds)
    return times


def ratio(times: Mapping[str, list[float]], above: str, below: str) -> float:
    """Median over the rounds of above / below."""
    return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))


def milliseconds(times: Mapping[str, list[float]], name: str) -> str:
    return f"{1000 * statistics.median(times[name]):.3g} ms"


def timed(run: Callable[[], object], repeats: int = 1) -> Callable[[], float]:
    """An arm: seconds of one call, the mean over `repeats`."""

    def arm() -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started) / repeats

    return arm


def describe_machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("pytorch-lightning"),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def run_python(*arguments: str) -> tuple[float, str]:
    """Wall seconds of a Python process in the repository, and what it printed."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return time.perf_counter() - started, done.stdout
