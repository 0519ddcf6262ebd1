"""The errors of normexp, the exit codes of its entries, and one line for any error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

FAILED = 1
USER_MISTAKE = 2
INTERRUPTED = 130

PACKAGE = Path(__file__).resolve().parent
STANDARD_LIBRARY = Path(os.__file__).parent


class UserError(ValueError):
    """A mistake in the command or config: one short message with the key, the value, the remedy.

    Entries print the message without a traceback and exit with code 2.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"normexp: {self}"]


@contextmanager
def rewording(translate: Callable[[str], str]) -> Iterator[None]:
    """Translates the message of a UserError."""
    try:
        yield
    except UserError as error:
        error.args = (translate(str(error)),)
        raise


class Halted(Exception):
    """No cell can be trained any more, for example because the disk is full.

    Entries print the message without a traceback and exit with code 1.
    """


def one_line(error: BaseException) -> str:
    """The message of a UserError; for other errors `Type: first line (file.py, line 3)`.

    The place is the user's own code that raised, if any did.
    """
    if isinstance(error, UserError):
        return str(error)
    kind, message = type(error).__name__, str(error).strip()
    first_line = f"{kind}: {message.splitlines()[0]}" if message else kind
    return first_line + source_line_of(error)


def source_line_of(error: BaseException) -> str:
    """` (file.py, line 3)` of the user's own code that raised; empty if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(Path(frame.filename))]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def explain_hidden(error: Exception) -> str:
    """Names a user's file that was imported in place of Python's or a package's; else empty.

    Such as a `random.py` in the current folder, which `python -m` searches first.
    """
    if not isinstance(error, ImportError | AttributeError):  # what a module that is none raises
        return ""
    installed = [folder for folder in sys.path if is_installed(Path(folder))]
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None)
        if "." in name or not file or not is_own(Path(file)) or f"'{name}" not in str(error):
            continue
        if name in sys.stdlib_module_names or PathFinder.find_spec(name, installed):
            return f"{file} hides another module {name}, so {one_line(error)}; rename your file"
    return ""


def is_own(path: Path) -> bool:
    """True for a file of the user: not of normexp, Python or an installed package."""
    path = path.resolve()
    foreign = is_installed(path) or path.is_relative_to(STANDARD_LIBRARY)
    return path.is_file() and not foreign and not path.is_relative_to(PACKAGE)


def is_installed(path: Path) -> bool:
    """True for a file in site-packages, where a version number stands for the source."""
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
