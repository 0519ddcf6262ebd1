"""How much of the code a command passes through: numbers that may only fall."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from normexp.report import main as report
from normexp.train import main as train

ROOT = Path(__file__).parents[1] / "normexp"
STEP = "training/module.py:training_step"
NORM = "norms/sample.py:normalize"
CO_OPTIMIZED = 1  # set for functions, and not for bodies of modules and classes


class Journey:
    """The functions of normexp that run between two places, `file:function`; None: all."""

    def __init__(self, start: str | None = None, stop: str | None = None) -> None:
        self.start, self.stop = start, stop
        self.passed: dict[str, None] = {}
        self.has_begun, self.has_ended = start is None, False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.has_ended or event not in ("call", "return"):
            return
        if not code.co_filename.startswith(str(ROOT)):
            return
        place = f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_name}"
        if event == "return":
            self.has_ended = self.start is not None and place == self.start
            return
        if code.co_name.startswith("<") or not code.co_flags & CO_OPTIMIZED:
            return
        self.has_begun = self.has_begun or place == self.start
        if self.has_begun:
            self.passed[place] = None
        if STEP in self.passed and place == self.stop:
            self.has_ended = True

    @contextmanager
    def followed(self) -> Iterator[None]:
        before = sys.getprofile()
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def size(self) -> tuple[int, int]:
        """Files and functions."""
        return len({place.partition(":")[0] for place in self.passed}), len(self.passed)


# What was reached, and a few more, since machines differ; lower a number where a change makes its
# journey shorter.
FROZEN = {
    "norm=group to its norm": (66, 432),  # with the probes of its network
    "an optimizer step": (14, 50),
    "a sweep to its records": (76, 565),  # with what a user's norm declares
    "records to a report": (40, 284),  # with loops and confirmations
}


@pytest.mark.slow
def test_no_journey_has_become_longer(tmp_path: Path):
    common = ["trainer=cpu", "workers=0", f"runs_dir={tmp_path}", "replicas=2", "steps=2"]
    one = ["norm=group", *common]
    sweep = ["-m", "norm=batch,group", "norm_batch_size=2,8", "study=s", *common]
    acts: dict[str, tuple[Journey, Callable[[], int]]] = {
        "norm=group to its norm": (Journey(stop=NORM), lambda: train([*one, "study=a"])),
        "an optimizer step": (Journey(start=STEP), lambda: train([*one, "study=b"])),
        "a sweep to its records": (Journey(), lambda: train(sweep)),
        "records to a report": (Journey(), lambda: report(["study=s", f"runs_dir={tmp_path}"])),
    }
    assert train([*one, "study=imports"]) == 0  # imports are no journey
    sizes = {}
    for name, (journey, act) in acts.items():
        with journey.followed():
            assert act() == 0
        sizes[name] = journey.size
    assert sizes.keys() == FROZEN.keys()
    longer = {
        name: size
        for name, size in sizes.items()
        if max(reached - frozen for reached, frozen in zip(size, FROZEN[name], strict=True)) > 0
    }
    assert not longer, f"frozen: {FROZEN}"
