"""What an incident is, and why it is over."""

from __future__ import annotations

import enum


class Resolution(str, enum.Enum):
    """Why an incident is over. CONTRACT: each name is public."""

    PROGRESS = "progress"  # the job went on
    ENDED = "ended"  # the job did
    RESTARTED = "restarted"  # a later attempt of the job runs
    UNHEARD = "unheard"  # nobody has spoken for the job any more
    # the job ended after hangwatch had ended ranks of it, and no later attempt came soon
    ABORTED = "aborted"
