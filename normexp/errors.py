"""The error for user mistakes, and the exit codes of the entries."""

FAILED = 1
USER_MISTAKE = 2
INTERRUPTED = 130


class UserError(ValueError):
    """A mistake in the command or config: one short message with the key, the value, the remedy.

    Entries print the message without a traceback and exit with code 2.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"normexp: {self}"]


class Halted(Exception):
    """No cell can be trained any more, for example because the disk is full.

    Entries print the message without a traceback and exit with code 1.
    """


def first_line(error: Exception) -> str:
    """The first line of an error's message; the type if there is none, and before a KeyError's."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{type(error).__name__} {line}" if isinstance(error, KeyError) else line
