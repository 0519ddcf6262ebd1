"""What every entry does with an error: exit codes and the one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from normexp.errors import UserError

USER_MISTAKE = 2
INTERRUPTED = 130


def run_entry(entry: Callable[[], int]) -> int:
    """Exit code of `entry()`: its own, 2 after a user's mistake, 130 after Ctrl-C.

    A mistake and a stop are one line on stderr. Any other exception passes through: Python prints
    the traceback and exits with 1.
    """
    try:
        return entry()
    except UserError as error:
        print(f"normexp: {error}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt as stop:
        print(f"normexp: {str(stop) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
