"""What a result followed from: the environment."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from normexp.records import environment
from normexp.records.environment import describe_environment, git_commit


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder that looks like normexp's repository."""
    monkeypatch.setattr(environment, "PACKAGE", tmp_path)
    git_commit.cache_clear()
    yield tmp_path
    git_commit.cache_clear()


def test_environment_is_plain_and_names_the_versions():
    described = describe_environment()
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    assert described["python"] == platform.python_version()
    assert described["torch"] == version("torch")
    assert described["cpu_count"] >= 1
    assert "gpu" not in described and describe_environment(gpu="H200")["gpu"] == "H200"
    assert len(described["code_version"]) == 16
    assert not {None, platform.node()} & {*described.values()}


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
def test_commit_is_of_the_checkout_around_the_code(package: Path, monkeypatch, capfd):
    assert git_commit() is None  # no checkout
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(package), *command], check=True)
    head = subprocess.check_output(["git", "-C", str(package), "rev-parse", "HEAD"], text=True)
    git_commit.cache_clear()
    assert git_commit() == head.strip()
    git_commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
    assert capfd.readouterr() == ("", "")
