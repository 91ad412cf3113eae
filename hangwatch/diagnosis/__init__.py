"""Finds what is wrong with a job from what is known of it. Pure: the time is a parameter.

`graph` builds the wait-for graph, `rules` has one module for each root cause, `engine` runs the
rules, `divergences` and `advice` add to their verdicts, `unexplained` finds the waits that none of
them covers, and `messages` has the texts. `triage`
decides at low cost whether a diagnosis can find anything at all.
"""

from __future__ import annotations

from hangwatch.diagnosis.rules.mismatch import choose_window, find_call_mismatches

from .context import EvidenceRequest, is_quiet
from .engine import Diagnosis, diagnose
from .unexplained import UnexplainedWait

__all__ = [
    "Diagnosis",
    "EvidenceRequest",
    "UnexplainedWait",
    "choose_window",
    "diagnose",
    "find_call_mismatches",
    "is_quiet",
]
