"""A plugin of pytest that writes each failure to $OUT/failures.txt as it happens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()
        why = next((line for line in reversed(lines) if line.startswith("E ")), lines[-1])
        with open(Path(os.environ["OUT"], "failures.txt"), "a") as file:
            file.write(f"{report.nodeid}: {why.removeprefix('E').strip()[:200]}\n")
