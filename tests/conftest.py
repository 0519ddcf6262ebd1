"""Shared by all tests."""

from __future__ import annotations

import os

# Tests run on small tensors, where more threads only wait; read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
