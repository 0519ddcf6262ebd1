"""Trainings to kill, and what must hold of a study whenever that happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from normexp.records.history import read_history
from normexp.records.metrics import read_metrics


class WarmTrainings:
    """Processes that train, begun by one that has imported everything already."""

    def __init__(self, log: Path) -> None:
        self.log = log
        script = Path(__file__).with_name("warm_train.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == "ready"

    def begin(self, words: list[str]) -> int:
        return int(self._ask(words))

    def wait(self, pid: int) -> int:
        return int(self._ask(pid))

    def run(self, words: list[str]) -> int:
        return self.wait(self.begin(words))

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def _ask(self, message: Any) -> str:
        assert self.process.stdin is not None
        print(json.dumps(message), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def numbers_of(study: Path) -> dict[str, tuple[bytes, str]]:
    """The metrics of every run, in all their bytes: the file of its history, and its result."""
    numbers = {}
    for path in sorted(study.glob("*/seed-*/result.json")):
        result = json.loads(path.read_text())
        kept = {key: result.get(key) for key in ("status", "metrics", "diverged_at_step", "config")}
        history = (path.parent / "metrics.csv").read_bytes()
        numbers[str(path.parent.relative_to(study))] = (history, json.dumps(kept))
    return numbers


def ended_runs(study: Path) -> dict[Path, tuple[int, int]]:
    """Identity of every result.json: one that was written anew has another."""
    ended = {}
    for path in study.glob("*/seed-*/result.json"):
        found = path.stat()
        ended[path] = (found.st_ino, found.st_mtime_ns)
    return ended


def check_nothing_torn(study: Path) -> None:
    """Every file that a reader may open is whole."""
    for path in study.glob("*/seed-*/result.json"):
        if json.loads(path.read_text())["status"] == "finished":
            torch.load(path.parent / "weights.pt", weights_only=True)
    for path in study.glob("**/stacks/*/ended.json"):
        assert json.loads(path.read_text())["results"]
    for path in study.glob("**/stacks/*/last.ckpt"):
        assert torch.load(path, weights_only=True)["normexp"]
    for path in study.glob("*/seed-*/metrics.csv"):
        read_metrics(path)
    if study.is_dir():
        read_history(study)
