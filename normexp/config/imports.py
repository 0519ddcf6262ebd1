"""Imports torch sooner, and says so meanwhile. Imports nothing of it itself."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_torch() -> Iterator[None]:
    """Pauses the garbage collector inside the block, and shows a line on a terminal.

    The collector would search the modules of torch and Lightning for garbage again and again, a
    fifth of the time of their import. They never become garbage, so it leaves them out afterwards.
    """
    if "torch" in sys.modules:
        yield
        return
    shows = sys.stderr.isatty()
    if shows:
        print("importing torch ...", end="\r", file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # else torch's libraries report leaks at exit
        if shows:
            print("\x1b[2K", end="", file=sys.stderr, flush=True)
