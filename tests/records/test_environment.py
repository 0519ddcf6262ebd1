"""What a result followed from: the environment."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version

from normexp.training.records.environment import describe_environment


def test_environment_is_plain_and_names_the_versions():
    described = describe_environment()
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    assert described["python"] == platform.python_version()
    assert described["torch"] == version("torch")
    assert described["cpu_count"] >= 1
    assert "gpu" not in described and describe_environment(gpu="H200")["gpu"] == "H200"
    assert len(described["code_version"]) == 16
    assert not {None, platform.node()} & {*described.values()}
