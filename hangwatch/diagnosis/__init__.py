"""From what is known of a job to what is wrong with it: pure functions, with the time passed in."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.state import Attempt
from hangwatch.types import Limits, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Evidence that the diagnosis would like to have from one rank's node agent."""

    rank: int
    stacks: bool = False
    uid: int = 0  # else: the calls of this sequence, from `from_seq` on
    from_seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Verdicts (one per root cause; those with ``due`` False are only suspicions) and what to ask for."""

    verdicts: tuple[Verdict, ...] = ()
    requests: tuple[Request, ...] = ()


def diagnose(attempt: Attempt, now: float, limits: Limits) -> Diagnosis:
    """What is wrong with one attempt of a job at time ``now``."""
    return Diagnosis()
