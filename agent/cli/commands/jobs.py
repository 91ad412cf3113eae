"""Errors for a job that the server does not know."""

from __future__ import annotations

from hangwatch.report.text import clean_text

from ..client import Client
from ..errors import NotFoundError

_MAX_LISTED = 8  # jobs or ids named in a message


def check_job(client: Client, job: str) -> None:
    """Raises NotFoundError, which lists the known jobs, if this one is not known."""
    if not any(known.get("job") == job for known in client.iter_items("jobs")):
        raise build_unknown_job_error(client, job)


def build_unknown_job_error(client: Client, job: str) -> NotFoundError:
    names = sorted({clean_text(known.get("job", "?")) for known in client.iter_items("jobs")})
    if not names:
        return NotFoundError(f"no job {job!r} has reported; none has so far")
    return NotFoundError(f"no job {job!r} has reported; known: {abbreviate_list(names)}")


def abbreviate_list(names: list[str]) -> str:
    text = ", ".join(names[:_MAX_LISTED])
    if len(names) > _MAX_LISTED:
        text += f" and {len(names) - _MAX_LISTED} more"
    return text
