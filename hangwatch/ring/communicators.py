"""Reads the ring's table of NCCL communicators, which the profiler plugin of the recorder writes
(agent/recorder/native/nccl_plugin.cpp); `layout` documents it.

A communicator of torch's is that of a process group whose calls the recorder sees: it only shows how
far the device has come. Any other one is shown as a group of its own, which numbers its members by
itself, and whose calls are those in the table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group, RankTuple

from . import layout
from .parts import DeviceEntry, compute_age_s

# The stream of a communicator has this number more than the communicator; the recorder's are smaller.
FIRST_UID = 1 << 31
MAX_MEMBERS = 1 << 20
# Node agents read a ring twice a second, and report what they read within 20 seconds at most.
CLOSED_SHOWN_S = 10.0
_BACKEND = "nccl"
_PREFIX = "nccl"  # of the names of NCCL's functions and types


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One communicator of the process. Numbers of calls count from 1; 0 means none."""

    number: int  # counts the communicators of the process, from 1
    id: int  # the same on all members
    rank: int
    size: int
    torch_stream: int  # the stream of the process group whose communicator it is; 0: not torch's
    calls: int  # collectives that the host called
    captured: int  # those of them that a CUDA graph captured
    enqueued: int  # the last one that was passed to the device
    started: int  # the last one that the device has begun
    completed: int
    lost: int  # operations whose end may have been missed
    is_closed: bool  # its process destroyed it
    name: str
    offset: int  # of its slot

    @property
    def uid(self) -> int:
        """The uid of its stream if it is not torch's."""
        return FIRST_UID + self.number

    @property
    def group(self) -> Group:
        return _make_group(self.id, self.rank, self.size, self.name)

    def make_device_entry(self, now_ns: int) -> DeviceEntry:
        """How far the device has come; only with HANGWATCH_NCCL=device."""
        return DeviceEntry(
            uid=self.torch_stream or self.uid,
            enqueued=self.enqueued,
            started=self.started,
            completed=self.completed,
            read_ns=now_ns,
        )


@functools.lru_cache(maxsize=256)
def _make_group(id_: int, rank: int, size: int, name: str) -> Group:
    """The group of a communicator, which may have thousands of members."""
    identity = f"{id_:016x}"
    return Group(
        name=f"NCCL communicator {identity[:8]}",
        desc=name,
        ranks=RankTuple(range(size)),
        backend=_BACKEND,
        foreign=f"{_PREFIX}:{identity}",
        number=rank,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorCall:
    """A collective that the host called."""

    seq: int
    entered_ns: int
    chain: int  # the running hash after it
    agreement_hash: int
    count: int  # elements, as NCCL counts them for this function
    root: int
    function: str  # such as AllReduce
    dtype: str  # such as ncclFloat32

    def make_call(self, now_ns: int) -> Call:
        dtype = self.dtype.removeprefix(_PREFIX).lower()
        signature = Signature(
            op=f"{_PREFIX}{self.function}",
            shapes=((self.count,),),
            dtype=dtype or None,
            root=self.root if self.function in _ROOTED_FUNCTIONS else None,
            numel=self.count,
            agree=self.agreement_hash,
        )
        return Call(
            seq=self.seq,
            signature=signature,
            chain=self.chain,
            entered_s=compute_age_s(now_ns, self.entered_ns),
            blocking=False,
        )


_ROOTED_FUNCTIONS = ("Broadcast", "Reduce", "Gather", "Scatter")
KIND = StreamKind.COLLECTIVE


class CommunicatorTable:
    """The table in a mapped ring. Slots that are being written or are invalid are left out."""

    def __init__(self, data: Any, offset: int) -> None:
        """``offset`` is 0 if the ring has no such table."""
        self._data = data
        self._offset = offset
        self.follows_device = False
        self._slot_count = 0
        if offset and offset + layout.COMMUNICATORS_SIZE <= len(data):
            slot_count, _, _, follows_device = self._read_head()
            self._slot_count = min(slot_count, layout.COMMUNICATOR_SLOTS)
            self.follows_device = bool(follows_device)

    def count_uncovered(self) -> int:
        """Communicators for which the table had no room."""
        return self._read_head()[2] if self._slot_count else 0

    def read_communicators(self, now_ns: int) -> tuple[Communicator, ...]:
        """Those that were used and exist, or existed until `CLOSED_SHOWN_S` ago: a rank may destroy a
        communicator before its last call was read.
        """
        found = []
        for slot in range(self._slot_count):
            offset = self._offset + layout.COMMUNICATORS_HEAD.size + slot * layout.COMMUNICATOR_SIZE
            communicator = self._read_communicator(offset, now_ns)
            if communicator is not None and communicator.calls:
                found.append(communicator)
        return tuple(found)

    def read_calls(self, communicator: Communicator) -> list[CommunicatorCall]:
        """The last calls of a communicator that are kept, oldest first."""
        calls = list(self._iter_calls(communicator.offset + layout.COMMUNICATOR.size))
        calls.sort(key=lambda call: call.seq)
        return calls

    def _read_head(self) -> tuple[int, ...]:
        return layout.COMMUNICATORS_HEAD.unpack_from(self._data, self._offset)

    def _read_communicator(self, offset: int, now_ns: int) -> Communicator | None:
        """None if the slot has none, or is being written."""
        values = layout.COMMUNICATOR.unpack_from(self._data, offset)
        state, number, id_, rank, size, torch_stream, *counters, _, _, _, closed_ns, name = values
        is_same = layout.COMMUNICATOR.unpack_from(self._data, offset)[:3] == (state, number, id_)
        is_closed = state == layout.COMMUNICATOR_CLOSED
        if is_closed and compute_age_s(now_ns, closed_ns) > CLOSED_SHOWN_S:
            return None
        if not (is_closed or state == layout.COMMUNICATOR_OPEN):
            return None
        if not is_same or not 0 <= rank < size <= MAX_MEMBERS:
            return None
        calls, captured, _, enqueued, started, completed, lost = counters
        return Communicator(
            number=number,
            id=id_,
            rank=rank,
            size=size,
            torch_stream=torch_stream,
            calls=calls,
            captured=captured,
            enqueued=enqueued,
            started=started,
            completed=completed,
            lost=lost,
            is_closed=is_closed,
            name=_decode_text(name),
            offset=offset,
        )

    def _iter_calls(self, first: int) -> Iterator[CommunicatorCall]:
        entry = layout.COMMUNICATOR_CALL
        for number in range(layout.COMMUNICATOR_CALLS):
            offset = first + number * entry.size
            values = entry.unpack_from(self._data, offset)
            # The writer clears the number before it writes an entry.
            if values[0] and entry.unpack_from(self._data, offset) == values:
                seq, entered_ns, chain, agreement_hash, count, root, _, function, dtype = values
                yield CommunicatorCall(
                    seq=seq,
                    entered_ns=entered_ns,
                    chain=chain,
                    agreement_hash=agreement_hash,
                    count=count,
                    root=root,
                    function=_decode_text(function),
                    dtype=_decode_text(dtype),
                )


def _decode_text(raw: bytes) -> str:
    text = raw.partition(b"\0")[0].decode(errors="replace")
    return "".join(char if char.isprintable() else "?" for char in text)
