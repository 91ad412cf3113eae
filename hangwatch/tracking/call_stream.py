"""One rank's position in one stream of calls, what the members of a group have in common, and the
running hashes that ranks report.

Ranks that report the same hashes share them in memory: of 100,000, nearly all do. A history is sorted
by sequence number, whatever the order in which its hashes arrived: a reply to a request has hashes
that are older than those held. A long history is thinned and never cut: the newest multiples of each
power of two stay, and all powers of two. So two ranks have positions in common however far one is
ahead of the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hangwatch.model.calls import GRAPH_REPLAY, Call, Loss, StreamKind, decode_invalid_peer
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.verdicts import DeviceProgress

HashPair = tuple[int, int]  # a sequence number, and the running hash after that call
Hashes = tuple[HashPair, ...]  # the newest last

CALLS_KEPT = 256  # in each stream
# Completed calls kept per stream while none were requested. A job whose calls each take a while
# reports all of them.
FINISHED_CALLS_KEPT = 2
# Former calls kept where they cannot be requested any more, or may not be complete: those of a process
# that has exited and, in a small job, those of a stream whose completions nothing reports.
LAST_CALLS_KEPT = 8
SMALL_JOB_RANKS = 1024

# Reference hashes kept of each group.
REFERENCES_KEPT, REFERENCES_KEPT_PER_MEMBER = 16, 2

# If a job has at most this many suspected ranks, any of them may be where the hang began.
MAX_URGENT_SUSPECTS = 64

# The calls of at most this many members (one for each distinct hash) are requested after a divergence,
# and only within this time.
MAX_REQUESTED_SIDES = 4
SIDE_REQUEST_WINDOW_S = 15.0

# Calls before the first difference that are kept with it: they show how it came about.
CALLS_KEPT_BEFORE_DIFFERENCE = 64
_MAX_WINDOWS_KEPT = 16

MAX_PAIRS = 96  # a history with more is thinned
# A thinned history has the newest positions, and the newest multiples of each power of two.
NEWEST_KEPT, MULTIPLES_KEPT = 16, 4
MAX_PINNED_PAIRS = 512
# The number of shared reports, and of histories, per rank of the job and at most. A job that runs for
# long has new ones all the time.
SHARED_PER_RANK, MAX_SHARED = 2, 4096
_PAIRS_PER_REPORT = 8
_MAX_LEVEL = 64  # no sequence number is a multiple of a higher power of two


@dataclass(frozen=True, slots=True)
class CallWindow:
    """The calls from ``first`` to ``last`` whose sequence number is a multiple of ``step``, a power of
    two. A request to a node agent and the answer each cover such a window.
    """

    first: int
    last: int
    step: int = 1

    def covers(self, other: CallWindow) -> bool:
        is_within = self.first <= other.first and other.last <= self.last
        return is_within and other.step % self.step == 0


@dataclass(frozen=True, slots=True)
class DivergenceBounds:
    """The calls between which the members of a group began to differ. Up to ``last_equal`` all sides are
    known to have made equal calls; their running hashes differ at ``first_different``.
    """

    last_equal: int
    first_different: int

    @property
    def is_exact(self) -> bool:
        """Whether call ``first_different`` is the first that differs."""
        return self.first_different == self.last_equal + 1


# Shared by all streams without a known call: an empty dictionary for each takes 64 bytes.
_NO_CALLS: Mapping[int, Call] = MappingProxyType({})


@dataclass(slots=True, kw_only=True, eq=False)
class CallStream:
    """One rank's position in one stream of calls. Times are on the server's monotonic clock."""

    uid: int
    kind: StreamKind
    group: Group
    peer: int | None = None
    tag: int | None = None
    member_peer: int | None = None  # the peer's number in a foreign group
    entered: int = 0
    completed: int | None = None
    op: str = ""
    entered_at: float = 0.0
    pending_at: float | None = None
    # The time at which the newest call was entered, as of the last progress: all earlier calls had
    # completed by then.
    advanced_at: float = 0.0
    # The last report of a completion. The call completed at this time or before.
    last_completion_at: float = 0.0
    # The number of calls before the last reported increase, and the time of that report, for a channel
    # whose peer is blocked.
    last_growth: tuple[int, float] = (0, 0.0)
    reported_hashes: Hashes = ()
    # The calls whose arguments are known, by sequence number. The mapping is often shared: only
    # `add_call` and `drop_old_calls` change it.
    calls: Mapping[int, Call] = field(default_factory=lambda: _NO_CALLS)
    # The last calls of two threads that made calls at the same time.
    concurrent_calls: tuple[Call, ...] = ()
    concurrent_at: float = 0.0
    loss: Loss | None = None  # set once a call was not recorded
    is_closed: bool = False  # the group is gone on this rank
    # The requests that its node agent has answered, whether or not it still had the calls.
    answered: tuple[CallWindow, ...] = ()
    # How far the device is in a group's collectives, where the backend reports it.
    device: DeviceProgress | None = None
    # How many more calls the host had made than the backend counted, when the device had last completed
    # all of them: a coalesced block counts as one.
    uncounted_calls: int | None = None
    # Whether a replay of a CUDA graph is among its calls. The backend counts no replay, so that the
    # number of calls that it does not count grows.
    has_replays: bool = False
    # The time at which the device was last seen to begin or complete a collective of the group, or to
    # have work again after it had completed the collectives of all groups.
    device_changed_at: float = 0.0
    group_state: GroupState | None = None  # None for point-to-point calls and former processes
    # The peer's stream of the same channel, for a send or a receive that names its peer.
    other_end: CallStream | None = None

    def is_counted(self, seq: int) -> bool:
        """Whether the number ``seq`` means the same call as on other ranks: nothing was lost before."""
        return self.loss is None or seq < self.loss.from_seq

    def add_call(self, call: Call) -> None:
        if self.calls is _NO_CALLS:
            self.calls = {}
        assert isinstance(self.calls, dict)
        self.calls[call.seq] = call

    def drop_old_calls(self, finished_kept: int) -> None:
        """Drops all finished calls but the newest ``finished_kept`` and those around a divergence of the
        group. Unfinished ones are kept, as the other members may wait in the first of them: only the
        oldest of more than `CALLS_KEPT` go.
        """
        if len(self.calls) <= finished_kept:
            return
        seqs = sorted(self.calls)
        pinned = []
        if self.group_state is not None:
            first, last = self.group_state.pinned_seqs
            first -= CALLS_KEPT_BEFORE_DIFFERENCE
            pinned = [seq for seq in seqs if first <= seq <= last][-CALLS_KEPT:]
        others = sorted(set(seqs).difference(pinned))
        finished_count = bisect_left(others, self.first_unfinished)
        dropped_count = max(0, finished_count - finished_kept, len(others) - CALLS_KEPT)
        kept = sorted([*pinned, *others[dropped_count:]])
        self.calls = {seq: self.calls[seq] for seq in kept}

    def drop_spare_calls(self) -> int:
        """For lack of memory, drops all calls but the one it may wait in and the newest `LAST_CALLS_KEPT`. They
        may be requested again. Returns how many.
        """
        seqs = sorted(self.calls)
        kept = {self.first_unfinished, *seqs[-LAST_CALLS_KEPT:]}.intersection(seqs)
        if len(kept) < len(seqs):
            self.calls = {seq: self.calls[seq] for seq in sorted(kept)}
            self.answered = ()
        return len(seqs) - len(kept)

    def add_answer(self, window: CallWindow) -> None:
        """Records that the node agent has answered a request for these calls."""
        others = [other for other in self.answered if not window.covers(other)]
        self.answered = (*others, window)[-_MAX_WINDOWS_KEPT:]

    def has_answered(self, window: CallWindow) -> bool:
        """Whether the node agent has sent these calls, as far as it still had them."""
        return any(answer.covers(window) for answer in self.answered)

    @property
    def given_peer(self) -> int | None:
        """The peer as its calls name it, whether or not it is a rank."""
        argument = decode_invalid_peer(self.peer)
        return self.peer if argument is None else argument

    @property
    def is_pending(self) -> bool:
        """Whether a call is known to be unfinished. False where completion is not observable."""
        return self.completed is not None and self.completed < self.entered

    @property
    def blocks_thread(self) -> bool:
        """Whether the calling thread is inside the newest call: it is blocking and unfinished."""
        newest = self.calls.get(self.entered)
        return self.is_pending and newest is not None and newest.blocking is True

    @property
    def ends_with_replay(self) -> bool:
        """Whether the newest call is a replay of a CUDA graph, whose completion nothing reports."""
        return self.op == GRAPH_REPLAY

    @property
    def is_executed(self) -> bool:
        """Whether the device had completed all calls when it was last read, after the newest one."""
        device = self.device
        if device is None or device.is_behind_host or self.ends_with_replay:
            return False
        return device.enqueued >= 0 and device.read_at > self.entered_at

    @property
    def hashes_by_seq(self) -> dict[int, int]:
        """The reported running hashes, by sequence number.

        The dictionary is built on each access: storing pairs that all members share takes a tenth of
        the memory.
        """
        return dict(self.reported_hashes)

    @property
    def first_unfinished(self) -> int:
        """The sequence number of the call it may wait in; the newest if completion is unknown."""
        return self.entered if self.completed is None else self.completed + 1


StreamsByRank = dict[int, CallStream]


def list_histories(streams: Iterable[CallStream]) -> list[Hashes]:
    """The different histories of running hashes: a few dozen, if 100,000 members share them."""
    return list({id(s.reported_hashes): s.reported_hashes for s in streams}.values())


@dataclass(slots=True, kw_only=True)
class GroupState:
    """The members of a process group with their streams, and the running hashes they share."""

    key: GroupKey
    size: int  # the number of all members, reporting or not
    members: StreamsByRank = field(default_factory=dict)
    # The members of a foreign group that are ranks of other attempts, by `OutsideMember`.
    outside: StreamsByRank = field(default_factory=dict)
    # The first running hash that was reported of each call, by sequence number.
    reference_hashes: dict[int, int] = field(default_factory=dict)
    forgotten_up_to: int = 0  # the highest sequence number dropped from `reference_hashes`
    # The last shared report that matched the reference. Others are often the same.
    latest_match: Hashes = ()
    passed_by_all: int = 0  # every member is known to have entered this many calls
    laggard: CallStream | None = None  # the member that had entered no more than that
    diverged_at: float = 0.0
    # The calls at which members began to differ, as far as is known.
    divergence: DivergenceBounds | None = None
    narrowed_at: float = 0.0  # when that last became known better
    # The first sequence number at which hashes differ, as known when the divergence was found.
    diverged_seq: int = 0
    # The member whose calls were requested, by its hash of call `diverged_seq`.
    streams_by_side: dict[int, CallStream] = field(default_factory=dict)
    closed_count: int = 0  # members whose stream is closed
    has_losses: bool = False  # some member's calls are not completely recorded

    @property
    def diverged(self) -> bool:
        """Whether members reported different running hashes of one call."""
        return self.divergence is not None

    @property
    def pinned_seqs(self) -> tuple[int, int]:
        """The sequence numbers between which running hashes are kept, however old; both 0 if nowhere."""
        divergence = self.divergence
        if divergence is None:
            return 0, 0
        return divergence.last_equal, divergence.first_different

    def match_hashes(self, report: Hashes) -> bool:
        """Whether no member has reported other hashes. ``report`` is shared: see `HashHistories`."""
        if report is self.latest_match:
            return True
        all_match = True
        reference = self.reference_hashes
        for seq, value in report:
            known = reference.get(seq)
            if known is None:
                reference[seq] = value
                all_match &= seq > self.forgotten_up_to
            elif known != value:
                all_match = False
        capacity = REFERENCES_KEPT + REFERENCES_KEPT_PER_MEMBER * self.size
        if len(reference) > capacity:
            self.forget_references(sorted(reference)[: capacity // 2])
        if all_match:
            self.latest_match = report
        return all_match

    def forget_references(self, seqs: Iterable[int]) -> None:
        """Drops reference hashes. Members may have reported others that are equal: the next report of
        such a call is compared with all of theirs.
        """
        for seq in seqs:
            self.forgotten_up_to = max(self.forgotten_up_to, seq)
            del self.reference_hashes[seq]
        self.latest_match = ()

    def has_member_behind(self, stream: CallStream) -> bool:
        """Whether some member is not known to have entered the newest call of ``stream``."""
        if self.has_losses:
            return True
        if stream.entered <= self.passed_by_all:
            return False
        if len(self.members) + len(self.outside) < self.size:
            return True
        if any(other.entered < stream.entered for other in self.outside.values()):
            return True
        if self.laggard is None or self.laggard.entered >= stream.entered:
            self.laggard = min(self.members.values(), key=lambda s: s.entered)
            self.passed_by_all = self.laggard.entered
        return stream.entered > self.passed_by_all

    @property
    def all_members(self) -> StreamsByRank:
        """The members, with those that are ranks of other attempts."""
        return {**self.members, **self.outside} if self.outside else self.members

    @property
    def is_urgent(self) -> bool:
        """Whether the group diverged and is so small that any member's next report may decide."""
        return self.diverged and self.size <= MAX_URGENT_SUSPECTS

    def register_side(self, stream: CallStream, now: float) -> bool:
        """Whether to request the calls of ``stream``, which is then registered for its side.

        True if the members diverged recently, and the calls of no other one with the same hash at
        the divergence were requested.
        """
        is_late = now - self.diverged_at > SIDE_REQUEST_WINDOW_S
        if is_late or len(self.streams_by_side) >= MAX_REQUESTED_SIDES:
            return False
        value = stream.hashes_by_seq.get(self.diverged_seq)
        if value is None or value in self.streams_by_side:
            return False
        self.streams_by_side[value] = stream
        return True

    def remove_member(self, rank: int) -> None:
        """Removes a rank whose process was replaced: the new process counts calls from 1 again, and
        the reference may have hashes that only the former one reported.
        """
        removed = self.members.pop(rank)
        removed.group_state = None
        self.closed_count -= removed.is_closed
        self.has_losses = any(stream.loss is not None for stream in self.members.values())
        self.passed_by_all = 0
        self.laggard = None
        self.forget_references(list(self.reference_hashes))
        for value, stream in list(self.streams_by_side.items()):
            if stream is removed:
                del self.streams_by_side[value]


def merge_hashes(history: Hashes, report: Hashes) -> Hashes:
    """The hashes of both, by position. Where both have one, the report's counts.

    >>> merge_hashes(((4, 44), (90, 990)), ((89, 989), (90, 990)))
    ((4, 44), (89, 989), (90, 990))
    """
    if not history or not report or history[-1][0] < report[0][0]:
        return (*history, *report)
    return tuple(sorted((dict(history) | dict(report)).items()))


def thin_hashes(history: Hashes, pinned: tuple[int, int]) -> Hashes:
    """The history without pairs that are neither among the newest, nor at a power of two or one of its
    newest multiples, nor from the first to the last sequence number that is ``pinned``.
    """
    first_pinned, last_pinned = pinned
    kept = []
    # How many newer positions are multiples of each power of two, by its exponent.
    counts = [0] * (_MAX_LEVEL + 1)
    pinned_count = 0
    for index, pair in enumerate(reversed(history)):
        seq = pair[0]
        level = _MAX_LEVEL
        if seq:
            level = min((seq & -seq).bit_length() - 1, _MAX_LEVEL)
        is_pinned = first_pinned <= seq <= last_pinned and pinned_count < MAX_PINNED_PAIRS
        pinned_count += is_pinned
        is_aligned = counts[level] < MULTIPLES_KEPT or seq == 1 << level
        if index < NEWEST_KEPT or is_aligned or is_pinned:
            kept.append(pair)
        for exponent in range(level + 1):
            counts[exponent] += 1
    kept.reverse()
    return tuple(kept)


@dataclass(slots=True)
class HashHistories:
    """The histories of all streams of a job: each is what the reports of one stream had."""

    capacity: int = SHARED_PER_RANK  # the number of shared reports, and of histories
    _pairs: dict[HashPair, HashPair] = field(default_factory=dict)
    _reports: dict[Hashes, Hashes] = field(default_factory=dict)
    # A history, the report that follows it and the new history, by the identities of the first two and
    # the pinned positions.
    _extended: dict[tuple[object, ...], tuple[Hashes, ...]] = field(default_factory=dict)

    def set_rank_count(self, count: int) -> None:
        self.capacity = min(MAX_SHARED, SHARED_PER_RANK * count)

    def share_report(self, report: Hashes) -> Hashes:
        """The report that is shared by all that are equal to this one."""
        shared = self._reports.get(report)
        if shared is None:
            if len(self._reports) >= self.capacity:
                self._reports.clear()
            if len(self._pairs) >= _PAIRS_PER_REPORT * self.capacity:
                self._pairs.clear()
            # Reports of other times differ, but have many pairs in common.
            shared = tuple([self._pairs.setdefault(pair, pair) for pair in report])
            self._reports[shared] = shared
        return shared

    def extend_history(
        self, history: Hashes, report: Hashes, pinned: tuple[int, int] = (0, 0)
    ) -> Hashes:
        """The history with a shared report; thinned if it has become long, see `thin_hashes`."""
        key = (id(history), id(report), pinned)
        extended = self._extended.get(key)
        if extended is not None:
            return extended[2]
        if len(self._extended) >= self.capacity:
            self._extended.clear()
        after = merge_hashes(history, report)
        if len(after) > MAX_PAIRS:
            after = thin_hashes(after, pinned)
        # The entry keeps both alive, so that no other object has their identities.
        self._extended[key] = (history, report, after)
        return after
