"""From what is known of a job to what is wrong with it: pure functions, with the time passed in.

`graph` builds the wait-for graph, `rules` has one module for each root cause, `engine` runs the
rules, `divergences` and `advice` add to their verdicts, and `messages` has the texts. `triage`
tells cheaply whether a diagnosis can find anything at all.
"""

from __future__ import annotations

from hangwatch.diagnosis.rules.mismatch import find_call_mismatches

from .context import EvidenceRequest
from .engine import Diagnosis, diagnose
from .triage import is_quiet

__all__ = ["Diagnosis", "EvidenceRequest", "diagnose", "find_call_mismatches", "is_quiet"]
