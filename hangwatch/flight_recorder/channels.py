"""Point-to-point channels, rebuilt from Flight Recorder dumps. Pure.

Sends and receives are matched by their order on a channel if both rings reach back to its
beginning, otherwise from the first unfinished one.
"""

from __future__ import annotations

from collections.abc import Mapping

from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from .calls import FlightRecord
from .collectives import CALLS_AFTER, CALLS_BEFORE
from .dump_calls import GroupInstance
from .group_members import DumpsByRank
from .streams import add_stream, count_completed, find_unfinished


def fill_channels(
    attempt: Attempt, group: Group, uses: Mapping[int, GroupInstance], dumps: DumpsByRank
) -> None:
    """Adds the sends and receives of a group, by channel. A receive from any source counts only if
    every ring reaches back to the beginning.
    """
    records_by_end: dict[tuple[StreamKind, int, int], list[FlightRecord]] = {}
    for rank, use in uses.items():
        for record in dumps[rank].p2p_calls.get(use, ()):
            if (
                record.peer is not None
                and record.peer < len(group.ranks)
                and not record.never_submitted
            ):
                peer = group.ranks[record.peer] if record.peer >= 0 else -1
                records_by_end.setdefault((StreamKind(record.signature.op), rank, peer), []).append(
                    record
                )
    whole_group = all(rank in dumps and not dumps[rank].wrapped for rank in group.ranks)
    for (kind, rank, peer), records in records_by_end.items():
        other = StreamKind.RECV if kind is StreamKind.SEND else StreamKind.SEND
        peer_records = records_by_end.get((other, peer, rank), [])
        if peer < 0 and (kind is StreamKind.SEND or not whole_group):
            continue
        whole = whole_group or (
            peer in dumps and not dumps[rank].wrapped and not dumps[peer].wrapped
        )
        stream = add_stream(attempt, rank, kind, group, peer)
        _fill_channel(stream, records, peer_records, whole, dumps[rank].reports_starts)
        if not peer_records and peer in attempt.processes and peer not in dumps:
            mirrored = add_stream(attempt, peer, other, group, rank)
            mirrored.entered = mirrored.completed = stream.completed or 0


def _fill_channel(
    stream: CallStream,
    records: list[FlightRecord],
    peer_records: list[FlightRecord],
    is_complete: bool,
    reports_starts: bool,
) -> None:
    pending, opposite = find_unfinished(records), find_unfinished(peer_records)
    completed = count_completed(records)
    counted = records if is_complete else records[completed:]
    stream.completed = completed if is_complete else 0
    stream.op = stream.kind.value
    # If the calls are counted from the first unfinished ones, the two ends certainly refer to the
    # same message only after both have started it.
    is_same_message = is_complete or (
        pending is not None and opposite is not None and pending.started and opposite.started
    )
    for seq, record in enumerate(counted, 1):
        if -CALLS_BEFORE < seq - stream.completed <= CALLS_AFTER:
            signature = record.signature if is_same_message else Signature(op=stream.kind.value)
            stream.calls[seq] = Call(
                seq=seq,
                signature=signature,
                site=record.site,
                blocking=True if seq > stream.completed else None,
            )
    # A call that the device has queued but not started counts as not entered.
    queued = pending is None or (
        reports_starts and not pending.started and opposite is not None and opposite.started
    )
    stream.entered = stream.completed + (not queued)
    stream.pending_at = None if queued else 0.0
