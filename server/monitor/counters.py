"""Totals since the server started, exported by `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Counters:
    heartbeats: int = 0
    malformed: int = 0
    refused: int = 0  # while the server was overloaded
    resyncs: int = 0
    diagnoses: int = 0
    diagnosis_failures: int = 0
    diagnosis_s: float = 0.0  # CPU time
    opened: int = 0  # incidents
    agents_cpu_s: float = 0.0
