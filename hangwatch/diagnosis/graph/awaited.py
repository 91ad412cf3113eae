"""Whom a call waits for: by counts of calls, never by times."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import unpack_ranks
from hangwatch.model.ranks import Lifecycle
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState


class WaitResolver:
    """The ranks of an attempt, as those who wait for them see them at one moment.

    ``out`` are those who cannot finish a call that they are in.
    """

    def __init__(self, attempt: Attempt, now: float, silent_ranks: Collection[int]) -> None:
        self.unable_to_finish = {
            rank
            for rank in attempt.unable_ranks
            if not (process := attempt.processes[rank]).is_alive
            or process.freeze_reason(now) is not None
        }
        self._attempt = attempt
        self._silent_ranks = silent_ranks
        # By team, the members concerned where not all are, the call, and whether that is certain.
        # (A team's key is as long as it is large.)
        self._awaited_cache: dict[
            tuple[int, tuple[int, ...] | None, int, bool], Mapping[int, int]
        ] = {}

    def find_awaited_ranks(self, rank: int, stream: CallStream, certain: bool) -> Mapping[int, int]:
        """The ranks without which a sequence cannot go on, each with the first call of it that the
        rank has not entered.

        A thread blocked in the newest call needs all who are behind; else it may sit in any
        unfinished call, and needs at least those who are furthest behind. Those who are silent may
        be anywhere: they are awaited where they were last seen behind, or where nobody else is. All
        in the same call of a group share one mapping.
        """
        kind, team = stream.kind, stream.group_state
        concerned = None
        if kind is StreamKind.SETUP:
            concerned = get_new_group_ranks(stream, stream.entered)
        elif kind is not StreamKind.COLLECTIVE:
            if receives_from_any(stream):
                return _find_awaited_senders(self._attempt, rank, stream)
            awaited = _find_awaited_peer(self._attempt, rank, stream)
            if not awaited and stream.peer is not None and stream.peer in self._silent_ranks:
                return {stream.peer: stream.entered}
            return awaited
        by = (id(team), concerned, stream.entered, certain)
        if (shared := self._awaited_cache.get(by)) is None:
            self._awaited_cache[by] = shared = self._find_awaited_members(
                stream, team, concerned, certain
            )
        return shared

    def _find_awaited_members(
        self,
        stream: CallStream,
        group_state: GroupState | None,
        concerned: tuple[int, ...] | None,
        certain: bool,
    ) -> Mapping[int, int]:
        entered, held = stream.entered, group_state.members if group_state is not None else {}
        members = stream.group.ranks if concerned is None else concerned
        if concerned is None and len(held) == len(members):
            behind = {m: s.entered + 1 for m, s in held.items() if s.entered < entered}
        else:
            behind = {
                m: count + 1
                for m in members
                if (count := held[m].entered if m in held else 0) < entered
            }
        if behind and not certain:
            furthest = min(
                (seq for m, seq in behind.items() if m not in self._silent_ranks), default=0
            )
            behind = {
                m: seq for m, seq in behind.items() if seq == furthest or m in self._silent_ranks
            }
        # They entered, and will never finish.
        gone = {
            m: entered
            for m in _intersect_ranks(members, self.unable_to_finish)
            if m in held and held[m].is_pending
        }
        unheard = (
            dict.fromkeys(_intersect_ranks(members, self._silent_ranks), entered)
            if not behind
            else {}
        )
        return gone | unheard | behind


def receives_from_any(stream: CallStream) -> bool:
    """It receives from whoever sends."""
    return stream.peer == -1 and stream.kind is StreamKind.RECV


def _intersect_ranks(members: Iterable[int], few: Collection[int]) -> Iterable[int]:
    return [m for m in members if m in few] if few else ()


def get_new_group_ranks(stream: CallStream, seq: int) -> tuple[int, ...] | None:
    """The members of the group that call ``seq`` of a set-up makes, as it says itself: new_group
    holds up these only.
    """
    call = stream.calls.get(seq)
    detail = call.signature.detail if call is not None else None
    if detail is None or not detail.startswith("ranks="):
        return None
    try:
        return unpack_ranks(detail[6:])
    except ValueError:
        return None


def may_be_released(attempt: Attempt, rank: int, stream: CallStream) -> bool:
    """The other end's call that it lacked was told only after the rank's own last word: it may have
    gone on since.
    """
    others = _find_other_ends(attempt, rank, stream, stream.peer) if stream.peer is not None else []
    return any(
        s.last_growth[0] < stream.entered
        and s.last_growth[1] > attempt.processes[rank].reports.last_seen_at
        for s in others
    )


def _find_awaited_peer(attempt: Attempt, rank: int, stream: CallStream) -> dict[int, int]:
    """The other end of a channel, if it has made fewer calls on it."""
    peer = stream.peer
    if peer is None:
        return {}
    made = sum(s.entered for s in _find_other_ends(attempt, rank, stream, peer))
    receives = (
        _find_channels(attempt, peer, StreamKind.RECV, stream, -1)
        if stream.kind is StreamKind.SEND
        else []
    )
    if anybody := sum(s.entered for s in receives):
        # Others' messages that arrived took their part of what it received from any source.
        others = [
            s
            for other in stream.group.ranks
            if other != rank
            for s in _find_channels(attempt, other, stream.kind, stream, peer)
        ]
        made += max(0, anybody - sum(s.completed or 0 for s in others))
    return {peer: made + 1} if made < stream.entered else {}


def _find_awaited_senders(attempt: Attempt, rank: int, stream: CallStream) -> dict[int, int]:
    """All who may still send to a receiver from any source, unless enough was sent: any one of them
    will do.
    """
    sent = {
        m: sum(s.entered for s in _find_channels(attempt, m, StreamKind.SEND, stream, rank))
        for m in stream.group.ranks
        if m != rank
    }
    told = sum(
        s.completed or 0
        for m in sent
        for s in _find_channels(attempt, rank, StreamKind.RECV, stream, m)
    )
    if sum(sent.values()) - told >= stream.entered:
        return {}
    here = {
        m
        for m in sent
        if (p := attempt.processes.get(m)) is None
        or (p.is_alive and p.lifecycle < Lifecycle.DESTROYED)
    }
    return {m: sent[m] + 1 for m in here or sent}


def _find_other_ends(
    attempt: Attempt, rank: int, stream: CallStream, peer: int
) -> list[CallStream]:
    """The receives of what a rank sends to ``peer``, or the sends of what it receives from it."""
    wanted = StreamKind.RECV if stream.kind is StreamKind.SEND else StreamKind.SEND
    return _find_channels(attempt, peer, wanted, stream, rank)


def _find_channels(
    attempt: Attempt, rank: int, kind: StreamKind, reference: CallStream, peer: int
) -> list[CallStream]:
    """A rank's channel of the same group and tag, to or from ``peer``."""
    process = attempt.processes.get(rank)
    held = process.streams.values() if process is not None else ()
    return [
        s
        for s in held
        if s.kind is kind
        and s.peer == peer
        and s.tag == reference.tag
        and s.group.key == reference.group.key
    ]
