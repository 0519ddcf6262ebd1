"""The error for user mistakes, and the exit codes of the entries."""

FAILED = 1
USER_MISTAKE = 2
INTERRUPTED = 130


class UserError(ValueError):
    """A mistake in the command or config: one short message with the key, the value, the remedy.

    Entries print it without a traceback and exit with code 2.
    """


class Halted(Exception):
    """Why nothing more can be trained, such as a full disk.

    Entries print it without a traceback and exit with code 1.
    """


def first_line(error: Exception) -> str:
    """Returns an error's message in one line, with its type if it is empty or a bare key."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{type(error).__name__} {said}" if isinstance(error, KeyError) else said
