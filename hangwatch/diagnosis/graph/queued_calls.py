"""Calls that devices cannot come to, because they are queued behind a message without its other end.

Where a call only queues work for the device, as on NCCL, hosts go on after a send or a receive that
the peer has not met. A device executes its calls in the order in which its host made them, so those
after the message are held up as well: collectives that all hosts have made, and messages whose other
end is queued. Where the completion of calls is reported, as on gloo, none of this applies. Nor does
it to a message that the user's code started by ``isend`` or ``irecv``: until something waits for it,
calls on other communicators may overtake it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf

from hangwatch.model.calls import StreamKind
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from .awaited import receives_from_any


class QueuedCalls:
    """The queues of all devices at one moment, as far as the counts and times of calls show them."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        # By rank: when its host made the first call that its device cannot come to or complete.
        self._held_since: dict[int, float] | None = None
        self._held_members: dict[tuple[int, int], Mapping[int, int]] = {}

    def may_be_held(self, rank: int, streams: Iterable[CallStream]) -> bool:
        """Whether the device of another rank may be unable to come to one of a rank's newest calls. Not
        if its own device does not come to them either, or if each message has its other end.
        """
        return any(self.find_held_ranks(rank, stream) for stream in streams)

    def _get_held_since(self) -> dict[int, float]:
        if self._held_since is None:
            has_messages = bool(self._attempt.message_groups)
            unmet = self._find_unmet_messages() if has_messages else {}
            self._held_since = self._propagate(unmet)
        return self._held_since

    def find_held_ranks(self, rank: int, stream: CallStream) -> Mapping[int, int]:
        """The other ranks that have made the newest call of ``stream`` and whose devices cannot come
        to it, each with its sequence number. Ranks in the same collective share one mapping.
        """
        held_since = self._get_held_since()
        if stream.completed is not None or not stream.entered or not held_since:
            return {}
        if held_since.get(rank, inf) < stream.entered_at:
            return {}  # its own device does not come to this call: it waits in an earlier one
        if stream.kind is not StreamKind.COLLECTIVE:
            return self._select_held(rank, stream, held_since)
        key = (id(stream.group_state), stream.entered)
        held = self._held_members.get(key)
        if held is None:
            held = self._held_members[key] = self._select_held(rank, stream, held_since)
        return held

    def _select_held(
        self, rank: int, stream: CallStream, held_since: Mapping[int, float]
    ) -> dict[int, int]:
        return {
            partner: stream.entered
            for partner, other in self._list_partners(rank, stream)
            if held_since.get(partner, inf) < other.entered_at
        }

    def _find_unmet_messages(self) -> dict[int, float]:
        """By rank, when its host made the first message whose other end does not exist. Of several
        in one channel, the time of the newest is known.
        """
        messages: list[tuple[int, int, CallStream]] = []  # each with its rank and its receiver
        any_receivers: set[tuple[int, int]] = set()
        for rank, process in self._attempt.processes.items():
            for stream in process.open_calls.unfinished_streams:
                if stream.peer is None or stream.completed is not None:
                    continue
                if receives_from_any(stream):
                    any_receivers.add((rank, id(stream.group)))
                    continue
                if self._is_uncounted(stream):
                    continue
                met_count = 0 if stream.other_end is None else stream.other_end.entered
                if met_count < stream.entered:
                    receiver = stream.peer if stream.kind is StreamKind.SEND else rank
                    messages.append((rank, receiver, stream))
        unmet: dict[int, float] = {}
        for rank, receiver, stream in messages:
            newest = stream.calls.get(stream.entered)
            if (receiver, id(stream.group)) in any_receivers or newest is None:
                continue
            if newest.blocking is not False:
                unmet[rank] = min(unmet.get(rank, inf), stream.entered_at)
        return unmet

    def _is_uncounted(self, stream: CallStream) -> bool:
        """Whether the two ends of a channel cannot be compared by counts."""
        other = stream.other_end
        if stream.loss is not None:
            return True
        if other is None:
            return stream.peer in self._attempt.incomplete_ranks
        return other.loss is not None

    def _propagate(self, held_since: dict[int, float]) -> dict[int, float]:
        """Adds the calls that are held up by those of other ranks, until there are no more."""
        searched_collectives: set[tuple[int, int]] = set()
        to_search = list(held_since)
        for rank in to_search:  # grows in the loop
            for stream in self._attempt.processes[rank].streams.values():
                is_queued = stream.entered > 0 and stream.completed is None
                if not is_queued or stream.entered_at <= held_since[rank]:
                    continue
                if stream.kind is StreamKind.COLLECTIVE:
                    collective = (id(stream.group_state), stream.entered)
                    if collective in searched_collectives:
                        continue
                    searched_collectives.add(collective)
                for partner, other in self._list_partners(rank, stream):
                    if other.entered_at < held_since.get(partner, inf):
                        held_since[partner] = other.entered_at
                        to_search.append(partner)
        return held_since

    def _list_partners(self, rank: int, stream: CallStream) -> Iterator[tuple[int, CallStream]]:
        """The other ranks whose newest call is the same, with their streams."""
        if stream.kind is StreamKind.COLLECTIVE:
            state = stream.group_state
            for member, other in state.members.items() if state is not None else ():
                is_same = other.entered == stream.entered and other.loss is None
                if other is not stream and is_same and stream.loss is None:
                    yield member, other
            return
        other_end = stream.other_end
        if (
            stream.peer is not None
            and other_end is not None
            and not self._is_uncounted(stream)
            and other_end.entered == stream.entered
        ):
            yield stream.peer, other_end
