from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from normexp.records import environment
from normexp.records.environment import describe_environment, git_commit

STDLIB_ONLY = """
import sys
import normexp.records.result, normexp.records.files, normexp.records.identity
import normexp.records.environment, normexp.records.metrics, normexp.records.history
import normexp.records.stacks
normexp.records.environment.describe_environment()
print([name for name in ("torch", "numpy", "yaml", "hydra") if name in sys.modules])
"""


@pytest.fixture(autouse=True)
def fresh_git_commit():
    git_commit.cache_clear()
    yield
    git_commit.cache_clear()


def test_environment_is_plain_and_names_the_versions():
    described = describe_environment()
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    assert described["python"] == platform.python_version()
    assert described["torch"] == version("torch")
    assert described["cpu_count"] >= 1
    assert "gpu" not in described and describe_environment(gpu="H200")["gpu"] == "H200"
    assert len(described["code_version"]) == 16
    assert None not in described.values()
    assert platform.node() not in described.values()


def test_records_import_the_standard_library_only():
    command = [sys.executable, "-c", STDLIB_ONLY]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
def test_commit_is_of_the_checkout_around_the_code(tmp_path: Path, monkeypatch):
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    head = subprocess.check_output(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], text=True)
    monkeypatch.setattr(environment, "PACKAGE", tmp_path)
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a git hook
    assert git_commit() == head.strip()


def test_commit_is_absent_and_quiet_outside_a_checkout(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setattr(environment, "PACKAGE", tmp_path)
    assert git_commit() is None
    git_commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
    assert capfd.readouterr() == ("", "")
