"""The state of one training process, as reported by its node agent.

Times (``_at``) are in seconds on the server's monotonic clock.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from sys import getsizeof
from typing import TYPE_CHECKING

from hangwatch.model.bounds import limit_texts
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.incidents import FlightFile
from hangwatch.model.kernels import MAX_KERNEL_NAME_CHARS, MAX_KERNELS, Kernels
from hangwatch.model.limits import (
    BUSY_WITHIN_S,
    FROZEN_AFTER_S,
    FROZEN_CPU_S,
    MIN_WAIT_S,
    NOT_RUNNING_STATES,
    REPORT_JITTER_S,
    STOPPED_STATES,
)
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, Lifecycle, ThreadStack
from hangwatch.protocol.heartbeat import KernelsReply, ProcessIdentity, StackReply
from hangwatch.stacks.activities import find_calling_thread, find_thread_without_calls

from .call_stream import MAX_URGENT_SUSPECTS, CallStream, DivergenceBounds

if TYPE_CHECKING:
    from .attempt import Attempt

# The kind, the peer and the tag of a point-to-point channel.
ChannelKey = tuple[StreamKind, int | None, int | None]

# A rank that is idle for this long may be in a call that is not recorded, if it misses some.
_UNRECORDED_AFTER_S = 3.0
# A call whose completion nothing reports is suspected after this time. Most jobs make another before.
_UNCOUNTED_AFTER_S = 3.0

# What is kept of one sample of a process. Node agents send at most so many frames of a thread, and real
# processes have a tenth of the others.
MAX_FRAMES_KEPT, MAX_THREADS_KEPT, MAX_SAMPLE_FRAMES = 500, 2000, 5000
MAX_FUNCTION_CHARS, MAX_FILE_CHARS, MAX_ERROR_CHARS, MAX_IDS_KEPT = 256, 512, 2048, 1024
_FRAME_BYTES = 160  # a frame takes as many besides its texts

SAMPLES_KEPT_PER_PROCESS = 4
_EXAMINED_KEPT = 2  # two show a hold

IDLE_AFTER_S = 1.0  # a thread that used no CPU for this long is waiting

INTERRUPT = "KeyboardInterrupt"  # the exception that Ctrl-C raises

STOPPED_AFTER_S = 1.5  # longer than py-spy stops a process while it samples a stack


class FreezeReason(str, enum.Enum):
    """Why a live process runs no Python."""

    STOPPED = "stopped"
    UNINTERRUPTIBLE = "uninterruptible"
    GIL_HELD = "gil held"


@dataclass(slots=True, kw_only=True)
class ReportTimes:
    """When the server received reports about a process."""

    last_seen_at: float  # everything known of it was still true at this time
    previously_seen_at: float = 0.0  # the time of the heartbeat before the last, of any kind
    # The last terse heartbeat, which reports progress without positions: the process may be further
    # than its streams show.
    last_progress_at: float = 0.0
    # The last heartbeat that the server refused: the process runs, its positions are not updated.
    last_refused_at: float = 0.0
    updated_at: float = 0.0  # the last heartbeat with an update of this process

    @property
    def agent_seen_at(self) -> float:
        """When its node agent last sent a heartbeat, accepted or not."""
        return max(self.last_seen_at, self.last_progress_at, self.last_refused_at)


@dataclass(slots=True, kw_only=True)
class ProcessActivity:
    """Whether a process runs, as the kernel and the recorder's thread show it."""

    state: str = "?"  # one letter, as in /proc/PID/stat
    state_since: float = 0.0
    # When the recorder's thread last ran Python. It runs ten times a second, and the node agent
    # reports its last run every second.
    pulse_at: float | None = None
    # When the main thread, or the thread of the newest call, last used a CPU or was ready to run.
    last_active_at: float = 0.0
    cpu_s: float = 0.0
    cpu_at_pulse_s: float = 0.0  # `cpu_s` when the recorder's thread was last seen running


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase that the training script declared with `hangwatch.phase`."""

    name: str
    began_at: float
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class MessageMark:
    """The counters of the device when they were first read after the newest send or receive. All that
    is queued beyond them was queued after that message.
    """

    message_at: float  # when the host queued it
    enqueued: Mapping[int, int]  # the counters by stream uid; empty: they were not read since


def _limit_frame(frame: Frame) -> Frame:
    texts = (frame.file, frame.text or "", frame.handler or "", frame.polls or "")
    is_short = max(map(len, texts)) <= MAX_FILE_CHARS
    if is_short and len(frame.function) <= MAX_FUNCTION_CHARS:
        return frame
    return Frame(
        function=frame.function[:MAX_FUNCTION_CHARS],
        file=frame.file[-MAX_FILE_CHARS:],  # the end says what the file is
        line=frame.line,
        text=frame.text and frame.text[:MAX_FILE_CHARS],
        handler=frame.handler and frame.handler[:MAX_FILE_CHARS],
        polls=frame.polls and frame.polls[:MAX_FILE_CHARS],
    )


def is_of_world(group: Group) -> bool:
    """Whether torch made the group in a world, and destroys it with that world."""
    return not (group.is_declared or group.foreign)


def estimate_bytes(frames: Iterable[Frame]) -> int:
    """The memory of frames. Each text is an object of its own, and so is the thread that has them."""
    size = _FRAME_BYTES
    for frame in frames:
        size += _FRAME_BYTES + getsizeof(frame.function) + getsizeof(frame.file)
        for text in (frame.text, frame.handler, frame.polls):
            if text is not None:  # only the innermost ones have them
                size += getsizeof(text)
    return size


@dataclass(slots=True, kw_only=True)
class StackSample:
    """The stacks of a process at one moment."""

    source: str
    taken_at: float
    native: bool = False
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None
    size_bytes: int = 0  # the approximate memory that it takes

    @classmethod
    def from_reply(cls, reply: StackReply, now: float) -> StackSample:
        """The sample in a heartbeat that was received at ``now``, without what exceeds the limits."""
        threads = []
        frame_count = 0
        for thread in reply.threads[:MAX_THREADS_KEPT]:
            max_frames = min(MAX_FRAMES_KEPT, MAX_SAMPLE_FRAMES - frame_count)
            innermost = tuple(map(_limit_frame, thread.frames[:max_frames]))
            frame_count += len(innermost)
            limited = replace(
                thread,
                thread=thread.thread[:MAX_FUNCTION_CHARS],
                frames=innermost,
                error=thread.error and thread.error[:MAX_FILE_CHARS],
                awaited_by=thread.awaited_by[:MAX_IDS_KEPT],
                called_uids=thread.called_uids[:MAX_IDS_KEPT],
            )
            threads.append(limited)
        return cls(
            source=reply.source[:MAX_FUNCTION_CHARS],
            taken_at=now - reply.taken_s,
            native=reply.native,
            threads=tuple(threads),
            error=reply.error and reply.error[:MAX_ERROR_CHARS],
            size_bytes=sum(estimate_bytes(thread.frames) for thread in threads),
        )

    @property
    def calling_thread(self) -> ThreadStack | None:
        return self.find_caller(None)

    def find_caller(self, stream: CallStream | None) -> ThreadStack | None:
        """The thread that makes the calls of this stream or, without one, of all streams."""
        return find_calling_thread(self.threads, stream.uid if stream is not None else 0)

    @property
    def is_examined(self) -> bool:
        """Whether it shows if the device holds the calling thread, see `ThreadStack.device_hold`."""
        return any(thread.device_hold is not None for thread in self.threads)

    @property
    def gil_holder(self) -> ThreadStack | None:
        for thread in self.threads:
            if thread.holds_gil and thread.pid is None:
                return thread
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """The kernels on the devices of a process at one moment, or why they are not known."""

    source: str
    taken_at: float
    kernels: Kernels = ()
    error: str | None = None

    @classmethod
    def from_reply(cls, reply: KernelsReply, now: float) -> KernelSample:
        """The sample in a heartbeat that was received at ``now``, without what exceeds the limits."""
        kernels = reply.kernels[:MAX_KERNELS]
        return cls(
            source=reply.source[:MAX_FUNCTION_CHARS],
            taken_at=now - reply.taken_s,
            kernels=limit_texts(kernels, MAX_KERNEL_NAME_CHARS),
            error=reply.error and reply.error[:MAX_ERROR_CHARS],
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One training process of an attempt, the current holder of its rank or a former one.

    Its exit has no object of its own, which would cost memory for each of 100,000 that run.
    """

    attempt: Attempt = field(repr=False)
    key: str
    host: str
    agent: str = ""  # the node agent that reports it
    owner: str = ""  # see `Heartbeat.owner`; the agent if it has none
    identity: ProcessIdentity
    started_at: float
    reports: ReportTimes
    activity: ProcessActivity = field(default_factory=ProcessActivity)
    lifecycle: Lifecycle = Lifecycle.ALIVE
    step: int | None = None
    phase: Phase | None = None
    dropped_records: int = 0  # calls and streams that were lost and whose place is not known
    recorder_faults: tuple[str, ...] = ()  # the recorder's messages about its own errors
    overflows: int = 0  # calls with non-finite values under loss scaling
    exit: ExitInfo | None = None
    exited_at: float | None = None
    exception: ExceptionInfo | None = None
    exception_at: float | None = None
    # The exception that a thread of it is handling while it makes no calls, as in a ``finally`` clause.
    handling: ExceptionInfo | None = None
    device_setting: str = ""  # see `ProcessUpdate.device_setting`
    # The time for which its device made no progress, as of the last reading of its counters.
    device_still_s: float = float("inf")
    message_mark: MessageMark | None = None  # set where the device's counters are reported
    flight_file: FlightFile | None = None  # the file that its watchdog wrote
    streams: dict[int, CallStream] = field(default_factory=dict)  # the key is the uid
    channels: dict[ChannelKey, list[CallStream]] = field(default_factory=dict)
    added_streams: int = 0  # the number of streams that were ever reported
    has_lost_ring: bool = False  # calls could not be read for a time
    opened_streams: int = 0  # the number that its recorder opened
    newest_call_at: float = 0.0  # when it last entered a call
    unfinished_streams: tuple[CallStream, ...] = ()  # some call is not reported as complete
    blocked_streams: tuple[CallStream, ...] = ()  # streams with `CallStream.blocks_thread`
    # The last interval in which it was blocked in a call: from when it was, or may have been,
    # blocked until its completion was reported.
    last_blocked: tuple[float, float] = (0.0, 0.0)
    has_concurrent_calls: bool = False  # two threads made calls on one group at the same time
    samples: tuple[StackSample, ...] = ()  # newest last
    kernels: KernelSample | None = None  # the newest one
    finished_reporting: bool = False  # the agent has reported all there is

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def holds_rank(self) -> bool:
        """Whether no later process has taken over its rank."""
        return self.attempt.processes.get(self.identity.rank) is self

    @property
    def is_alive(self) -> bool:
        return self.exit is None

    @property
    def misses_streams(self) -> bool:
        """Whether it may have made calls in streams, and so in groups, that are not known."""
        if self.dropped_records > 0 or self.has_lost_ring:
            return True
        return self.opened_streams > self.added_streams

    @property
    def inactive_s(self) -> float:
        """For how long it had used no CPU, and waited for none, at its last update."""
        return self.reports.updated_at - self.activity.last_active_at

    @property
    def idle_since(self) -> float:
        """The time since which it has made no call and used no CPU, as far as was reported."""
        return max(self.activity.last_active_at, self.newest_call_at, self.reports.last_progress_at)

    @property
    def last_advanced_at(self) -> float:
        """The time at which it last entered a call or a completion was reported: it was not blocked then."""
        stream_times = [max(s.entered_at, s.last_completion_at) for s in self.streams.values()]
        return max([self.reports.last_progress_at, *stream_times])

    @property
    def device_read_at(self) -> float:
        """When its device's counters were last read, of whichever group."""
        read_at = 0.0
        for stream in self.streams.values():  # A loop is fast enough for 100,000 processes.
            if stream.device is not None and stream.device.read_at > read_at:
                read_at = stream.device.read_at
        return read_at

    @property
    def device_changed_at(self) -> float:
        """When its device was last seen to begin or complete a call."""
        changed_at = 0.0
        for stream in self.streams.values():  # A loop is fast enough for 100,000 processes.
            if stream.device_changed_at > changed_at:
                changed_at = stream.device_changed_at
        return changed_at

    @property
    def newest_stream(self) -> CallStream | None:
        """The stream of its newest call; None before the first call."""
        used = [s for s in self.streams.values() if s.entered]
        return max(used, key=lambda s: (s.entered_at, s.is_pending), default=None)

    def add_sample(self, sample: StackSample) -> None:
        """Adds a sample and drops old ones. What showed that its device holds the process is kept beside
        newer samples, as of users.
        """
        samples = (*self.samples, sample)
        older = samples[:-SAMPLES_KEPT_PER_PROCESS]
        examined = [taken for taken in older if taken.is_examined]
        self.samples = (*examined[-_EXAMINED_KEPT:], *samples[-SAMPLES_KEPT_PER_PROCESS:])

    def get_kernels_since(self, since: float) -> Kernels | None:
        """The kernels on its devices, if they were read since then; None if they are not known."""
        sample = self.kernels
        if sample is None or sample.taken_at < since or sample.error is not None:
            return None
        return sample.kernels

    def find_caller(
        self, sample: StackSample, group: Group | None, since: float
    ) -> ThreadStack | None:
        """The thread that makes the calls of this group. If the process made no call there, but others
        since then, it is a thread without calls; without a group, the thread of all calls.
        """
        if group is None:
            return sample.calling_thread
        streams = [s for s in self.streams.values() if s.group.key == group.key]
        newest = max(streams, key=lambda s: s.entered_at, default=None)
        has_called = newest is not None and newest.entered
        if not has_called and self.newest_call_at > since + MIN_WAIT_S:
            other = find_thread_without_calls(sample.threads)
            if other is not None:
                return other
        return sample.find_caller(newest)

    @property
    def blocked_interval(self) -> tuple[float, float]:
        """The longest possible (start, end) of the last completed blocking wait.

        A call that was entered later proves that the wait had ended by then.
        """
        began, ended = self.last_blocked
        for stream in self.streams.values():
            if stream.entered_at > began + MIN_WAIT_S:
                ended = min(ended, stream.entered_at)
        return began, ended

    def has_left(self, group: Group) -> bool:
        """Whether it will make no more calls on ``group``: it is exiting or has exited, or it
        destroyed the groups of the same world generation or a later one.
        """
        if not self.is_alive or self.lifecycle > Lifecycle.DESTROYED:
            return True
        if self.lifecycle < Lifecycle.DESTROYED or group.foreign:
            return False
        newest = self._find_newest_generations()
        if group.is_declared or not newest:
            return True
        return newest.get(group.world_size, -1) >= group.generation

    def _find_newest_generations(self) -> dict[int, int]:
        """The newest generation of its worlds of each size."""
        newest: dict[int, int] = {}
        for stream in self.streams.values():
            group = stream.group
            if is_of_world(group):
                generation = newest.get(group.world_size, group.generation)
                newest[group.world_size] = max(generation, group.generation)
        return newest

    def refresh_streams(self) -> None:
        """Updates what is derived from `streams`. The host may still be in the newest call, even if its
        device has completed all that was queued.
        """
        newest_call_at = 0.0
        unfinished = []
        for stream in self.streams.values():
            if stream.entered_at > newest_call_at:
                newest_call_at = stream.entered_at
            if stream.completed is None or stream.completed < stream.entered:
                unfinished.append(stream)
        self.newest_call_at = newest_call_at
        unfinished = [s for s in unfinished if s.entered_at >= newest_call_at or not s.is_executed]
        if unfinished:
            # It is never known that some calls, such as gloo's reduce_scatter, are complete. But a group is
            # destroyed before its world is made again.
            newest = self._find_newest_generations()
            current = []
            for stream in unfinished:
                group = stream.group
                if not is_of_world(group) or group.generation >= newest[group.world_size]:
                    current.append(stream)
            unfinished = current
        self.unfinished_streams = tuple(unfinished)
        self.blocked_streams = tuple([s for s in unfinished if s.blocks_thread])

    @property
    def has_raised(self) -> bool:
        """Whether an exception ended its program: nothing caught it, and no call was made since. The process
        remains for as long as its threads and exit handlers take.
        """
        raised_at = self.exception_at
        return raised_at is not None and self.newest_call_at <= raised_at + REPORT_JITTER_S

    @property
    def is_interrupted(self) -> bool:
        """Whether it ends, or has ended, because it was interrupted, as by Ctrl-C. That interrupts the whole
        job as a rule, and a rank that waits in native code acts on it only after the wait.
        """
        types = [note.type for note in (self.exception, self.handling) if note is not None]
        was_signaled = self.exit is not None and self.exit.signal == signal.SIGINT
        return was_signaled or INTERRUPT in types

    @property
    def is_unable(self) -> bool:
        """Whether, by the last report, it has left or may be frozen and so may enter no call."""
        if self.exit is not None or self.lifecycle >= Lifecycle.DESTROYED:
            return True
        if self.activity.state in NOT_RUNNING_STATES:
            return True
        return self.lacks_pulse(self.reports.last_seen_at)

    def lacks_pulse(self, until: float) -> bool:
        """Whether it could not run Python for too long before ``until``: it was idle, or used the CPU in
        native code only. One that waits for a CPU could.
        """
        activity = self.activity
        if activity.pulse_at is None or until - activity.pulse_at < FROZEN_AFTER_S:
            return False
        is_idle = until - activity.last_active_at >= BUSY_WITHIN_S
        return is_idle or activity.cpu_s - activity.cpu_at_pulse_s >= FROZEN_CPU_S

    @property
    def is_blocked(self) -> bool:
        """Whether, by the last report, it has been in a call for at least `MIN_WAIT_S` that others
        have not completed, its device has come no further for as long or is not counted, or two of
        its threads use one group.
        """
        last_seen_at = self.reports.last_seen_at
        for stream in self.unfinished_streams:
            is_counted = stream.completed is not None
            waited_s = last_seen_at - stream.entered_at if stream.entered else 0.0
            # Node agents report an unfinished call's arguments only after `MIN_WAIT_S`.
            if waited_s >= MIN_WAIT_S or stream.entered in stream.calls:
                state = stream.group_state
                if is_counted or state is None or state.has_member_behind(stream):
                    return True
            device = stream.device
            if device is None or stream.ends_with_replay:
                # Perhaps nothing reports the completion of the call.
                is_late = not is_counted and waited_s >= _UNCOUNTED_AFTER_S
            else:
                still_s = device.read_at - stream.device_changed_at
                is_late = device.is_behind_host and still_s >= MIN_WAIT_S
            if is_late:
                return True
        if self.misses_streams and last_seen_at - self.idle_since >= _UNRECORDED_AFTER_S:
            return True  # The process may be in a call that is not recorded.
        return self.has_concurrent_calls

    @property
    def has_mutual_wait(self) -> bool:
        """Whether it has an unfinished send or receive with a suspected peer that has one with it."""
        attempt, rank = self.attempt, self.rank
        for stream in self.unfinished_streams:
            if stream.peer in attempt.suspects:
                peer = attempt.processes.get(stream.peer)
                if peer and any(s.peer == rank for s in peer.unfinished_streams):
                    return True
        return False

    @property
    def is_urgent(self) -> bool:
        """Whether its next report may decide a diagnosis.

        True if it is stopped (py-spy may have stopped it); if it is one of the first suspects or of
        the last ranks that are not suspected; if it and another rank wait for each other; or if it
        is a member of a small group that diverged.
        """
        attempt = self.attempt
        suspects, diverged_groups = attempt.suspects, attempt.diverged_groups
        if not suspects and not diverged_groups:
            return False
        if self.rank in suspects:
            is_stopped = self.activity.state in STOPPED_STATES
            if is_stopped or len(suspects) <= MAX_URGENT_SUSPECTS or self.has_mutual_wait:
                return True
        elif 2 * len(suspects) > len(attempt.processes):
            return True
        return bool(diverged_groups) and any(
            stream.group_state is not None and stream.group_state.is_urgent
            for stream in self.streams.values()
        )

    @property
    def needs_wait_sample(self) -> bool:
        """Whether a mutual wait that it seems to be in lacks a stack sample since its last call."""
        if self.rank not in self.attempt.suspects or self.inactive_s < IDLE_AFTER_S:
            return False
        if not self.has_mutual_wait:
            return False
        last_advanced_at = self.last_advanced_at
        return all(sample.taken_at < last_advanced_at for sample in self.samples)

    def iter_new_sides(self) -> Iterator[tuple[CallStream, DivergenceBounds]]:
        """The streams whose calls should be requested after a recent divergence, and where that is.
        Each stream represents its side of the divergence, and is returned once.
        """
        if not self.attempt.diverged_groups:
            return
        for stream in self.streams.values():
            state = stream.group_state
            if state is None or state.divergence is None:
                continue
            if state.register_side(stream, self.attempt.last_seen_at):
                yield stream, state.divergence

    def freeze_reason(self, now: float) -> FreezeReason | None:
        """Why it cannot run Python, if that has lasted too long to be chance; None otherwise.

        Without current heartbeats, the answer is that of the last report.
        """
        activity, last_seen_at = self.activity, self.reports.last_seen_at
        state_s = min(now, last_seen_at) - activity.state_since
        if activity.state in STOPPED_STATES and state_s >= STOPPED_AFTER_S:
            return FreezeReason.STOPPED
        # In state D, a thread is active while it reads or writes data.
        is_idle = last_seen_at - activity.last_active_at >= FROZEN_AFTER_S
        if activity.state == "D" and state_s >= FROZEN_AFTER_S and is_idle:
            return FreezeReason.UNINTERRUPTIBLE
        runs_python = self.is_alive and self.lifecycle < Lifecycle.EXITING
        if runs_python and self.lacks_pulse(last_seen_at):
            return FreezeReason.GIL_HELD
        return None
