"""The table that normexp.evaluate prints."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normexp.config.rules import counted

Contents = Mapping[int, Mapping[str, Any]]  # the content of evaluation.json by seed


def print_evaluations(
    contents: Contents, title: str, *, why_nothing: str, invalid: str | None
) -> None:
    """Prints a table with a row per kind of statistics: mean and standard deviation over seeds.

    Args:
        why_nothing: printed if there is no number.
        invalid: why the numbers must not be compared; None if they may.
    """
    found = dict.fromkeys(kind for c in contents.values() for kind in c)
    kinds = [kind for kind in found if kind not in ("asked", "gap")]
    names = dict.fromkeys(name for c in contents.values() for k in kinds for name in c.get(k, {}))
    names.pop("num_samples", None)
    console = Console(highlight=False)
    if invalid:
        console.print(f"INVALID, every number below: {invalid}", markup=False, soft_wrap=True)
    if not kinds:
        console.print(f"{title}: {why_nothing}", markup=False, soft_wrap=True)
        return
    console.print(f"{title}: n = {counted(len(contents), 'seed')}, mean (sd)", markup=False)
    table = Table("statistics", box=None)
    for name in names:
        table.add_column(Text(name))  # Text, because a name may hold brackets
    for kind in kinds:
        table.add_row(Text(kind), *(Text(_cell(contents, kind, name)) for name in names))
    console.print(table)


def _cell(contents: Contents, kind: str, name: str) -> str:
    values = [c[kind][name] for c in contents.values() if name in c.get(kind, {})]
    if not values:
        return "-"
    spread = f" ({statistics.stdev(values):.4f})" if len(values) > 1 else ""
    fewer = f" n={len(values)}" if len(values) < len(contents) else ""
    return f"{statistics.mean(values):.4f}{spread}{fewer}"
