"""Recordings as the API's documents. Unpacking profiles takes a while: call this in a thread."""

from __future__ import annotations

import contextlib

from hangwatch.stacks.call_tree import ProfileNode, build_call_tree, find_hottest_functions
from hangwatch.stacks.profile import Profile, ThreadProfile, unpack_profile

from ..core.api_model import Frame
from . import schema
from .recordings import RankRecording, RecordingRecord


def describe_recording(record: RecordingRecord) -> schema.Recording:
    return schema.Recording(
        id=record.id,
        job=record.job,
        attempt=record.attempt,
        status="pending" if record.is_pending else "done",
        created_at=record.created_at,
        ranks=[_get_rank_document(rank) for rank in record.ranks.values()],
        **record.request.model_dump(include={"seconds", "rate", "native", "gil"}),
    )


def unpack_profiles(record: RecordingRecord) -> list[tuple[int, Profile]]:
    """The valid profiles, by rank. `describe_recording` reports the invalid ones."""
    profiles: list[tuple[int, Profile]] = []
    for rank in record.ranks.values():
        if rank.profile:
            with contextlib.suppress(ValueError):
                profiles.append((rank.rank, unpack_profile(rank.profile)))
    return profiles


def _get_rank_document(rank: RankRecording) -> schema.RecordedRank:
    if rank.document is None or rank.document.status != rank.status:
        rank.document = _describe_rank_recording(rank)
    return rank.document


def _describe_rank_recording(rank: RankRecording) -> schema.RecordedRank:
    if rank.reply is None or not rank.profile:
        return schema.RecordedRank.model_validate(
            {"rank": rank.rank, "status": rank.status, "error": rank.error}
        )
    try:
        profile = unpack_profile(rank.profile)
    except ValueError as error:
        detail = (
            f"its node agent's reply is not understood ({error}): install the same release of"
            " hangwatch on both sides"
        )
        return schema.RecordedRank(rank=rank.rank, status="failed", error=detail)
    note = rank.reply.note
    if not note and profile.dropped_samples:
        note = f"{profile.dropped_samples} samples of rare stacks were dropped"
    return schema.RecordedRank(
        rank=rank.rank,
        status="done",
        note=note,
        seconds=rank.reply.seconds,
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
    return schema.ThreadTime(
        thread=thread.thread,
        main=thread.is_main,
        samples=thread.sample_count,
        hottest=hottest,
        tree=[_describe_node(node) for node in build_call_tree(thread.stacks)],
    )


def _describe_node(node: ProfileNode) -> schema.FunctionTime:
    leaf = node.leaf_frame
    ends = None
    if leaf is not None:
        ends = Frame(function=leaf.function, file=leaf.file, line=leaf.line)
    return schema.FunctionTime(
        function=node.function,
        file=node.file,
        library=node.library,
        samples=node.samples,
        own=node.own_samples,
        lines=[schema.LineTime(line=line, samples=samples) for line, samples in node.lines],
        ends=ends,
        children=[_describe_node(child) for child in node.children],
    )
