"""The direction of imports, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "normexp"
# A part imports only itself and the parts listed above it.
ORDER = [
    "errors",
    "words",
    "verdicts",
    "records",
    "config",
    "studies",
    "norms",
    "batching",
    "any_network",
    "data",
    "models",
    "training",
    "checks",
    "cells",
    "sweeps",
    "search",
    "cli",
    "api",
    "benchmark",
]
ENTRIES = {"train", "tune", "confirm", "evaluate", "check", "status", "report"}
ENTRIES |= {"__init__", "__main__"}
HYDRA_USERS = {
    "config",
    "norms",
    "models",
    "data",
    "training",
    "cells",
    "sweeps",
    "search",
    "cli",
    *ENTRIES,
}
# Slow to import or optional: imported inside the functions that use them.
IMPORTED_WHERE_USED = {"torchvision", "babel", "wandb", "tensorboard", "timm"}
IMPORTED_WHERE_USED |= {"safetensors"}
TORCH = {"torch", "pytorch_lightning", "lightning_fabric", "torchvision", "timm", "safetensors"}


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def part_of(file: Path) -> str:
    """The part of normexp that holds a file: `config` of training/config/keys.py."""
    first, *rest = file.relative_to(PACKAGE).parts
    is_package = first == "training" and len(rest) > 1
    return rest[0] if is_package else first.removesuffix(".py")


def parts_of(names: Iterable[str]) -> set[str]:
    """The parts of normexp among dotted names."""
    parts = set()
    for name in names:
        if name.startswith("normexp."):
            first, *rest = name.split(".")[1:]
            parts.add(rest[0] if first == "training" and rest and rest[0] in ORDER else first)
    return parts & {*ORDER, *ENTRIES}


def module_of(file: Path) -> str:
    return ".".join(("normexp", *file.relative_to(PACKAGE).with_suffix("").parts))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules imported anywhere below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            yield node.module
            if node.module.startswith("normexp"):  # the name may be a module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_at_start(node: ast.AST) -> Iterator[str]:
    """Modules imported when this one is; not those inside functions or for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from imported(child)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from imported_at_start(child)


def roots(names: Iterator[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def test_a_part_imports_only_parts_listed_above_it(trees: dict[Path, ast.Module]):
    for file, tree in trees.items():
        part = part_of(file)
        allowed = ORDER if part in ENTRIES else ORDER[: ORDER.index(part) + 1]
        assert parts_of(imported(tree)) <= set(allowed), file


def test_no_two_files_import_each_other_in_a_loop(trees: dict[Path, ast.Module]):
    modules = {module_of(file): tree for file, tree in trees.items()}
    graph = {name: set(imported(tree)) & modules.keys() - {name} for name, tree in modules.items()}
    assert {*TopologicalSorter(graph).static_order()} == modules.keys()  # a loop raises CycleError


def test_only_some_parts_know_hydra(trees: dict[Path, ast.Module]):
    for file, tree in trees.items():
        if part_of(file) not in HYDRA_USERS:
            assert not roots(imported(tree)) & {"hydra", "omegaconf"}, file


def test_verdicts_are_a_house_of_their_own(trees: dict[Path, ast.Module]):
    """Its reader needs neither torch nor Hydra, nor how a run is trained and stored."""
    libraries = {"numpy", "scipy", "pandas", "altair", "vl_convert", "jinja2", "rich", "markupsafe"}
    for file, tree in trees.items():
        if part_of(file) == "verdicts":
            names = {*imported(tree)}
            assert parts_of(names) <= {"errors", "words", "verdicts"}, file
            assert roots(iter(names)) - {"normexp", *sys.stdlib_module_names} <= libraries, file


def test_records_and_studies_need_no_torch(trees: dict[Path, ast.Module]):
    for file, tree in trees.items():
        names = roots(imported(tree)) - {"normexp", *sys.stdlib_module_names}
        if part_of(file) == "records":
            assert names <= {"filelock", "joblib", "numpy"}, file
        if part_of(file) == "studies":
            assert not names & TORCH, file


def test_any_network_is_a_house_of_its_own(trees: dict[Path, ast.Module]):
    """Its reader needs no config, no records and no training."""
    below = {"errors", "words", "norms", "batching", "any_network"}
    libraries = {"torch", "safetensors", "numpy", "scipy", "pandas"}
    files = [file for file in trees if part_of(file) == "any_network"]
    for file in files:
        names = {*imported(trees[file])}
        assert parts_of(names) <= below, file
        others = roots(iter(names)) - {"normexp", *sys.stdlib_module_names}
        assert others <= libraries, file
    loaded = loaded_with(map(module_of, files), trees)
    assert "normexp.norms.factory" in loaded
    assert not roots(iter(loaded)) & {"hydra", "omegaconf", "pytorch_lightning"}


def test_heavy_or_optional_packages_are_imported_where_they_are_used(trees: dict[Path, ast.Module]):
    for file, tree in trees.items():
        assert not roots(imported_at_start(tree)) & IMPORTED_WHERE_USED, file


def loaded_with(modules: Iterable[str], trees: dict[Path, ast.Module]) -> set[str]:
    """All that is imported when these modules of normexp are, and their own imports in turn."""
    files = {module_of(file): tree for file, tree in trees.items()}
    waiting = [*modules]
    loaded = set[str]()
    while waiting:
        words = waiting.pop().split(".")
        names = {".".join(words[:end]) for end in range(1, len(words) + 1)}
        for name in names - loaded:
            tree = files.get(name) or files.get(f"{name}.__init__")
            waiting += [] if tree is None else imported_at_start(tree)
        loaded |= names
    return loaded


def test_a_card_and_a_reloaded_network_need_no_lightning(trees: dict[Path, ast.Module]):
    loaded = loaded_with(["normexp.training.checks.card", "normexp.training.models.build"], trees)
    assert "normexp.norms.site" in loaded and "torch" in loaded
    assert not roots(iter(loaded)) & {"pytorch_lightning", "lightning_fabric"}
