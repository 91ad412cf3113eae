"""Recordings as the API's documents. Unpacking profiles takes a while: call this in a thread."""

from __future__ import annotations

import contextlib

from hangwatch.protocol.live import RecordingReply
from hangwatch.stacks.call_tree import build_call_tree, find_hottest_functions
from hangwatch.stacks.profile import Profile, ThreadProfile, unpack_profile

from . import schema
from .recordings import RankRecording, RecordingRecord


def describe_recording(record: RecordingRecord) -> schema.Recording:
    return schema.Recording(
        id=record.id,
        job=record.job,
        attempt=record.attempt,
        status="pending" if record.is_pending else "done",
        created_at=record.created_at,
        ranks=[_describe_rank(rank) for rank in record.ranks],
        **record.request.options,
    )


def unpack_profiles(record: RecordingRecord) -> list[tuple[int, Profile]]:
    """The valid profiles, by rank. `describe_recording` reports the invalid ones."""
    profiles: list[tuple[int, Profile]] = []
    for rank in record.ranks:
        if rank.profile:
            with contextlib.suppress(ValueError):
                profiles.append((rank.rank, unpack_profile(rank.profile)))
    return profiles


def _describe_rank(rank: RankRecording) -> schema.RecordedRank:
    reply = rank.reply
    if reply is None or not reply.profile:
        return schema.RecordedRank(rank=rank.rank, status=rank.status, error=rank.error)
    if rank.document is None:
        rank.document = _describe_profile(rank.rank, reply)
    return rank.document


def _describe_profile(rank: int, reply: RecordingReply) -> schema.RecordedRank:
    try:
        profile = unpack_profile(reply.profile)
    except ValueError as error:
        detail = (
            f"its node agent's reply is not understood ({error}): install the same release of"
            " hangwatch on both sides"
        )
        return schema.RecordedRank(rank=rank, status="failed", error=detail)
    note = reply.note
    if not note and profile.dropped_samples:
        note = f"{profile.dropped_samples} samples of rare stacks were dropped"
    return schema.RecordedRank(
        rank=rank,
        status="done",
        note=note,
        seconds=reply.seconds,
        threads=[_describe_thread(thread) for thread in profile.shown_threads],
        resting=len(profile.threads) - len(profile.shown_threads),
    )


def _describe_thread(thread: ThreadProfile) -> schema.ThreadTime:
    hottest = [
        schema.HotFunction(
            function=frame.function, file=frame.file, line=frame.line, samples=samples
        )
        for frame, samples in find_hottest_functions(thread.stacks)
    ]
    tree = [
        schema.FunctionTime.model_validate(node, from_attributes=True)
        for node in build_call_tree(thread.stacks)
    ]
    return schema.ThreadTime(
        thread=thread.thread,
        main=thread.is_main,
        samples=thread.sample_count,
        hottest=hottest,
        tree=tree,
    )
