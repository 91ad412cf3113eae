"""What a server accepts once it keeps as much in memory as it may."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol import heartbeat
from hangwatch.server.core import limits
from hangwatch.server.core.limits import read_resident_bytes
from hangwatch.server.core.problems import Problem
from hangwatch.server.ingest.heartbeat_checks import check_memory
from hangwatch.tracking.fleet import Fleet


def make_process(
    pid: int, *, job: str = "j", world_size: int = 2, restart: int = 0
) -> heartbeat.ProcessUpdate:
    return heartbeat.ProcessUpdate(
        key=f"{pid}-1",
        identity=heartbeat.ProcessIdentity(
            job=job, rank=1, world_size=world_size, pid=pid, start_ticks=1, restart=restart
        ),
    )


def make_heartbeat(*processes: heartbeat.ProcessUpdate, number: int = 1) -> heartbeat.Heartbeat:
    return heartbeat.Heartbeat(host="n", agent="a", number=number, processes=processes)


def test_known_processes_are_reported_and_new_ones_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet()
    known = make_heartbeat(make_process(1))
    check_memory(known, fleet, 0.0)
    fleet.apply_heartbeat(known, 1.0)
    monkeypatch.setattr(
        limits, "MEMORY", replace(limits.MEMORY, maximum=read_resident_bytes() // 2)
    )
    check_memory(make_heartbeat(make_process(1), number=2), fleet, 0.0)
    with pytest.raises(Problem, match="of a server's memory") as refusal:
        check_memory(make_heartbeat(make_process(2), number=3), fleet, 0.0)
    assert refusal.value.status == limits.MEMORY.status


def test_job_that_takes_the_most_of_scarce_memory_may_not_grow() -> None:
    fleet = Fleet()
    stream = heartbeat.StreamUpdate(
        1,
        1,
        identity=heartbeat.StreamIdentity(
            kind=StreamKind.COLLECTIVE, name="0", desc="", ranks="0-1"
        ),
    )
    known = replace(make_process(1, job="greedy/1"), streams=(stream,))
    check_memory(make_heartbeat(known), fleet, 0.0)
    fleet.apply_heartbeat(make_heartbeat(known), 1.0)
    fleet.restricted_family = "greedy"
    check_memory(make_heartbeat(known, make_process(2, job="modest"), number=2), fleet, 0.0)
    further = replace(known, identity=None, streams=(stream._replace(uid=2),))
    for grown in (make_process(3, job="greedy/2"), further):
        with pytest.raises(Problem, match="job 'greedy' takes the most of it") as refusal:
            check_memory(make_heartbeat(grown, number=3), fleet, 0.0)
        assert refusal.value.status == limits.MEMORY.status


def test_members_of_all_jobs_of_a_heartbeat_count_together() -> None:
    world_size = limits.RANK.maximum
    # The last one could only have half of what the others leave.
    jobs = limits.MEMBERS.maximum // world_size - 1
    assert jobs < limits.JOBS_PER_AGENT.maximum

    def check_jobs(count: int) -> None:
        processes = (make_process(n, job=f"job {n}", world_size=world_size) for n in range(count))
        check_memory(make_heartbeat(*processes), Fleet(), 0.0)

    check_jobs(jobs)
    with pytest.raises(Problem, match=limits.MEMBERS.text):
        check_jobs(jobs + 1)


def test_members_of_restarted_jobs_count() -> None:
    """A world counts for each attempt in memory."""
    fleet = Fleet()
    world_size = limits.RANK.maximum

    def start_attempt(restart: int) -> None:
        process = make_process(restart, world_size=world_size, restart=restart)
        beat = make_heartbeat(process, number=restart + 1)
        check_memory(beat, fleet, 0.0)
        fleet.apply_heartbeat(beat, float(restart))

    attempts = limits.MEMBERS.maximum // 2 // world_size
    for restart in range(attempts):
        start_attempt(restart)
    assert fleet.count_members() == limits.MEMBERS.maximum // 2
    with pytest.raises(Problem, match=limits.MEMBERS.text):
        start_attempt(attempts)


def make_groups(*ranks: str) -> tuple[heartbeat.StreamUpdate, ...]:
    return tuple(
        heartbeat.StreamUpdate(
            uid=number,
            entered=1,
            identity=heartbeat.StreamIdentity(
                kind=StreamKind.COLLECTIVE, name=str(number), desc="", ranks=packed
            ),
        )
        for number, packed in enumerate(ranks, 1)
    )


def test_groups_with_the_same_members_count_once() -> None:
    """They share these in memory, so that a large job may have hundreds of such groups."""
    fleet = Fleet()
    process = replace(make_process(1), streams=make_groups(*["0-99999"] * 200))
    check_memory(make_heartbeat(process), fleet, 0.0)
    fleet.apply_heartbeat(make_heartbeat(process), 0.0)
    assert fleet.count_members() == 100_002


@pytest.mark.parametrize("how", ["restarts", "ranks that end", "groups of the last attempt"])
def test_no_heartbeat_adds_more_than_its_jobs_share(how: str) -> None:
    """Otherwise the heartbeats of all other jobs would be refused."""
    fleet = Fleet()
    groups = make_groups(*(f"0-{20_000 + number}" for number in range(5)))
    first = replace(make_process(1, job="evil"), streams=groups)
    ended = ExitInfo(exit_status=0) if how == "ranks that end" else None

    def make_attempts(number: int) -> heartbeat.Heartbeat:
        processes = [first]
        for count in range(1, 20):
            restart = 0 if how == "ranks that end" else number * count
            process = make_process(100 * number + count, job="evil", restart=restart)
            assert process.identity is not None
            rank = count if how == "groups of the last attempt" else 1
            if how == "groups of the last attempt" and count > 1:
                restart = 0
            identity = replace(process.identity, restart=restart, rank=rank)
            processes.append(replace(process, identity=identity, ended=ended, streams=groups))
        return replace(make_heartbeat(*processes, number=number), agent=f"agent {number}")

    for number in range(1, 12):
        beat = make_attempts(number)
        with suppress(Problem):
            check_memory(beat, fleet, float(number))
            fleet.apply_heartbeat(beat, float(number))
    assert 0 < fleet.count_members() <= limits.MEMBERS.maximum // 2
    check_memory(make_heartbeat(make_process(1, job="modest", world_size=1000)), fleet, 99.0)


def test_one_job_leaves_half_to_others() -> None:
    """SECURITY.md: "A job leaves room for others", "Several hostile jobs together leave ever less to later
    ones: each takes half of the rest.".
    """
    limit = limits.Limit("things", 100, "things", "in memory", 429)
    limit.check_share(50, 50, "first")
    with pytest.raises(Problem, match="job 'first' may have 50, half of what other jobs leave"):
        limit.check_share(51, 51, "first")
    limit.check_share(25, 75, "second")
    with pytest.raises(Problem, match="at most 100 things in memory"):
        limit.check_share(26, 76, "second")
    limit.check_share(1, 100, "last")
    with pytest.raises(Problem, match="at most 100 things in memory"):
        limit.check_share(1, 101, "too late")


def test_a_launch_on_all_hosts_is_within_its_share() -> None:
    """100,000 ranks on 12,500 hosts, while their former attempt is still known."""
    # None of these raises Problem.
    limits.PROCESSES.check_share(2 * 100_000, 2 * 100_000, "large")
    limits.AGENTS.check_share(2 * 12_500, 2 * 12_500, "large")
    limits.AGENTS.check_share(12_500, 3 * 12_500, "another such job")


@pytest.mark.parametrize(
    ("limit", "maximum", "status"),
    [("ATTEMPTS", 8, 429), ("AGENTS", 8, 429), ("PROCESSES", 8, 429)],
)
def test_family_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch, limit: str, maximum: int, status: int
) -> None:
    """SECURITY.md: "What exceeds that is refused to it alone", "Jobs whose names have the same part before
    the first `/` share one quota.".
    """
    monkeypatch.setattr(limits, limit, replace(getattr(limits, limit), maximum=maximum))
    fleet = Fleet()

    def report(job: str, number: int) -> None:
        process = make_process(number, job=job)
        beat = replace(make_heartbeat(process), agent=f"agent {number} of {job}")
        check_memory(beat, fleet, 0.0)
        fleet.apply_heartbeat(beat, 1.0)

    for number in range(4):
        report(f"evil/{number}", number)
    with pytest.raises(
        Problem, match="job 'evil' may have 4, half of what other jobs leave"
    ) as raised:
        report("evil/4", 4)
    assert raised.value.status == status
    report("run7", 5)
