"""From what is known of a job to what is wrong with it: pure functions, with the time passed in.

`mismatch` compares calls, `awaited` says whom a call waits for and `waits` builds the wait-for
graph of it, `progress` tells slow from stuck, `causes` turns them into verdicts, with `ends` for
the ends of wait chains, `ended` for processes that ended, `stuck` for calls that all have made and
`silence` for hosts that are not heard, and `words` says them. `quick` tells when all this would be
in vain.
"""

from __future__ import annotations

from hangwatch.diagnosis.rules.mismatch import find_call_mismatches

from .context import EvidenceRequest
from .engine import Diagnosis, diagnose
from .triage import is_quiet

__all__ = ["Diagnosis", "EvidenceRequest", "diagnose", "find_call_mismatches", "is_quiet"]
