"""The states of ranks, and the headline of an incident and of a job."""

from __future__ import annotations

from collections import Counter

import msgspec

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import AttemptKey, ExitInfo, Lifecycle, RankState
from hangwatch.protocol import heartbeat
from hangwatch.server.incidents.registry import IncidentRecord
from hangwatch.server.monitor import views
from hangwatch.server.monitor.views import compute_states, describe_job_status
from hangwatch.tracking.fleet import Fleet
from tests.unit.incident_documents import make_incident
from tests.unit.server.attempts import make_attempt


def test_each_state_has_its_evidence() -> None:
    attempt = make_attempt(ranks=9, world=10)
    processes = attempt.processes
    processes[1].lifecycle = Lifecycle.STARTING
    processes[2].exit, processes[3].exit, processes[4].exit = (
        ExitInfo(exit_status=0),
        ExitInfo(signal=9),
        ExitInfo(),
    )
    processes[5].activity.state, processes[5].activity.state_since = "T", 90.0
    processes[0].activity.state, processes[0].activity.state_since = (
        "t",
        99.9,
    )  # py-spy is sampling it
    processes[6].reports.last_seen_at = 50.0
    for process in processes.values():
        attempt.update_suspects(process)
    records = [
        IncidentRecord(incident=make_incident(culprits=[7], waiting=[])),
        IncidentRecord(
            incident=make_incident(
                kind=VerdictKind.SLOW_RANK, severity=Severity.WARNING, culprits=[8], waiting=[0]
            )
        ),
    ]
    states = compute_states(attempt, records, 100.0, Limits().lost_after_s)
    assert [states[r].value for r in range(10)] == [
        "running", "starting", "exited", "dead", "dead", "frozen", "lost", "stalled", "slow", "missing",
    ]  # fmt: skip


def test_mismatch_without_hang_does_not_stall_job() -> None:
    records = [IncidentRecord(incident=make_incident(kind=VerdictKind.MISMATCH, waiting=[]))]
    assert (
        compute_states(make_attempt(), records, 100.0, Limits().lost_after_s)[1]
        is RankState.RUNNING
    )


def test_call_older_than_a_second_is_waiting() -> None:
    fleet = Fleet()
    stream = heartbeat.StreamUpdate(
        uid=1,
        identity=heartbeat.StreamIdentity(
            kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0-1"
        ),
        entered=5,
        completed=4,
        op="all_reduce",
        pending_s=12.1,
    )
    identity = heartbeat.ProcessIdentity(job="j", rank=0, world_size=2, pid=1, start_ticks=1)
    update = heartbeat.ProcessUpdate(key="1-1", lifecycle=3, identity=identity, streams=(stream,))
    fleet.apply_heartbeat(
        heartbeat.Heartbeat(host="n", agent="a", number=1, processes=(update,)), 100.0
    )
    attempt = fleet.attempts[AttemptKey("j", 0)]
    assert compute_states(attempt, [], 100.0, Limits().lost_after_s) == {
        0: RankState.WAITING,
        1: RankState.MISSING,
    }
    assert Counter(compute_states(attempt, [], 100.0, Limits().lost_after_s).values()) == {
        RankState.WAITING: 1,
        RankState.MISSING: 1,
    }
    document = msgspec.json.decode(
        msgspec.json.encode(views.describe_rank(attempt, 0, RankState.WAITING, 100.0))
    )
    assert document["waiting_s"] == 12.1
    assert document["groups"] == [
        {
            "name": "0",
            "desc": "default_pg",
            "ranks": [0, 1],
            "outside": [],
            "entered": 5,
            "completed": 4,
            "op": "all_reduce",
            "device": None,
            "incomplete": None,
        }
    ]


def test_headline_names_line_of_single_culprit() -> None:
    site = {"file": "/u/train.py", "line": 41, "function": "step"}
    assert (
        views.format_verdict(make_incident(site=site))
        == "rank 1 has not entered all_reduce: it is at train.py:41 in step"
    )
    assert (
        views.format_verdict(make_incident(site=site, summary="rank 1 is at train.py:41"))
        == "rank 1 is at train.py:41"
    )
    assert (
        views.format_verdict(make_incident(site=site, culprits=[1, 2]))
        == "rank 1 has not entered all_reduce"
    )
    assert (
        views.format_verdict(make_incident(site=site, kind=VerdictKind.EXITED_RANK))
        == "rank 1 has not entered all_reduce"
    )


def test_headline_names_first_of_many_unreported_ranks() -> None:
    job = make_attempt(ranks=3, world=100_000)
    view = views.describe_job(
        job, Counter(compute_states(job, [], 100.0, Limits().lost_after_s).values()), [], 100.0
    )
    assert (
        "Not reported yet: ranks 3-99999." in describe_job_status(job, view, 60.0, None, 100.0)[1]
    )
    for rank in range(5, 100_000, 2):
        job.processes[rank] = job.processes[0]
    text = describe_job_status(job, view, 60.0, None, 100.0)[1]
    assert "Not reported yet: ranks 3-4, 6, 8, 10, " in text and len(text) < 250
