"""The one kind of error that a user can cause."""


class UserError(Exception):
    """Bad input: its message is one line that names the file, the key, the value and what is allowed.

    The command line prints the message alone and exits with ``exit_code``.
    """

    exit_code = 2
