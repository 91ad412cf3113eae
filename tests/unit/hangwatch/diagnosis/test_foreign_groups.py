"""Groups that number their members by themselves: who is behind a number, and who is never accused."""

from __future__ import annotations

from hangwatch.diagnosis.graph.graph import build_wait_graph
from hangwatch.model.calls import ANY_SOURCE, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Frame
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.fleet import Fleet
from tests.simulation.scripted_job import ScriptedJob

BLOCKED = Frame(function="wait_for_weights", file="/home/me/engine.py", line=7)


def get_transfer_group(job: ScriptedJob, rank: int) -> Group:
    streams = job.latest_attempt.processes[rank].streams.values()
    return next(s.group for s in streams if s.group.foreign and s.kind is StreamKind.COLLECTIVE)


def make_transfer_job() -> ScriptedJob:
    """Ranks 2 and 3 are members 0 and 1; rank 2 waits there, ranks 0 and 1 at a barrier."""
    job = ScriptedJob(4)
    job.make_calls()
    for rank, number in ((2, 0), (3, 1)):
        job.make_foreign_call(rank, number, "new_process_group", done=True, kind=StreamKind.SETUP)
    job.make_foreign_call(2, 0, "barrier")
    for rank in (0, 1):
        job.make_call(rank, "barrier")
    return job


def diagnose_only(job: ScriptedJob) -> Verdict:
    verdicts = job.list_due_verdicts()
    assert len(verdicts) == 1, [v.summary for v in verdicts]
    return verdicts[0]


def test_member_that_computes_is_no_deadlock() -> None:
    job = make_transfer_job()
    job.advance_time(3)
    assert job.list_due_verdicts() == []
    assert get_transfer_group(job, 2).ranks == (2, 3)


def test_process_behind_a_number_is_named() -> None:
    job = make_transfer_job()
    job.send_heartbeats()
    job.advance_time(6)
    job.send_heartbeats()
    job.report_stack(3, BLOCKED)
    job.advance_time(6)
    job.send_heartbeats()
    job.report_stack(3, BLOCKED)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (3,))
    assert verdict.waiting == (0, 1, 2)


def test_unknown_member_is_no_rank() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.make_foreign_call(2, 0, "barrier")
    for rank in (0, 1, 3):
        job.make_call(rank, "barrier")
    job.send_heartbeats()
    job.advance_time(12)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.SLOW_RANK, Severity.WARNING)
    assert verdict.culprits == () and verdict.waiting == (0, 1, 2, 3)
    assert "member 1 of group transfer (whose process is not known) has not entered" in (
        verdict.summary
    )
    group = verdict.group
    assert group is not None and group.known_ranks == (2,) and len(group.outside_labels) == 1
    job.advance_time(60)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.MISSING_RANK, Severity.ALERT)
    assert verdict.culprits == ()


def test_groups_of_one_name_are_two() -> None:
    """Each trainer rank has a group with an engine rank: one name, but two stores."""
    job = ScriptedJob(4)
    job.make_calls()
    for rank in range(4):
        job.make_foreign_call(rank, rank // 2, store=f"store {rank % 2}", done=True)
    job.make_foreign_call(0, 0, store="store 0", done=True)
    job.advance_time(12)
    assert job.list_due_verdicts() == []
    assert get_transfer_group(job, 0).ranks == (0, 2)
    assert get_transfer_group(job, 3).ranks == (1, 3)


def test_ranks_of_later_groups_are_no_numbers() -> None:
    """The numbers 0 and 1 of a foreign group are written like the ranks 0 and 1 of a process group."""
    job = ScriptedJob(4)
    job.make_calls()
    for rank, number in ((2, 0), (3, 1)):
        job.make_foreign_call(rank, number, done=True)
    job.send_heartbeats()
    job.add_group("first two", (0, 1))
    for rank in (0, 1):
        job.make_call(rank, group="first two")
    job.send_heartbeats()
    groups = [s.group for s in job.latest_attempt.processes[0].streams.values()]
    assert (0, 1) in [group.ranks for group in groups if not group.foreign]
    members = job.latest_attempt.count_members()
    assert members == 4 + 4 + 2 + 2, "of the world, its group, the foreign group and the new one"


def test_number_that_two_processes_claim_says_nothing() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    for rank, number in ((0, 0), (1, 0), (2, 1), (3, 1)):
        job.make_foreign_call(rank, number, done=True)
    job.make_foreign_call(0, 0)
    job.send_heartbeats()
    job.advance_time(12)
    verdict = diagnose_only(job)
    assert verdict.kind is VerdictKind.SLOW_RANK and verdict.culprits == ()
    assert get_transfer_group(job, 0).known_ranks == (0,)
    assert get_transfer_group(job, 1).known_ranks == (1,)


def test_mismatch_inside() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    for rank, number in ((3, 0), (1, 1), (2, 2)):
        op = "broadcast" if rank != 1 else "all_reduce"
        job.make_foreign_call(rank, number, op, size=3)
    job.advance_time(3)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISMATCH, (1,))
    assert verdict.waiting == (2, 3)


def test_messages_reach_the_process_behind_a_number() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.make_foreign_call(2, 0, "send", kind=StreamKind.SEND, peer=1, done=True)
    job.make_foreign_call(3, 1, "recv", kind=StreamKind.RECV, peer=0, done=True)
    job.make_foreign_call(3, 1, "recv", kind=StreamKind.RECV, peer=0)
    job.send_heartbeats()
    streams = job.latest_attempt.processes[3].streams.values()
    (receiving,) = (s for s in streams if s.kind is StreamKind.RECV)
    assert receiving.peer == 2 and receiving.other_end is not None
    assert receiving.other_end.kind is StreamKind.SEND


def test_receive_from_any_source_counts_the_messages_of_the_process_behind_a_number() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.make_foreign_call(3, 1, "send", kind=StreamKind.SEND, peer=0, done=True)
    job.make_foreign_call(2, 0, "recv", kind=StreamKind.RECV, peer=ANY_SOURCE, done=True)
    job.make_foreign_call(2, 0, "recv", kind=StreamKind.RECV, peer=ANY_SOURCE)
    job.send_heartbeats()
    job.advance_time(3)
    job.send_heartbeats()
    graph = build_wait_graph(job.latest_attempt, job.now, Limits())
    assert [call.awaited for call in graph.blocked_calls[2]] == [{3: 2}]


def make_two_jobs() -> tuple[ScriptedJob, ScriptedJob]:
    """Trainer rank 0 and engine rank 1 are members 0 and 1 of a group between their jobs."""
    trainer = ScriptedJob(2, name="trainer")
    engine = ScriptedJob(2, name="engine", fleet=trainer.fleet, host="node1")
    for job in (trainer, engine):
        job.make_calls()
    trainer.make_foreign_call(0, 0, done=True)
    engine.make_foreign_call(1, 1, done=True)
    for job in (trainer, engine):
        job.send_heartbeats()
    return trainer, engine


def advance_both(trainer: ScriptedJob, engine: ScriptedJob, seconds: float) -> None:
    for job in (trainer, engine):
        job.advance_time(seconds)
    for job in (trainer, engine):
        job.send_heartbeats()


def test_member_in_another_job_is_named_there() -> None:
    trainer, engine = make_two_jobs()
    trainer.make_foreign_call(0, 0)
    trainer.make_call(1)
    advance_both(trainer, engine, 6)
    engine.report_stack(1, BLOCKED)
    advance_both(trainer, engine, 6)
    engine.report_stack(1, BLOCKED)
    verdict = diagnose_only(engine)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))
    assert verdict.waiting == () and "engine.py:7" in verdict.summary
    assert trainer.list_due_verdicts() == []
    unexplained = trainer.run_diagnosis().unexplained_wait
    assert unexplained is not None and "rank 1 of job engine" in unexplained.description


def test_victim_in_another_job_is_not_named() -> None:
    """The engine's rank 1 waits for its rank 0, and so the trainer waits too."""
    trainer, engine = make_two_jobs()
    trainer.make_foreign_call(0, 0)
    engine.make_call(1)
    advance_both(trainer, engine, 6)
    engine.report_stack(0, BLOCKED)
    advance_both(trainer, engine, 6)
    engine.report_stack(0, BLOCKED)
    assert diagnose_only(engine).culprits == (0,)
    assert trainer.list_due_verdicts() == []


def test_member_that_has_ended_is_mentioned() -> None:
    trainer, engine = make_two_jobs()
    trainer.make_foreign_call(0, 0)
    for rank in (0, 1):
        engine.end_process(rank, status=0)
    advance_both(trainer, engine, 12)
    verdict = diagnose_only(trainer)
    assert verdict.culprits == () and "rank 1 of job engine" in verdict.summary


def test_group_is_forgotten_with_its_members() -> None:
    trainer, engine = make_two_jobs()
    fleet: Fleet = trainer.fleet
    assert fleet.foreign_groups._groups_by_identity
    for job in (trainer, engine):
        attempt = job.latest_attempt
        fleet.forget_attempt(attempt)
        while fleet.drop_processes(attempt, 100):
            pass
    fleet.foreign_groups.connect_members()
    assert not fleet.foreign_groups._groups_by_identity
    assert not fleet.foreign_groups._members_by_value


def make_engines(size: int, known: int) -> ScriptedJob:
    """The first ``known`` members of a group that no world contains; all but member 1 are in a call."""
    job = ScriptedJob(size, master="group transfer:0123456789abcdef", name="job")
    for number in range(known, size):
        job.ranks[number].is_reporting = False
    for number in range(known):
        job.make_foreign_call(number, number, size=size, done=True)
        if number != 1:
            job.make_foreign_call(number, number, size=size)
    job.send_heartbeats()
    job.name = f"job/{job.master}"
    return job


def report(job: ScriptedJob) -> None:
    """The processes name their job, without the address by which the server distinguishes it."""
    name, job.name = job.name, "job"
    job.send_heartbeats()
    job.name = name


def test_member_without_a_world_is_named() -> None:
    job = make_engines(3, known=3)
    for _ in range(2):
        job.advance_time(6)
        report(job)
        job.report_stack(1, BLOCKED)
    [verdict] = job.run_diagnosis().verdicts
    assert verdict.is_confirmed
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))
    assert verdict.waiting == (0, 2)


def test_unknown_member_of_a_group_without_a_world_remains_a_warning() -> None:
    job = make_engines(2, known=1)
    for _ in range(3):
        job.advance_time(60)
        report(job)
    [verdict] = job.run_diagnosis().verdicts
    assert (verdict.kind, verdict.severity) == (VerdictKind.SLOW_RANK, Severity.WARNING)
    assert verdict.culprits == ()


def test_engines_without_requests_are_not_quiet() -> None:
    job = make_engines(2, known=2)
    job.complete_calls(0, "store collective None")
    for _ in range(20):
        job.advance_time(10)
        report(job)
        for request in job.run_diagnosis().requests:
            job.report_stack(request.rank, BLOCKED)
    assert job.run_diagnosis().verdicts == ()
