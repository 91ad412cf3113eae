"""What the tensors of a traced call held. The recorder notes it only where the job runs with HANGWATCH_CHECKS=values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .watched import Watched


def values_of(w: Watched, record: int) -> Mapping[str, Any] | None:
    """``mean``, ``min``, ``max``, ``norm`` and ``nonfinite`` of the call with that record number; None where they were not noted.

    No recorder notes them yet, so that there are none.
    """
    return None
