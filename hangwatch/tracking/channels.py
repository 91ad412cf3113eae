"""Connects the two ends of point-to-point channels. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hangwatch.model.calls import StreamKind

from .call_stream import CallStream
from .process import Process


def connect_channel(processes: Mapping[int, Process], process: Process, stream: CallStream) -> None:
    """Sets `CallStream.other_end` of a new stream, and of the peer's stream of the same channel."""
    peer = processes.get(stream.peer) if stream.peer is not None else None
    if peer is None or processes.get(process.rank) is not process:
        return
    opposite_kind = StreamKind.RECV if stream.kind is StreamKind.SEND else StreamKind.SEND
    for other in peer.streams.values():
        is_opposite = other.kind is opposite_kind and other.peer == process.rank
        if is_opposite and other.tag == stream.tag and other.group.key == stream.group.key:
            connect_ends(stream, other)
            return


def connect_ends(stream: CallStream, other: CallStream) -> None:
    """Makes two streams the ends of one channel, and of no other."""
    if stream.other_end is not other or other.other_end is not stream:
        disconnect_channel(stream)
        disconnect_channel(other)
        stream.other_end, other.other_end = other, stream


def disconnect_channel(stream: CallStream) -> None:
    """Separates a stream from the peer's: its process no longer holds its rank."""
    if stream.other_end is not None:
        stream.other_end.other_end = None
        stream.other_end = None
