"""Shared by all tests."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from normexp.training.records import source as user_sources

# Tests run on small tensors, where more threads only wait; read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for more threads than there are cores, those that wait sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What commands print does not depend on the terminal of the tests.
os.environ.pop("COLUMNS", None)

# Trainings of other test runs on this machine are not waited for.
gc.disable()  # until all tests are imported
SLOTS = os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="normexp-tests-")


# Lightning reads the metadata of every installed package for each Trainer.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)


def pytest_collection_finish() -> None:
    """Garbage is collected during the tests alone, and never among what was imported."""
    gc.freeze()
    gc.enable()
    torch = sys.modules.get("torch")
    # It would keep each seed, with a traceback, for an accelerator that may be used later.
    for accelerator in (torch.cuda, torch.xpu, torch.mtia) if torch else ():
        if not accelerator.is_available():
            accelerator.manual_seed_all = lambda _: None
    if cells := sys.modules.get("normexp.training.cells.cell"):
        _share_probes(cells.Prepared)
    if choices := sys.modules.get("normexp.training.config.choices"):
        _share_compositions(choices)


def _share_probes(prepared: Any) -> None:
    """Networks that are alike are probed once for all tests of a process."""
    prepare, known = prepared.__init__, {}

    def init(self: Any) -> None:
        prepare(self)
        self._traits = known

    prepared.__init__ = init


def _share_compositions(choices: Any) -> None:
    """Shipped YAMLs do not change during the tests; those of a test's own folder may."""
    anew = choices._compose_words
    once = cache(anew.__wrapped__)

    def compose(words: tuple[str, ...]) -> Any:
        has_own = any("searchpath" in word for word in words)
        return (anew if has_own else once)(words)

    compose.cache_clear = anew.cache_clear
    choices._compose_words = compose


def pytest_runtest_setup() -> None:
    """Draws of a test do not depend on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report leaks
    shutil.rmtree(SLOTS, ignore_errors=True)


@pytest.fixture
def own_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Path]]:
    """Writes a user's module; the next import reads it anew, as another process would."""
    names: set[str] = set()

    def write(name: str, source: str) -> Path:
        names.add(name)
        sys.modules.pop(name, None)
        user_sources._first_digests.pop(str(tmp_path / f"{name}.py"), None)
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return tmp_path / f"{name}.py"

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in names:
        sys.modules.pop(name, None)
