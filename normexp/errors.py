"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake in the command or config: one short message with the key, the value, the remedy.

    Entries print it without a traceback and exit with code 2.
    """
