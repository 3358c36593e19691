"""The one exception a user is meant to read."""


class UserError(Exception):
    """Something the user can mend: bad input, an impossible layout, a damaged file.

    The message says what was wrong, with which value, and what to do. `pretrain_rl.py` and the tools
    print it without a stack trace and exit with status 2.
    """
