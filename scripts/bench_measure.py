"""Alternating measurements, and the rows of the benchmark's table."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parents[1]
Times = Mapping[str, list[float]]


@dataclass(frozen=True)
class Bench:
    """How much to measure, a folder for temporary files, and one for files to keep.

    smoke: GPU rows are measured on the CPU, as small as can be
    """

    quick: bool
    folder: Path
    smoke: bool = False
    out: Path | None = None

    def rounds(self, full: int, quick: int = 3) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Row:
    """One line of the table; a value without an aim is reported and not judged."""

    what: str
    against: str
    value: float | None  # None: not measured, `note` says why
    aim: float | None = None
    sense: Literal["<=", ">="] = "<="
    unit: str = "x"
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None or self.aim is None:
            return None
        return self.value <= self.aim if self.sense == "<=" else self.value >= self.aim

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3g}{self.unit}"
        aim = "" if self.aim is None else f"(aim {self.sense} {self.aim:g}{self.unit})"
        verdict = {True: "met", False: "MISSED", None: "-"}[self.met]
        note = f"  # {self.note}" if self.note else ""
        return f"{self.what} | {self.against} | {value} {aim} {verdict}{note}"


def alternate(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round, after a warm-up; every second round runs in reverse.

    An arm returns its own time, so that it can leave out its preparation.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(1 + rounds):
        for name in list(arms) if index % 2 == 0 else list(arms)[::-1]:
            seconds = arms[name]()
            if index > 0:
                times[name].append(seconds)
    return times


def ratio(times: Times, above: str, below: str) -> float:
    """Median over the rounds of above / below."""
    return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))


def milliseconds(times: Times, *names: str) -> str:
    """The median of each arm, for a note."""
    return ", ".join(f"{name} {1000 * statistics.median(times[name]):.3g} ms" for name in names)


def timed(run: Callable[[], object], repeats: int = 1) -> Callable[[], float]:
    """An arm: seconds of one call, the mean over `repeats`."""

    def arm() -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started) / repeats

    return arm


def run_python(*arguments: str, expected: int = 0) -> tuple[float, str]:
    """Wall seconds of a Python process in the repository, and what it printed.

    Shows its errors if its exit code is not the expected one.
    """
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if done.returncode != expected:
        sys.stderr.write(done.stderr)
    return time.perf_counter() - started, done.stdout
