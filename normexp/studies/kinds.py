"""The type of a value against that of its default."""

from __future__ import annotations

from typing import Any

from normexp.errors import UserError


def refuse_type_change(key: str, default: Any, value: Any) -> None:
    """A value of another type than its default: true or false, numbers and lists are kept apart.

    A null or text default says nothing of a type, and Lightning checks the trainer's values itself.
    """
    if default is None or value is None or key.startswith("trainer."):
        return
    kind = next((kind for kind in _KINDS if isinstance(default, kind)), None)
    if kind is None or _fits(value, kind):
        return
    raise UserError(
        f"{key}={as_typed(value)}: not {_KINDS[kind]}, as its default {as_typed(default)} is"
    )


# In this order, as a bool is an int to Python.
_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a group of keys",
}


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def as_typed(value: Any) -> str:
    """A value as the command line takes it: null, true, false, 3."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
