"""The times that decide when a wait becomes a verdict. All are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

# Shared by node agents and the server.
MIN_WAIT_S = 1.0  # shorter waits are normal
# Node agents report a call that is unfinished for longer with its arguments. It is also the least wait in a
# call that is known to differ between the ranks, which is never normal.
BLOCKED_AFTER_S = 0.5
FROZEN_AFTER_S = 3.0  # a process that runs no Python for this long is frozen
# The CPU time that a frozen process that is not idle has used since then: on an overloaded host, a healthy one
# may get none. Reports that may be a second old show it, so that it is shorter.
FROZEN_CPU_S = 1.5

# Training rounds in a row with an overflow, after which it counts as persistent under loss scaling. Each
# of them halves the initial scale of 2**16, so that it has reached 2**-8 by then.
PERSISTENT_ROUNDS = 24

# The least data that a working thread or process reads, writes, sends or receives. What goes on beside a
# hang stays below it: keep-alive messages, metrics and logs, and a loop that asks a server or reads a
# small file several times a second. At this rate a gigabyte would take more than four hours.
MIN_TRANSFER_BYTES_PER_S = 1 << 16

LATE_BY_S = 5.0  # the most that a heartbeat of a host that reports rarely may be late

# Stack samples.
MIN_SAMPLE_GAP_S = 0.8  # two samples that are closer cannot be compared
# A thread is busy this long after it last used the CPU or waited for one; sampling its stack may stop
# it for a second.
BUSY_WITHIN_S = 2.0
SECOND_SAMPLE_S = 2.0  # additional time for a second sample, which a busy host may delay
MIN_REFRESH_S = 5.0  # between two samples of a rank that may be elsewhere by now
# A job is quiet if it makes no call for this many times its longest earlier pause.
PAUSE_FACTOR = 5.0
QUIET_AFTER_S = 2.0  # a rank makes no more calls if it has made none for this long

# Counters of devices that are behind are read and reported at least this often: the recorder reads them
# each second, and node agents confirm unchanged ones every two seconds.
READING_DELAY_S = 3.0
# A verdict is to be reported this long after `stall_after_s`. That took up to 1.25 s from when it was
# due, on a slow machine.
REPORTED_WITHIN_S, REPORTING_S = 5.0, 1.35
# Where starts are not recorded, a long kernel on all devices looks like a call that does not complete.
# The devices get additional time: at least `READING_DELAY_S` and the interval of heartbeats (3.5 s in
# all), so that a reading shows that they made no progress for `stall_after_s`, and otherwise as much
# as leaves time to report the verdict.
UNTIMED_GRACE_S = REPORTED_WITHIN_S - REPORTING_S

# The times after which a verdict is confirmed without evidence that has not arrived.
MAX_EVIDENCE_WAIT_S = 3.0  # calls and hashes that were requested
MAX_NARROWING_S = 4.5  # the search for the first different call, while replies narrow it down
MAX_REPLY_WAIT_S = 1.0  # the next of these replies
MAX_REPORT_WAIT_S = 15.0  # node agents of a large job report rarely, and get requests only then
MAX_NONFINITE_WAIT_S = 8.0  # reports of NaN or Inf from other ranks
MAX_REPLICA_WAIT_S = 2.0  # checksums of other members

# Errors of the times that are reported.
REPORT_JITTER_S = 0.25  # heartbeats that are delayed differently shift them
REPORT_MARGIN_S = 0.3  # a report that comes so much later includes all that preceded the first one
DETECTION_DELAY_S = 1.0  # a peer may notice a closed connection this long before an exit is seen
PEER_ERROR_DELAY_S = 2.0  # an error about a peer follows other failures up to this much later

# Failures.
FAILED_SOON_S = 5.0  # a failure this soon after a mismatched call is taken to be its consequence
TEARDOWN_S = 3.0  # launchers end all processes within this time
MIN_VICTIM_WAIT_S = 3.0  # a rank that aborts sooner, and alone, was not ended because of its peers

# Readings of hardware.
REREAD_AFTER_S = 60.0  # between two readings of a host for one verdict
# An event this long before the onset may still be the cause: ranks may have had work queued.
EVENT_BEFORE_ONSET_S = 120.0

# Process states in /proc: stopped, and all in which a thread does not run.
STOPPED_STATES = frozenset("Tt")
NOT_RUNNING_STATES = STOPPED_STATES | {"D"}


@dataclass(slots=True, kw_only=True)
class Limits:
    """The time limits, in seconds, that the server's settings and the diagnosis share."""

    stall_after_s: float = 60.0
    slow_limit_s: float = 360.0
    startup_after_s: float = 300.0  # how long ranks may take to start before it is an alert
    # After a first death, the last reports of other ranks may be in transit for this long.
    settle_s: float = 1.5
    # The time between two heartbeats of a host. It grows with the number of hosts, to bound the
    # server's load.
    report_interval_s: float = 0.5

    @property
    def suspicion_delay_s(self) -> float:
        """When to start to request evidence: early enough for two samples before the verdict is due."""
        return max(self.stall_after_s / 2, self.stall_after_s - 10.0)

    @property
    def lost_after_s(self) -> float:
        """The time without a heartbeat after which a node agent's last report is outdated."""
        late_at_s = self.report_interval_s + min(self.report_interval_s, LATE_BY_S)
        return max(min(10.0, self.stall_after_s / 2), late_at_s)
