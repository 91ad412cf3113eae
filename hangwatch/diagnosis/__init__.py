"""Finds what is wrong with a job from what is known of it. Pure: the time is a parameter.

`engine` applies the `rules` to one attempt of a job, `graph` shows them which ranks and devices wait
for which, and `context` is what they share. `differences`, `advice` and `hardware` add to the
verdicts what calls, stacks and hosts show; `unexplained` finds the waits that no verdict covers.
`messages` has the texts that several of them use. `is_quiet` decides at low cost whether a diagnosis
can find anything at all.
"""

from __future__ import annotations

from .context import EvidenceRequest, is_quiet
from .engine import Diagnosis, diagnose
from .rules.mismatch import choose_window, find_call_mismatches

__all__ = [
    "Diagnosis",
    "EvidenceRequest",
    "choose_window",
    "diagnose",
    "find_call_mismatches",
    "is_quiet",
]
