"""The resolutions of an incident."""

from __future__ import annotations

import enum


class Resolution(str, enum.Enum):
    """Why an incident was resolved. CONTRACT: each name is public."""

    PROGRESS = "progress"  # the job made progress
    ENDED = "ended"  # the job ended
    RESTARTED = "restarted"  # a later attempt of the job runs
    UNHEARD = "unheard"  # no node agent reports the job any more
    # The job ended after hangwatch had aborted ranks of it, and no later attempt followed soon.
    ABORTED = "aborted"
