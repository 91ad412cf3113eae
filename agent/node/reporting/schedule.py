"""When the next heartbeat is due. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.protocol.heartbeat import HeartbeatReply

# Between two heartbeats that are sent before their time because a rank is in a call for long.
EARLY_INTERVAL_NS = 1_000_000_000


@dataclass(slots=True)
class HeartbeatSchedule:
    """Times are nanoseconds on the monotonic clock."""

    next_ns: int
    _unsteady_ns: int = 1 << 63  # when it is due if the host does not remain steady
    _next_early_ns: int = 0

    def set_next(self, at_ns: int) -> None:
        self.next_ns = self._unsteady_ns = at_ns

    def apply_reply(self, reply: HeartbeatReply, now_ns: int, *, is_steady: bool) -> None:
        self.set_next(now_ns + int(reply.interval_s * 1e9))
        if is_steady and reply.steady_s is not None:
            self.next_ns = now_ns + int(reply.steady_s * 1e9)

    def bring_forward(self, at_ns: int) -> None:
        """It is due then at the latest."""
        self.next_ns = min(self.next_ns, at_ns)

    def end_steadiness(self) -> None:
        self.bring_forward(self._unsteady_ns)

    def bring_forward_once(self, now_ns: int) -> None:
        """It is due now, unless another one was brought forward in this way shortly before."""
        if now_ns >= self._next_early_ns:
            self._next_early_ns = now_ns + EARLY_INTERVAL_NS
            self.bring_forward(now_ns)
