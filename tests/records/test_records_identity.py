"""The pure part of a cell's id: sizes, differences, slug and hash, digests of source files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import normexp
from normexp.records.identity import (
    canonical_sizes,
    cell_id,
    differences,
    digest_of_source,
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
    assert cell_id({"b": (1.0, {"c": 2}), "a": 0.10}, ["x"]) == one
    assert cell_id({"b": (1.0, {"c": 2}), "a": 0.1 + 2e-17}, ["x"]) == one  # 16th digit
    assert cell_id({"b": (1.0, {"c": 2}), "a": 0.1 + 1e-12}, ["x"]) != one
    assert cell_id({"b": (1.0, {"c": 2}), "a": "0.1"}, ["x"]) != one
    assert re.fullmatch(r"x-[0-9a-f]{10}", one)


@pytest.mark.parametrize("part", ["b/../c", "Very" * 40, "Größe mit=Leer,Zeichen", "", "."])
def test_a_slug_is_safe_and_short(part: str):
    named = cell_id({}, [part, part, part, "b1000000000", "lr1e+300"] * 3)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", named)
    assert len(named) <= 80


def source_digest(module_file: Path) -> str | None:
    root = source_root(module_file)
    return None if root is None else digest_of_source(root)


def test_a_source_digest_follows_an_edit_of_its_file(tmp_path: Path):
    module = tmp_path / "my_norm.py"
    module.write_text("scale = 1\n")
    before = source_digest(module)
    (tmp_path / "unrelated.py").write_text("")
    assert source_digest(module) == before == digest_of_source(module)
    module.write_text("scale = 2\n")
    assert source_digest(module) != before


def test_a_source_digest_in_a_package_follows_its_helpers(tmp_path: Path):
    package = tmp_path / "my_pkg"
    (package / "norms").mkdir(parents=True)
    for file in ("__init__.py", "norms/__init__.py", "norms/mine.py", "helper.py", "notes.txt"):
        (package / file).write_text("x = 1\n")
    before = source_digest(package / "norms" / "mine.py")
    (package / "notes.txt").write_text("not source")
    assert source_digest(package / "norms" / "mine.py") == before
    (package / "helper.py").write_text("x = 2\n")
    edited = source_digest(package / "norms" / "mine.py")
    assert edited != before
    (package / "helper.py").rename(package / "renamed.py")
    assert source_digest(package / "norms" / "mine.py") != edited


def test_normexp_and_installed_packages_have_no_source_digest(tmp_path: Path):
    assert source_digest(Path(normexp.__file__).parent / "norms" / "group.py") is None
    assert source_digest(Path(pytest.__file__)) is None
    installed = tmp_path / "site-packages" / "foreign.py"
    installed.parent.mkdir()
    installed.write_text("")
    assert source_digest(installed) is None
