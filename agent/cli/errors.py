"""What can go wrong on the command line, one class per cause. Each message carries the remedy;
`main` prints it.
"""

from __future__ import annotations

OK, ERROR, USAGE, UNREACHABLE, HANG, INTERRUPTED = 0, 1, 2, 3, 4, 130


class CliError(Exception):
    """Ends the command with `exit_code` and the message."""

    exit_code = ERROR


class UsageError(CliError):
    """What was typed cannot be meant."""

    exit_code = USAGE


class UnreachableError(CliError):
    """Nothing answers at the server's address."""

    exit_code = UNREACHABLE


class RefusedError(CliError):
    """The server wants a token, or another one."""


class NotFoundError(CliError):
    """The server does not know what was asked for."""
