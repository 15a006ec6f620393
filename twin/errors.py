"""The one exception type for mistakes a user can make."""


class InputError(ValueError):
    """Bad input: the message names the place, the value, the bound and the fix.

    Command-line entry points print the message without a traceback and exit with status 2.
    """
