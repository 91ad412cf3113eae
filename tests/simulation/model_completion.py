"""Which ranks a call of a modelled job still needs in order to complete, as a backend decides it.

This is what really blocks each rank, with which a diagnosis made from heartbeats is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hangwatch.model.calls import Signature, StreamKind
from hangwatch.model.groups import Group, unpack_ranks

from .model_programs import ModelStream
from .model_ranks import ModelCall, ModelRank


@dataclass(frozen=True, slots=True)
class CompletionModel:
    """``eager``: a send, and a root's part of a one-sided collective, completes immediately.
    ``mismatch_hangs``: a collective completes only if all members make the same call.
    """

    ranks: Mapping[int, ModelRank]
    eager: bool
    mismatch_hangs: bool

    def find_unmet_ranks(self, rank: int, stream: ModelStream, seq: int) -> tuple[set[int], bool]:
        """The ranks without which this call cannot complete, and whether a single one of
        them is sufficient.
        """
        if stream.kind in (StreamKind.SEND, StreamKind.RECV):
            return self._find_unmet_peer(rank, stream, seq)
        members = set(stream.group.ranks)
        signature = self.ranks[rank].calls[stream][seq - 1].signature
        if stream.kind is StreamKind.SETUP:
            concerned = _setup_members(signature)
            members = members if concerned is None else concerned if rank in concerned else set()
        else:
            members = _needed_members(signature, stream.group, rank, self.eager)
        unmet = set()
        for member in members - {rank}:
            calls = self.ranks[member].calls.get(stream, []) if member in self.ranks else []
            other_call = calls[seq - 1] if len(calls) >= seq else None
            has_ended = (
                other_call is not None and not other_call.done and not self.ranks[member].is_running
            )
            if (
                other_call is None
                or has_ended
                or (self.mismatch_hangs and other_call.signature.agree != signature.agree)
            ):
                unmet.add(member)
        return unmet, False

    def _find_unmet_peer(self, rank: int, stream: ModelStream, seq: int) -> tuple[set[int], bool]:
        group, tag = stream.group, stream.tag
        if stream.kind is StreamKind.SEND:
            assert stream.peer is not None
            if self.eager:
                return set(), False
            receives = self._list_calls(stream.peer, ModelStream(StreamKind.RECV, group, rank, tag))
            any_source_count = len(
                self._list_calls(stream.peer, ModelStream(StreamKind.RECV, group, -1, tag))
            )
            own_order = self.ranks[rank].calls[stream][seq - 1].order
            earlier_count = sum(
                message.order < own_order
                for _, message in self._iter_sent_messages(stream.peer, group, tag)
            )
            return (
                set() if len(receives) >= seq or earlier_count < any_source_count else {stream.peer}
            ), False
        if stream.peer == -1:
            has_message = len(list(self._iter_sent_messages(rank, group, tag))) >= seq
            return (set() if has_message else set(group.ranks) - {rank}), True
        sends = self._list_calls(
            stream.peer if stream.peer is not None else -1,
            ModelStream(StreamKind.SEND, group, rank, tag),
        )
        return (set() if len(sends) >= seq else {stream.peer or 0}), False

    def _list_calls(self, rank: int, stream: ModelStream) -> list[ModelCall]:
        return self.ranks[rank].calls.get(stream, []) if rank in self.ranks else []

    def _iter_sent_messages(
        self, to: int, group: Group, tag: int | None
    ) -> Iterator[tuple[int, ModelCall]]:
        for rank in self.ranks:
            for message in self._list_calls(rank, ModelStream(StreamKind.SEND, group, to, tag)):
                yield rank, message


def _setup_members(made: Signature) -> set[int] | None:
    return None if made.detail is None else set(unpack_ranks(made.detail.removeprefix("ranks=")))


def _needed_members(made: Signature, group: Group, rank: int, eager: bool) -> set[int]:
    """The members without which a collective does not complete on ``rank``."""
    root = None if made.root is None else group.ranks[made.root % len(group.ranks)]
    if made.op in ("broadcast", "scatter"):
        if rank != root:
            return {root} if root is not None else set()
        return set() if eager else set(group.ranks)
    if made.op in ("reduce", "gather") and rank != root:
        return set() if eager or root is None else {root}
    return set(group.ranks)
