"""Totals since the server started, exported by `/metrics`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..core.supervision import FailureLog


@dataclass(slots=True, kw_only=True)
class Counters:
    heartbeats: int = 0
    malformed: int = 0
    refused: int = 0  # while the server was overloaded
    refusals_by_limit: Counter[str] = field(default_factory=Counter)  # see `server.core.limits`
    foreign_reports: int = 0  # of processes that another node agent reports
    resyncs: int = 0
    diagnoses: int = 0
    failures: FailureLog = field(default_factory=FailureLog)  # in rounds of the diagnosis
    diagnosis_s: float = 0.0  # CPU time
    opened: int = 0  # incidents
    agents_cpu_s: float = 0.0
