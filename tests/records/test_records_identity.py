"""A cell's id and what a result followed from: sizes, differences, sources, the environment."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import normexp
from normexp.records import environment
from normexp.records.environment import describe_environment, git_commit
from normexp.records.identity import (
    canonical_sizes,
    cell_id,
    differences,
    source_root,
)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((32, None, None), (None, None)),
        ((32, 32, None), (None, None)),
        ((32, 64, None), (None, None)),
        ((32, None, 32), (None, None)),
        ((32, 8, 8), (8, None)),
        ((32, 8, 32), (8, None)),
        ((32, 8, 4), (8, 4)),
        ((32, None, 4), (None, 4)),
    ],
)
def test_a_size_is_null_where_nothing_is_split(given, kept):
    sizes = canonical_sizes(*given, mixes_samples=True)
    assert (sizes["batch_size"], sizes["micro_batch_size"], sizes["norm_batch_size"]) == (32, *kept)
    alone = canonical_sizes(*given, mixes_samples=False)
    assert alone == sizes | {"norm_batch_size": None}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"a": 1.0, "b": {"c": [1, 2], "d": None}}, {}),
        ({"a": 2, "b": {"c": (1, 2.0), "d": None}}, {"a": 2}),
        ({"a": 1, "b": {"c": [2, 1], "d": None}}, {"b": {"c": [2, 1]}}),
        ({"a": 1, "b": {"c": [1, 2], "d": 0}}, {"b": {"d": 0}}),
        ({"a": 1, "b": None}, {"b": None}),
        ({"b": {"c": [1, 2]}}, {"~a": None, "b": {"~d": None}}),
        ({"a": 1, "b": {"c": [1, 2], "d": None, "e": None}, "f": 3}, {"b": {"e": None}, "f": 3}),
    ],
)
def test_differences_are_what_is_not_as_by_default(values, found):
    assert differences(values, {"a": 1, "b": {"c": [1, 2], "d": None}}) == found


def test_the_hash_is_of_values_whatever_their_order_and_spelling():
    one = cell_id({"a": 0.1, "b": [1, {"c": 2.0}]}, ["x"])
    assert re.fullmatch(r"x-[0-9a-f]{10}", one)
    for a, is_same in ((0.10, True), (0.1 + 2e-17, True), (0.1 + 1e-12, False), ("0.1", False)):
        assert (cell_id({"b": (1.0, {"c": 2}), "a": a}, ["x"]) == one) == is_same  # 15 digits


@pytest.mark.parametrize("part", ["b/../c", "Very" * 40, "Größe mit=Leer,Zeichen", "", "."])
def test_a_slug_is_safe_and_short(part: str):
    named = cell_id({}, [part, part, part, "b1000000000", "lr1e+300"] * 3)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", named)
    assert len(named) <= 80


# --- Sources -------------------------------------------------------------------------------------


def test_source_begins_at_the_outermost_package_and_not_in_installed_ones(tmp_path: Path):
    package = tmp_path / "my_pkg"
    (package / "norms").mkdir(parents=True)
    installed = tmp_path / "site-packages" / "foreign.py"
    installed.parent.mkdir()
    for file in ("my_pkg/__init__.py", "my_pkg/norms/__init__.py", "my_pkg/norms/mine.py"):
        (tmp_path / file).touch()
    for file in (tmp_path / "alone.py", installed):
        file.touch()
    assert source_root(package / "norms" / "mine.py") == package
    assert source_root(tmp_path / "alone.py") == tmp_path / "alone.py"
    group = Path(normexp.__file__).parent / "norms" / "group.py"
    assert [source_root(file) for file in (group, Path(pytest.__file__), installed)] == [None] * 3


# --- The environment -----------------------------------------------------------------------------


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
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a git hook
    assert git_commit() == head.strip()
    git_commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None
    assert capfd.readouterr() == ("", "")
