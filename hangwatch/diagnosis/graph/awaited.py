"""Whom a call waits for: by counts of calls, never by times."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import unpack_ranks
from hangwatch.model.ranks import Lifecycle
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState


class Others:
    """The ranks of an attempt, as those who wait for them see them at one moment.

    ``out`` are those who cannot finish a call that they are in.
    """

    def __init__(self, attempt: Attempt, now: float, silent: Collection[int]) -> None:
        self.out = {
            rank
            for rank in attempt.unable_ranks
            if not (process := attempt.processes[rank]).is_alive
            or process.freeze_reason(now) is not None
        }
        self._attempt = attempt
        self._silent = silent
        # By team, the members concerned where not all are, the call, and whether that is certain.
        # (A team's key is as long as it is large.)
        self._known: dict[tuple[int, tuple[int, ...] | None, int, bool], Mapping[int, int]] = {}

    def awaited(self, rank: int, sequence: CallStream, certain: bool) -> Mapping[int, int]:
        """The ranks without which a sequence cannot go on, each with the first call of it that the
        rank has not entered.

        A thread blocked in the newest call needs all who are behind; else it may sit in any
        unfinished call, and needs at least those who are furthest behind. Those who are silent may
        be anywhere: they are awaited where they were last seen behind, or where nobody else is. All
        in the same call of a group share one mapping.
        """
        kind, team = sequence.kind, sequence.group_state
        concerned = None
        if kind is StreamKind.SETUP:
            concerned = made_for(sequence, sequence.entered)
        elif kind is not StreamKind.COLLECTIVE:
            if from_any(sequence):
                return _senders(self._attempt, rank, sequence)
            awaited = _peer(self._attempt, rank, sequence)
            if not awaited and sequence.peer is not None and sequence.peer in self._silent:
                return {sequence.peer: sequence.entered}
            return awaited
        by = (id(team), concerned, sequence.entered, certain)
        if (shared := self._known.get(by)) is None:
            self._known[by] = shared = self._members(sequence, team, concerned, certain)
        return shared

    def _members(
        self,
        sequence: CallStream,
        team: GroupState | None,
        concerned: tuple[int, ...] | None,
        certain: bool,
    ) -> Mapping[int, int]:
        entered, held = sequence.entered, team.members if team is not None else {}
        members = sequence.group.ranks if concerned is None else concerned
        if concerned is None and len(held) == len(members):
            behind = {m: s.entered + 1 for m, s in held.items() if s.entered < entered}
        else:
            behind = {
                m: count + 1
                for m in members
                if (count := held[m].entered if m in held else 0) < entered
            }
        if behind and not certain:
            furthest = min((seq for m, seq in behind.items() if m not in self._silent), default=0)
            behind = {m: seq for m, seq in behind.items() if seq == furthest or m in self._silent}
        # They entered, and will never finish.
        gone = {m: entered for m in _both(members, self.out) if m in held and held[m].is_pending}
        unheard = dict.fromkeys(_both(members, self._silent), entered) if not behind else {}
        return gone | unheard | behind


def from_any(sequence: CallStream) -> bool:
    """It receives from whoever sends."""
    return sequence.peer == -1 and sequence.kind is StreamKind.RECV


def _both(members: Iterable[int], few: Collection[int]) -> Iterable[int]:
    return [m for m in members if m in few] if few else ()


def made_for(sequence: CallStream, seq: int) -> tuple[int, ...] | None:
    """The members of the group that call ``seq`` of a set-up makes, as it says itself: new_group
    holds up these only.
    """
    call = sequence.calls.get(seq)
    detail = call.signature.detail if call is not None else None
    if detail is None or not detail.startswith("ranks="):
        return None
    try:
        return unpack_ranks(detail[6:])
    except ValueError:
        return None


def freed(attempt: Attempt, rank: int, sequence: CallStream) -> bool:
    """The other end's call that it lacked was told only after the rank's own last word: it may have
    gone on since.
    """
    others = _other_end(attempt, rank, sequence, sequence.peer) if sequence.peer is not None else []
    return any(
        s.last_growth[0] < sequence.entered
        and s.last_growth[1] > attempt.processes[rank].last_seen_at
        for s in others
    )


def _peer(attempt: Attempt, rank: int, sequence: CallStream) -> dict[int, int]:
    """The other end of a channel, if it has made fewer calls on it."""
    peer = sequence.peer
    if peer is None:
        return {}
    made = sum(s.entered for s in _other_end(attempt, rank, sequence, peer))
    receives = (
        _channels(attempt, peer, StreamKind.RECV, sequence, -1)
        if sequence.kind is StreamKind.SEND
        else []
    )
    if anybody := sum(s.entered for s in receives):
        # Others' messages that arrived took their part of what it received from any source.
        others = [
            s
            for other in sequence.group.ranks
            if other != rank
            for s in _channels(attempt, other, sequence.kind, sequence, peer)
        ]
        made += max(0, anybody - sum(s.completed or 0 for s in others))
    return {peer: made + 1} if made < sequence.entered else {}


def _senders(attempt: Attempt, rank: int, sequence: CallStream) -> dict[int, int]:
    """All who may still send to a receiver from any source, unless enough was sent: any one of them
    will do.
    """
    sent = {
        m: sum(s.entered for s in _channels(attempt, m, StreamKind.SEND, sequence, rank))
        for m in sequence.group.ranks
        if m != rank
    }
    told = sum(
        s.completed or 0
        for m in sent
        for s in _channels(attempt, rank, StreamKind.RECV, sequence, m)
    )
    if sum(sent.values()) - told >= sequence.entered:
        return {}
    here = {
        m
        for m in sent
        if (p := attempt.processes.get(m)) is None
        or (p.is_alive and p.lifecycle < Lifecycle.DESTROYED)
    }
    return {m: sent[m] + 1 for m in here or sent}


def _other_end(attempt: Attempt, rank: int, sequence: CallStream, peer: int) -> list[CallStream]:
    """The receives of what a rank sends to ``peer``, or the sends of what it receives from it."""
    wanted = StreamKind.RECV if sequence.kind is StreamKind.SEND else StreamKind.SEND
    return _channels(attempt, peer, wanted, sequence, rank)


def _channels(
    attempt: Attempt, rank: int, kind: StreamKind, like: CallStream, peer: int
) -> list[CallStream]:
    """A rank's channel of the same group and tag, to or from ``peer``."""
    process = attempt.processes.get(rank)
    held = process.streams.values() if process is not None else ()
    return [
        s
        for s in held
        if s.kind is kind and s.peer == peer and s.tag == like.tag and s.group.key == like.group.key
    ]
