"""Replies to the server's commands: a bounded queue that drops and counts the oldest ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from hangwatch.protocol.hardware import HardwareReply
from hangwatch.protocol.heartbeat import CallsReply, Heartbeat, StackReply

MAX_REPLIES = 256
MAX_HARDWARE_REPLIES = 8
MAX_FRAMES = 50_000  # of all stacks together: a few megabytes


@dataclass(slots=True)
class Outbox:
    """Keeps each reply until the server has acknowledged the heartbeat that carried it."""

    max_replies: int = MAX_REPLIES
    dropped_count: int = 0
    _samples: deque[tuple[StackReply, int]] = field(default_factory=deque)
    _calls: deque[CallsReply] = field(default_factory=deque)
    _hardware: deque[tuple[HardwareReply, int]] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self._samples or self._calls or self._hardware)

    def add_sample(self, sample: StackReply, taken_ns: int) -> None:
        self._samples.append((sample, taken_ns))
        while self._has_too_many_samples():
            self._samples.popleft()
            self.dropped_count += 1

    def _has_too_many_samples(self) -> bool:
        if len(self._samples) > self.max_replies:
            return True
        return self._frame_count > MAX_FRAMES and len(self._samples) > 1

    def add_calls(self, reply: CallsReply) -> None:
        self._calls.append(reply)
        while len(self._calls) > self.max_replies:
            self._calls.popleft()
            self.dropped_count += 1

    def add_hardware(self, reply: HardwareReply, taken_ns: int) -> None:
        self._hardware.append((reply, taken_ns))
        while len(self._hardware) > MAX_HARDWARE_REPLIES:
            self._hardware.popleft()
            self.dropped_count += 1

    @property
    def _frame_count(self) -> int:
        return sum(len(thread.frames) for sample, _ in self._samples for thread in sample.threads)

    def pending_samples(self, now_ns: int) -> tuple[StackReply, ...]:
        """All samples, with their ages as of now."""
        return tuple(
            replace(sample, taken_s=max(0, now_ns - taken_ns) / 1e9)
            for sample, taken_ns in self._samples
        )

    def pending_hardware(self, now_ns: int) -> tuple[HardwareReply, ...]:
        """All readings of the hardware, with their ages as of now."""
        return tuple(
            replace(reply, taken_s=max(0, now_ns - taken_ns) / 1e9)
            for reply, taken_ns in self._hardware
        )

    def pending_calls(self) -> tuple[CallsReply, ...]:
        return tuple(self._calls)

    def mark_delivered(self, heartbeat: Heartbeat) -> None:
        """Removes the replies that a heartbeat carried."""
        sent = {(sample.key, sample.request) for sample in heartbeat.samples}
        self._samples = deque(
            entry for entry in self._samples if (entry[0].key, entry[0].request) not in sent
        )
        answered = {id(reply) for reply in heartbeat.calls}
        self._calls = deque(reply for reply in self._calls if id(reply) not in answered)
        reported = {reply.request for reply in heartbeat.hardware}
        self._hardware = deque(
            entry for entry in self._hardware if entry[0].request not in reported
        )
