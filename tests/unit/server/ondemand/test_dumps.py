"""Stacks on request."""

from __future__ import annotations

from hangwatch.model.ranks import ExitInfo, Frame, ThreadStack
from hangwatch.protocol import heartbeat
from hangwatch.report.documents import build_document
from hangwatch.server.core.clock import Clock
from hangwatch.server.ingest.command_queue import CommandQueue
from hangwatch.server.ondemand.dumps import REPLY_TIMEOUT_S, Dump, DumpRegistry
from tests.unit.server.attempts import make_attempt


def test_a_dump_ends_with_stacks_or_a_reason_for_each_rank() -> None:
    job = make_attempt()
    command_queue = CommandQueue(clock=Clock())
    dumps = DumpRegistry(clock=Clock(), command_queue=command_queue)
    job.processes[2].exit = ExitInfo(exit_status=0)
    requested = dumps.request_dump(job, [0, 1, 2], native=True, now=100.0)
    assert [(r.rank, r.status) for r in requested.ranks] == [
        (0, "pending"),
        (1, "pending"),
        (2, "failed"),
    ]
    commands = command_queue.take_unsent("a")
    assert [(c.key, c.native) for c in commands] == [("0-1", True), ("1-1", True)]
    thread = ThreadStack(
        thread="MainThread", frames=(Frame(function="f", file="t.py", line=3),), main=True
    )
    dumps.apply_samples(
        [
            heartbeat.StackReply(
                key="0-1", request=commands[0].id, source="py-spy", threads=(thread,)
            )
        ],
        101.0,
    )
    pending = dumps.find_request(requested.id, 102.0)
    assert pending is not None
    assert pending.status == "pending"
    assert pending.ranks[0].stacks[0].frames[0].line == 3
    document = Dump.model_validate(pending, from_attributes=True).model_dump(mode="json")
    assert list(document) == ["id", "job", "attempt", "native", "status", "created_at", "ranks"]
    assert [list(rank) for rank in document["ranks"]] == [["rank", "status", "error", "stacks"]] * 3
    assert document["ranks"][0]["stacks"][0] == build_document(pending.ranks[0].stacks[0])
    expired = dumps.find_request(requested.id, 100.0 + REPLY_TIMEOUT_S + 1)
    assert expired is not None
    assert (
        expired.status,
        expired.ranks[1].status,
        "did not reply" in (expired.ranks[1].error or ""),
    ) == ("done", "failed", True)
