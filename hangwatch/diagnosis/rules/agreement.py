"""Whether the members of a group are known to have made the same call, and how to say so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hangwatch.tracking.call_stream import CallStream, CallWindow

from ..call_classes import classify_members
from ..context import DiagnosisContext, EvidenceRequest

_MAX_REQUESTED_RANKS = 8  # later hashes show to which side the other ranks belong


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAgreement:
    """What is known of whether ``ranks`` made the same call ``seq``."""

    ranks: Collection[int]
    seq: int
    is_known: bool  # the running hashes of all of them are equal there
    is_different: bool  # some of them are known to differ
    may_become_known: bool  # hashes were requested and have not arrived

    def describe(self, ending: str, op: str, caller: int, position: str) -> str:
        """The clause that all ranks entered the call, and what came of it. It says that this was the
        same call only if that is known. ``op`` is what ``caller`` called.
        """
        if self.is_known:
            return f"all {len(self.ranks)} ranks made the same call and {ending}: {op} ({position})"
        entered = f"all {len(self.ranks)} ranks entered call {self.seq} and {ending}"
        if self.is_different:
            doubt = "their calls have not been the same since an earlier one"
        elif self.may_become_known:
            doubt = "whether they made the same call is not known yet"
        else:
            doubt = "whether they made the same call is not known"
        return f"{entered}: {op} on rank {caller} ({position}); {doubt}"


def check_agreement(
    context: DiagnosisContext,
    members: Mapping[int, CallStream],
    ranks: Collection[int],
    seq: int,
) -> CallAgreement:
    """Compares call ``seq`` of the ranks, and requests what is missing for that."""
    streams = {rank: members[rank] for rank in ranks if rank in members}
    classes, unclassified = classify_members(streams, seq)
    classified_count = sum(len(class_ranks) for _, class_ranks in classes)
    window = CallWindow(seq, seq)
    missing = [
        rank
        for rank in unclassified
        if context.attempt.processes[rank].is_alive and not streams[rank].has_answered(window)
    ]
    for rank in missing[:_MAX_REQUESTED_RANKS]:
        context.requests.append(EvidenceRequest.for_calls(rank, streams[rank], window))
    return CallAgreement(
        ranks=ranks,
        seq=seq,
        is_known=len(classes) == 1 and classified_count == len(ranks),
        is_different=len(classes) > 1,
        may_become_known=bool(missing),
    )
