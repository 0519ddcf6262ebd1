"""The user's own source behind a target, found without importing it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from normexp.errors import UserError
from normexp.training.records.source import (
    digest_of,
    package_digest,
    refuse_edited,
    source_digest,
    source_files,
    why_missing,
)

FILES = {
    "alone.py": "import torch\nimport helper\nfrom deep.er import thing\nimport pack.part\n",
    "helper.py": "def late():\n    from second import x\n",
    "second.py": "x = 1\n",
    "deep/__init__.py": "",
    "deep/unused.py": "",
    "deep/er/__init__.py": "from . import thing\n",
    "deep/er/thing.py": "from ...far import away\n",  # beyond the top: no such module
    "pack/__init__.py": "",
    "pack/part.py": "from .sub.leaf import y\n",
    "pack/other.py": "import second\n",
    "pack/sub/__init__.py": "",
    "pack/sub/leaf.py": "y = 1\n",
    "space/inner.py": "from space.more import z\n",
    "space/more.py": "z = 1\n",
    "unrelated.py": "",
    "broken.py": "def\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (
            "alone.Norm",  # the files that it imports, and the packages that hold them
            "alone helper second deep deep.er deep.er.thing pack pack.part pack.sub pack.sub.leaf",
        ),
        ("pack.part.Norm", "pack pack.part pack.sub pack.sub.leaf"),
        ("pack.Norm", "pack"),
        ("space.inner.Norm", "space.inner space.more"),  # a namespace package
        ("broken.Norm", "broken"),
        ("missing.Norm", ""),
        ("torch.nn.BatchNorm2d", ""),
        ("normexp.norms.sample.GroupNorm", ""),
        ("collections.Counter", ""),
    ],
)
def test_files_behind_a_target(target: str, names: str, folder: Path):
    files = source_files(target)
    assert sorted(files) == sorted(names.split())
    assert all(path.is_relative_to(folder) for path in files.values())
    assert not {name.partition(".")[0] for name in files} & sys.modules.keys()


@pytest.mark.parametrize(
    ("target", "file", "counts"),
    [
        ("alone.Norm", "second.py", True),
        ("alone.Norm", "deep/__init__.py", True),
        ("alone.Norm", "deep/unused.py", False),
        ("alone.Norm", "unrelated.py", False),
        ("pack.part.Norm", "pack/other.py", False),
    ],
)
def test_an_edit_changes_the_digest_and_a_touch_does_not(target, file, counts, folder: Path):
    before = source_digest(target)
    if (folder / file).exists():
        (folder / file).touch()
    assert source_digest(target) == before
    (folder / file).write_text("edited = True\n" + FILES.get(file, ""))
    assert (source_digest(target) != before) == counts


def test_the_digest_is_of_names_and_content_and_not_of_the_place(folder: Path, monkeypatch):
    before = source_digest("pack.part.Norm")
    (folder / "moved").mkdir()
    for name in ("pack", "second.py"):
        (folder / name).rename(folder / "moved" / name)
    monkeypatch.syspath_prepend(str(folder / "moved"))
    importlib.invalidate_caches()
    assert source_digest("pack.part.Norm") == before


@pytest.mark.usefixtures("folder")
def test_only_what_is_installed_counts_as_a_package():
    assert package_digest("torch.nn.BatchNorm2d")
    for target in ("alone.Norm", "collections.Counter", "normexp.norms.sample.GroupNorm", "no.N"):
        assert package_digest(target) is None


@pytest.mark.parametrize("has_trained", [True, False])
def test_an_edit_after_the_import_is_refused(folder: Path, has_trained: bool):
    def digests_of_second() -> dict[str, str]:
        files = source_files("second.Norm").values()
        return {str(path): digest_of(path.read_bytes()) for path in files}

    hashed = digests_of_second()
    if has_trained:
        refuse_edited(hashed)
        refuse_edited(hashed)
    (folder / "second.py").write_text("x = 22\n")
    for digests in (hashed, digests_of_second()):
        with pytest.raises(UserError, match="was edited after the command began, or after this"):
            refuse_edited(digests)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere_at_all.Norm", "there is no module nowhere_at_all"),
        ("helper.Lat", "helper has no Lat; did you mean late?"),
        ("helper.late", ""),
        ("pack.sub.leaf.y", ""),
        ("pack.part", "pack.part is a module"),
        ("alone.thing", ""),  # imported there
        ("torch.nn.Norm", ""),  # not the user's: its import says so
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_target_that_is_not_there_is_told_with_near_names(target: str, why: str):
    assert why_missing(target)[: len(why) or None] == why


def test_a_class_without_a_file_is_refused():
    with pytest.raises(UserError, match="put the class in a file"):
        source_files("__main__.Norm")
