"""The direction of imports, read from the source, and what --help must not import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "normexp"
# design.md, section 5: a part may import only parts that stand before it.
ORDER = [
    "errors",
    "stats",
    "records",
    "norms",
    "batching",
    "data",
    "models",
    "config",
    "training",
    "checks",
    "reporting",
    "build",
    "cells",
    "sweeps",
    "search",
    "cli",
]
ENTRIES = ["train", "tune", "evaluate", "check", "status", "report", "__init__"]
KNOW_HYDRA = ["config", "build", "cells", "sweeps", "search", "cli", *ENTRIES]
IMPORTED_WHERE_USED = {"torchvision", "sklearn", "babel", "wandb", "tensorboard", "optuna"}
# `stats` takes arrays; `records` nothing at all.
ALLOWED_OUTSIDE = {"records": set(), "stats": {"numpy", "scipy"}}

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(file: Path) -> str:
    """The package or top-level module of normexp that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules imported anywhere below a node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            if node.module == "normexp":
                yield from (f"normexp.{alias.name}" for alias in node.names)
            else:
                yield node.module


def imported_at_start(node: ast.AST) -> Iterator[str]:
    """Those that run when the module is imported; not the ones for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from imported(child)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from imported_at_start(child)


def names_of(file: Path) -> set[str]:
    return set(imported(ast.parse(file.read_text())))


def name_of(file: Path) -> str:
    """Dotted name of the module in a file."""
    return ".".join(("normexp", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def by_path(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("file", FILES, ids=by_path)
def test_imports_only_parts_that_stand_before(file: Path):
    part = part_of(file)
    allowed = ORDER if part in ENTRIES else ORDER[: ORDER.index(part) + 1]
    parts = {name.split(".")[1] for name in names_of(file) if name.startswith("normexp.")}
    assert parts <= set(allowed)


@pytest.mark.parametrize("file", FILES, ids=by_path)
def test_only_these_parts_know_hydra(file: Path):
    if part_of(file) not in KNOW_HYDRA:
        assert not {name.split(".")[0] for name in names_of(file)} & {"hydra", "omegaconf"}


@pytest.mark.parametrize("file", FILES, ids=by_path)
def test_records_stats_and_reporting_stay_light(file: Path):
    outside = {name.split(".")[0] for name in names_of(file)} - {"normexp"}
    outside -= set(sys.stdlib_module_names)
    part = part_of(file)
    if part in ALLOWED_OUTSIDE:
        assert outside <= ALLOWED_OUTSIDE[part]
    if part == "reporting":
        assert not outside & {"torch", "pytorch_lightning", "torchvision"}


def test_no_files_import_each_other_in_a_loop():
    graph = {name_of(file): names_of(file) for file in FILES}
    sorter = TopologicalSorter({name: used & graph.keys() - {name} for name, used in graph.items()})
    sorter.prepare()  # raises CycleError with the loop


@pytest.mark.parametrize("file", FILES, ids=by_path)
def test_heavy_or_optional_packages_are_imported_where_used(file: Path):
    at_start = {name.split(".")[0] for name in imported_at_start(ast.parse(file.read_text()))}
    assert not at_start & IMPORTED_WHERE_USED


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["norm=nrom"], ["batch_size=0"], ["--cfg", "job", "norm=nrom"]],
    ids=" ".join,
)
def test_help_and_refusals_import_no_torch(argv: list[str]):
    script = (
        "import sys; from normexp.train import main; code = main(sys.argv[1:]); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    run = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, check=False)
    assert run.returncode == (0 if argv == ["--help"] else 2)
