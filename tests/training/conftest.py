"""The devices that trainings are tested on."""

from __future__ import annotations

import pytest
from training_cases import NEEDS_GPU


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    """Runs a test on the CPU, and on a GPU where there is one."""
    return request.param
