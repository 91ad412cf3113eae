"""The node agent's own intervals and timeouts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """All times are in seconds."""

    scan_interval_s: float = 0.5
    fast_scan_interval_s: float = 0.2  # while processes start, or where a ring fills quickly
    startup_window_s: float = 10.0  # after a new process: more of them are expected
    heartbeat_interval_s: float = 0.5  # until the server sets another one
    linger_s: float = 3.0  # without a live process
    first_process_timeout_s: float = 5.0
    absent_server_timeout_s: float = 30.0  # with something left to report
    user_notice_after_s: float = 3.0  # without the server, until the user is notified
    last_heartbeat_timeout_s: float = 2.0
