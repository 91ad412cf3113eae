"""Which hosts report again soon."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.protocol import heartbeat
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS
from hangwatch.tracking.fleet import Fleet


def make_fleet(ranks: int, waiting: int) -> Fleet:
    made = Fleet()
    group = heartbeat.StreamIdentity(
        kind=StreamKind.COLLECTIVE, name="0", desc="", ranks=f"0-{ranks - 1}"
    )
    for rank in range(ranks):
        waits = rank < waiting
        stream = heartbeat.StreamUpdate(
            uid=1, identity=group, entered=2 if waits else 1, completed=1, entered_s=5.0
        )
        identity = heartbeat.ProcessIdentity(
            job="j", rank=rank, world_size=ranks, pid=1, start_ticks=1
        )
        process = heartbeat.ProcessUpdate(
            key="1-1", lifecycle=3, identity=identity, streams=(stream,)
        )
        made.apply_heartbeat(
            heartbeat.Heartbeat(host=f"n{rank}", agent=f"a{rank}", number=1, processes=(process,)),
            100.0,
        )
    return made


def list_urgent_ranks(ranks: int, waiting: int) -> list[int]:
    fleet = make_fleet(ranks, waiting)
    return [rank for rank in range(ranks) if fleet.is_urgent(f"a{rank}")]


def test_first_waiting_ranks_are_urgent() -> None:
    assert list_urgent_ranks(200, 0) == []
    assert list_urgent_ranks(200, 3) == [0, 1, 2]
    assert list_urgent_ranks(200, MAX_URGENT_SUSPECTS + 1) == []


def test_mutually_waiting_ranks_are_urgent() -> None:
    fleet = make_fleet(200, MAX_URGENT_SUSPECTS + 1)
    for number, (rank, peer) in enumerate([(0, 1), (1, 0), (2, 3), (3, 4)], 2):
        stream_identity = heartbeat.StreamIdentity(
            kind=StreamKind.RECV, name="pp", desc="", ranks="0-199", tag=0, peer=peer
        )
        receives = heartbeat.StreamUpdate(
            uid=2, identity=stream_identity, entered=1, completed=0, entered_s=5.0
        )
        process = heartbeat.ProcessUpdate(key="1-1", lifecycle=3, streams=(receives,))
        fleet.apply_heartbeat(
            heartbeat.Heartbeat(
                host=f"n{rank}", agent=f"a{rank}", number=number, processes=(process,)
            ),
            101.0,
        )
    assert [rank for rank in range(200) if fleet.is_urgent(f"a{rank}")] == [0, 1]


def test_last_ranks_not_waiting_are_urgent() -> None:
    assert list_urgent_ranks(200, 199) == [199]
