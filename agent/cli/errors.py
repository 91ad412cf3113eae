"""The exit codes of the command line, and its errors, one class per cause. Each message includes the
remedy; `main` prints it.
"""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.report.text import Document

OK, ERROR, USAGE, UNREACHABLE, HANG, INTERRUPTED = 0, 1, 2, 3, 4, 130


def choose_exit_code(incidents: Iterable[Document]) -> int:
    """`HANG` if one of the incidents is an alert."""
    return HANG if any(incident.get("severity") == "alert" for incident in incidents) else OK


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
