"""A plugin of pytest for tests that may be cut: the first case of every test comes first.

Each outcome is a line of $OUT/tests.txt as it happens: seconds since the start, outcome, seconds of
the test, its name, and why it failed. So a cut or a hang loses only what was not run.
"""

import os
import time
from collections import Counter
from pathlib import Path

import pytest

STARTED = time.time()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = Counter[str]()

    def number(item: pytest.Item) -> int:  # of a case within its test
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        return seen[test]

    items.sort(key=number)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    lines = report.longreprtext.splitlines() if report.failed else []
    errors = [line for line in lines if line.startswith("E ")] or lines[-1:]
    why = " ".join(line.removeprefix("E").strip() for line in errors)[:300]
    what = f"{report.outcome} {report.duration:.1f} {report.nodeid} {why}"
    with open(Path(os.environ["OUT"], "tests.txt"), "a") as file:
        print(round(time.time() - STARTED), what, file=file)
