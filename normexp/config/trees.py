"""Looks into nested mappings, by dotted keys as `optim.momentum`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def value_at(tree: Any, key: str) -> Any:
    """The value at a dotted key of nested dicts; None if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def parts_with_target(tree: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a config, at any depth, that has a `_target_`."""
    if isinstance(tree, dict):
        if isinstance(tree.get("_target_"), str):
            yield tree
        tree = list(tree.values())
    for value in tree if isinstance(tree, list) else ():
        yield from parts_with_target(value)


def dotted_keys(tree: Any, prefix: str = "") -> Iterator[str]:
    """Every key of nested mappings, as `optim` and `optim.momentum`."""
    for name in tree if isinstance(tree, Mapping) else ():
        yield f"{prefix}{name}"
        yield from dotted_keys(tree[name], f"{prefix}{name}.")
