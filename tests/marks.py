"""Which tests run each time, and which by ./scripts/test --all alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[str], names: Iterable[str]) -> list[Any]:
    """These names as parameters, of which all but the fast ones are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
