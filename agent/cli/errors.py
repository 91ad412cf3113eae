"""The errors of the command line, one class per cause. Each message includes the remedy; `main`
prints it.
"""

from __future__ import annotations

OK, ERROR, USAGE, UNREACHABLE, HANG, INTERRUPTED = 0, 1, 2, 3, 4, 130


class CliError(Exception):
    """Ends the command with `exit_code` and the message."""

    exit_code = ERROR


class UsageError(CliError):
    """The arguments are invalid."""

    exit_code = USAGE


class UnreachableError(CliError):
    """No server answers at the address."""

    exit_code = UNREACHABLE


class RefusedError(CliError):
    """The server requires a token, or a different one."""


class NotFoundError(CliError):
    """The server does not have what was requested."""
