"""The statements of each package, which may only fall: one small file per package in budgets/.

Imports and docstrings do not count, so joining files or cutting words gains nothing. A change that
needs fewer lowers the number in the same commit.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "normexp"
BUDGETS = {
    path.stem: int(path.read_text()) for path in (Path(__file__).parent / "budgets").iterdir()
}


def num_statements(file: Path) -> int:
    def is_counted(node: ast.AST) -> bool:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_text = is_text and isinstance(node.value.value, str)
        return (
            isinstance(node, ast.stmt)
            and not is_text
            and not isinstance(node, ast.Import | ast.ImportFrom)
        )

    return sum(map(is_counted, ast.walk(ast.parse(file.read_text()))))


def files_of(package: str) -> list[Path]:
    """The files of a package; `entries` stands for those beside the packages."""
    return list(PACKAGE.glob("*.py") if package == "entries" else (PACKAGE / package).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(BUDGETS))
def test_a_package_has_no_more_statements_than_its_budget(package: str):
    assert sum(map(num_statements, files_of(package))) <= BUDGETS[package]


def test_every_package_has_a_budget():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages | {"entries"} == set(BUDGETS)
