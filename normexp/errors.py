"""The error for user mistakes, and the exit codes of the entries."""

USER_MISTAKE = 2
INTERRUPTED = 130


class UserError(ValueError):
    """A mistake in the command or config: one short message with the key, the value, the remedy.

    Entries print it without a traceback and exit with code 2.
    """
