"""Norms. To read the code, start with factory, site, base and sample; contract: what a norm is.

    from normexp.norms import GroupNorm

Every class of this package can be imported from here, but the mistakes of zoo/deviations. Importing
the package does not import torch; the first use of a class does.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the module of a class."""
    if name not in _modules():
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(_modules()[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})


@cache
def _modules() -> dict[str, str]:
    """Maps each class to the module that defines it, as read from the source."""
    folder, modules = Path(__file__).parent, {}
    for file in folder.rglob("*.py"):
        if file.stem != "deviations":
            module = ".".join((__name__, *file.relative_to(folder).with_suffix("").parts))
            for name in re.findall(r"^class ([A-Z]\w*)", file.read_text(), re.MULTILINE):
                modules[name] = module
    return modules
