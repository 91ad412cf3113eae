"""Connects the two ends of point-to-point channels. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hangwatch.model.calls import StreamKind

from .call_stream import CallStream
from .process import ChannelKey, Process


def connect_channel(processes: Mapping[int, Process], process: Process, stream: CallStream) -> None:
    """Sets `CallStream.other_end` of a new stream, and of the peer's stream of the same channel."""
    peer = processes.get(stream.peer) if stream.peer is not None else None
    if processes.get(process.rank) is not process:
        return
    process.channels.setdefault(_get_channel_key(stream), []).append(stream)
    if peer is None:
        return
    opposite_kind = StreamKind.RECV if stream.kind is StreamKind.SEND else StreamKind.SEND
    for other in peer.channels.get((opposite_kind, process.rank, stream.tag), ()):
        if other.group.key == stream.group.key:
            connect_ends(stream, other)
            return


def connect_ends(stream: CallStream, other: CallStream) -> None:
    """Makes two streams the ends of one channel, and of no other."""
    if stream.other_end is not other or other.other_end is not stream:
        disconnect_channel(stream)
        disconnect_channel(other)
        stream.other_end, other.other_end = other, stream


def forget_channel(process: Process, stream: CallStream) -> None:
    """Leaves a closed stream out of the search for other ends. The peer's keeps its end: until it is
    closed as well, its calls are compared with those that were made here.
    """
    channels = process.channels.get(_get_channel_key(stream), [])
    if stream in channels:
        channels.remove(stream)
    if not channels:
        process.channels.pop(_get_channel_key(stream), None)


def _get_channel_key(stream: CallStream) -> ChannelKey:
    return stream.kind, stream.peer, stream.tag


def disconnect_channel(stream: CallStream) -> None:
    """Separates a stream from the peer's: its process no longer holds its rank."""
    if stream.other_end is not None:
        stream.other_end.other_end = None
        stream.other_end = None
