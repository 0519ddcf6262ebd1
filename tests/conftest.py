"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import tempfile

# Tests run on small tensors, where more threads only wait; read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Trainings of other test runs on this machine are not waited for.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="normexp-tests-")


def pytest_collection_finish() -> None:
    """Spares the garbage collector the modules that tests have imported, until they are done."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
