"""The state that heartbeats leave behind is bounded, for long jobs and for many ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import (
    CALLS_KEPT,
    FINISHED_CALLS_KEPT,
    LAST_CALLS_KEPT,
    SMALL_JOB_RANKS,
    CallWindow,
)
from hangwatch.tracking.fleet import Fleet
from tests.simulation.scripted_job import ScriptedJob

GROUP = heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="dp", desc="dp", ranks="0-3")


def make_heartbeat(
    number: int,
    rank: int,
    *,
    calls: tuple[Call, ...] = (),
    completed: int | None = None,
    ended: ExitInfo | None = None,
    stream_update: heartbeat.StreamUpdate | None = None,
) -> heartbeat.Heartbeat:
    """A heartbeat of a rank with its own host. It is inside its last call unless ``completed`` or
    ``stream_update`` says otherwise.
    """
    identity = heartbeat.ProcessIdentity(
        job="j", rank=rank, world_size=4, pid=7 + rank, start_ticks=0
    )
    entered = calls[-1].seq if calls else 0
    done = max(0, entered - 1) if completed is None else completed
    stream_update = stream_update or heartbeat.StreamUpdate(
        uid=1, identity=GROUP, entered=entered, completed=done, calls=calls, entered_s=1.0
    )
    update = heartbeat.ProcessUpdate(
        key=f"{rank}-0", identity=identity, lifecycle=3, streams=(stream_update,), ended=ended
    )
    return heartbeat.Heartbeat(
        host=f"n{rank}", agent=f"a{rank}", number=number, full=True, processes=(update,)
    )


def make_call(seq: int) -> Call:
    """A call that is equal to the same call of another rank, but shares no object with it."""
    signature = Signature(
        op="all_reduce", shapes=((4096,),), dtype="bfloat16", numel=4096, agree=77
    )
    return Call(
        seq=seq,
        signature=signature,
        site=Site(file="/u/train.py", line=50, function="step"),
        thread=1,
    )


def get_only_attempt(fleet: Fleet) -> Attempt:
    (attempt,) = fleet.attempts.values()
    return attempt


def test_last_calls_of_slow_job_are_kept() -> None:
    fleet = Fleet()
    for number in range(1, 100):
        fleet.apply_heartbeat(make_heartbeat(number, 0, calls=(make_call(number),)), float(number))
    stream = get_only_attempt(fleet).processes[0].streams[1]
    assert sorted(stream.calls) == list(range(99 - FINISHED_CALLS_KEPT, 100)), (
        "the call it is inside, and the completed ones before it"
    )


def test_more_calls_of_exited_process_are_kept() -> None:
    """Calls of an exited process can no longer be requested."""
    fleet = Fleet()
    calls = tuple(map(make_call, range(1, 21)))
    exited = make_heartbeat(1, 0, calls=calls, completed=20, ended=ExitInfo(exit_status=1))
    fleet.apply_heartbeat(exited, 1.0)
    stream = get_only_attempt(fleet).processes[0].streams[1]
    assert sorted(stream.calls) == list(range(21 - LAST_CALLS_KEPT, 21))


def test_more_calls_of_uncounted_stream_are_kept() -> None:
    """The device of the stream may be in one of these calls."""
    fleet = Fleet()
    for number in range(1, 100):
        update = heartbeat.StreamUpdate(
            uid=1, identity=GROUP, entered=number, calls=(make_call(number),)
        )
        fleet.apply_heartbeat(make_heartbeat(number, 0, stream_update=update), float(number))
    stream = get_only_attempt(fleet).processes[0].streams[1]
    assert stream.completed is None
    assert sorted(stream.calls) == list(range(99 - LAST_CALLS_KEPT, 100))


def test_few_calls_of_uncounted_streams_of_a_large_job_are_kept() -> None:
    """A hundred thousand ranks with six such streams each have many."""
    fleet = Fleet()
    for number in range(1, 10):
        update = heartbeat.StreamUpdate(
            uid=1, identity=GROUP, entered=number, calls=(make_call(number),)
        )
        beat = make_heartbeat(number, 0, stream_update=update)
        (process,) = beat.processes
        assert process.identity is not None
        identity = replace(process.identity, world_size=SMALL_JOB_RANKS + 1)
        large = replace(beat, processes=(replace(process, identity=identity),))
        fleet.apply_heartbeat(large, float(number))
    stream = get_only_attempt(fleet).processes[0].streams[1]
    assert sorted(stream.calls) == list(range(9 - FINISHED_CALLS_KEPT, 10))


def test_members_share_equal_hashes() -> None:
    fleet = Fleet()
    for number in range(1, 4):
        for rank in range(4):
            update = heartbeat.StreamUpdate(
                uid=1,
                identity=GROUP,
                entered=10 * number,
                completed=10 * number,
                chain=700 + number,
            )
            fleet.apply_heartbeat(make_heartbeat(number, rank, stream_update=update), float(number))
    attempt = get_only_attempt(fleet)
    histories = [process.streams[1].reported_hashes for process in attempt.processes.values()]
    assert histories[0] == ((10, 701), (20, 702), (30, 703))
    assert len({id(history) for history in histories}) == 1
    assert not attempt.diverged_groups


def test_all_unfinished_calls_are_kept() -> None:
    """The other members may wait in the first of them."""
    fleet = Fleet()
    for number in range(1, 51):
        fleet.apply_heartbeat(
            make_heartbeat(number, 0, calls=(make_call(10 + number),), completed=10), float(number)
        )
    stream = get_only_attempt(fleet).processes[0].streams[1]
    assert sorted(stream.calls) == list(range(11, 61))


def test_requested_calls_are_kept_with_later_ones() -> None:
    fleet = Fleet()
    fleet.apply_heartbeat(make_heartbeat(1, 0, calls=(make_call(100),)), 1.0)
    calls = tuple(map(make_call, range(1, 101)))
    reply = heartbeat.CallsReply(key="0-0", request="r", uid=1, calls=calls, from_seq=1, to_seq=100)
    fleet.apply_heartbeat(heartbeat.Heartbeat(host="n0", agent="a0", number=2, calls=(reply,)), 2.0)
    for number in range(3, 103):
        fleet.apply_heartbeat(
            make_heartbeat(number, 0, calls=(make_call(98 + number),)), float(number)
        )
    stream = get_only_attempt(fleet).processes[0].streams[1]
    assert sorted(stream.calls) == list(range(1, 201))
    assert len(stream.calls) < CALLS_KEPT


def test_answered_window_without_a_step_is_one_of_all_calls() -> None:
    fleet = Fleet()
    fleet.apply_heartbeat(make_heartbeat(1, 0, calls=(make_call(100),)), 1.0)
    reply = heartbeat.CallsReply(
        key="0-0", request="r", uid=1, calls=(make_call(7),), from_seq=7, to_seq=7, step=0
    )
    fleet.apply_heartbeat(heartbeat.Heartbeat(host="n0", agent="a0", number=2, calls=(reply,)), 2.0)
    stream = get_only_attempt(fleet).processes[0].streams[1]
    assert stream.has_answered(CallWindow(7, 7))


def test_common_parts_of_calls_are_shared() -> None:
    fleet = Fleet()
    for rank in range(4):
        fleet.apply_heartbeat(make_heartbeat(1, rank, calls=(make_call(5),)), 1.0)
    calls = [process.streams[1].calls[5] for process in get_only_attempt(fleet).processes.values()]
    assert calls == [make_call(5)] * 4
    assert (
        len({id(call.signature) for call in calls}) == len({id(call.site) for call in calls}) == 1
    )


def test_attempt_is_finished_when_last_process_has_exited() -> None:
    fleet = Fleet()
    for rank in range(3):
        fleet.apply_heartbeat(make_heartbeat(1, rank), 1.0)
    attempt = get_only_attempt(fleet)
    assert not attempt.is_finished
    for number, rank in ((2, 0), (2, 2), (2, 1)):  # in any order
        assert not attempt.is_finished
        fleet.apply_heartbeat(make_heartbeat(number, rank, ended=ExitInfo(exit_status=0)), 2.0)
    assert attempt.is_finished
    # A host's first heartbeat arrives late: its process had started before the others exited.
    fleet.apply_heartbeat(make_heartbeat(1, 3), 1.5)
    assert get_only_attempt(fleet) is attempt
    assert not attempt.is_finished
    fleet.apply_heartbeat(make_heartbeat(2, 3, ended=ExitInfo(exit_status=0)), 3.0)
    assert attempt.is_finished


GROUP_ADDRESS = "group engines:0123456789abcdef"
OTHER_ADDRESS = "group engines:fedcba9876543210"


def make_engines(fleet: Fleet, address: str, host: str, name: str = "serving") -> ScriptedJob:
    """Two processes that are ranks only as members of a group, and that have made a call there."""
    job = ScriptedJob(2, name=name, master=address, fleet=fleet, host=host)
    for rank in (0, 1):
        job.make_foreign_call(rank, rank, store=address, done=True)
    job.send_heartbeats()
    return job


def test_members_of_each_group_without_a_world_are_a_job() -> None:
    fleet = Fleet()
    make_engines(fleet, GROUP_ADDRESS, "node0")
    make_engines(fleet, OTHER_ADDRESS, "node1")
    jobs = {attempt.job: attempt for attempt in fleet.list_family("serving")}
    assert jobs.keys() == {f"serving/{GROUP_ADDRESS}", f"serving/{OTHER_ADDRESS}"}
    for attempt in jobs.values():
        assert attempt.is_of_group
        assert attempt.processes.keys() == {0, 1}
        assert {s.group.ranks for p in attempt.processes.values() for s in p.streams.values()} == {
            (0, 1)
        }
    make_engines(fleet, GROUP_ADDRESS, "node2", name=GROUP_ADDRESS)
    assert fleet.latest_attempt(GROUP_ADDRESS) is not None, "no launcher gave it a name"


@pytest.mark.parametrize("is_group_first", [True, False])
def test_group_without_a_world_does_not_change_a_world_of_the_same_name(
    is_group_first: bool,
) -> None:
    fleet = Fleet()
    if is_group_first:
        make_engines(fleet, GROUP_ADDRESS, "node1")
    trainers = ScriptedJob(2, name="serving", master="node0:29500", fleet=fleet)
    # One of the trainers is in a group with an engine, by the same store.
    trainers.make_foreign_call(0, 0, store=GROUP_ADDRESS)
    trainers.send_heartbeats()
    if not is_group_first:
        make_engines(fleet, GROUP_ADDRESS, "node1")
    world, group = fleet.list_family("serving")
    assert (world.job, group.job) == ("serving", f"serving/{GROUP_ADDRESS}")
    assert world.addresses.keys() == {"node0:29500"}
    [stream] = world.processes[0].streams.values()
    assert stream.group.known_ranks == (0,)
    assert "whose process is not known" in stream.group.outside_labels[0]


def test_member_that_joins_a_world_becomes_a_rank_of_it() -> None:
    fleet = Fleet()
    engines = make_engines(fleet, GROUP_ADDRESS, "node0")
    engines.master = "node0:29500"
    engines.send_heartbeats()
    assert [a.job for a in fleet.attempts.values() if a.processes] == ["serving"]
    for attempt in [a for a in fleet.attempts.values() if not a.processes]:
        fleet.forget_attempt(attempt)
    assert fleet.former_attempts[f"serving/{GROUP_ADDRESS}"].is_finished
    world = fleet.latest_attempt("serving")
    assert world is not None and world.processes.keys() == {0, 1}
    assert {s.group.ranks for p in world.processes.values() for s in p.streams.values()} == {(0, 1)}
