"""What arrives with one credential cannot touch what arrived with another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import AttemptKey, ExitInfo
from hangwatch.protocol import heartbeat
from hangwatch.tracking import fleet as fleet_module
from hangwatch.tracking.fleet import OWNER_SILENT_S, Fleet
from hangwatch.tracking.tenants import get_tenant, qualify_agent, take_turns

IDENTITY = heartbeat.ProcessIdentity(job="run7", rank=1, world_size=2, pid=2, start_ticks=1)
UPDATE = heartbeat.ProcessUpdate(key="2-1", identity=IDENTITY, state="S")
KILLED = replace(UPDATE, identity=None, ended=ExitInfo(signal=9))
OWN, OTHER = "run7", "evil"  # tenants


def make_heartbeat(
    tenant: str, *processes: heartbeat.ProcessUpdate, agent: str = "a", number: int = 1
) -> heartbeat.Heartbeat:
    return heartbeat.Heartbeat(
        host="node",
        agent=qualify_agent(tenant, agent),
        owner=f"secret of {tenant}",
        number=number,
        processes=processes,
    )


@pytest.fixture
def fleet() -> Fleet:
    """The job's own node agent has reported."""
    made = Fleet()
    assert made.apply_heartbeat(make_heartbeat(OWN, UPDATE), 1.0)
    return made


def test_names_of_node_agents_tell_tenants_apart() -> None:
    names = [qualify_agent(tenant, "a") for tenant in ("", OWN, OTHER, "uid 1000")]
    assert len({*names}) == 4 and names[0] == "a"
    assert [get_tenant(name) for name in names] == ["", OWN, OTHER, "uid 1000"]


def test_numbers_of_heartbeats_are_a_tenants_own(fleet: Fleet) -> None:
    fleet.apply_heartbeat(make_heartbeat(OTHER, number=2**60), 2.0)
    ended = replace(UPDATE, identity=None, ended=ExitInfo(exit_status=0))
    assert fleet.apply_heartbeat(make_heartbeat(OWN, ended, number=2), 3.0)
    assert fleet.attempts[AttemptKey("run7", 0)].processes[1].exit == ended.ended


@pytest.mark.parametrize("silent_s", [1.0, OWNER_SILENT_S + 1.0])
def test_update_without_identity_reaches_own_processes_only(fleet: Fleet, silent_s: float) -> None:
    forged = replace(make_heartbeat(OTHER, KILLED), gone=("2-1",))
    assert not fleet.apply_heartbeat(forged, 1.0 + silent_s), "the identity is requested"
    process = fleet.attempts[AttemptKey("run7", 0)].processes[1]
    assert process.is_alive and not process.finished_reporting


def test_claimed_key_is_another_process(fleet: Fleet) -> None:
    claim = replace(UPDATE, identity=replace(IDENTITY, job="evil"), ended=ExitInfo(signal=9))
    fleet.apply_heartbeat(make_heartbeat(OTHER, claim), OWNER_SILENT_S + 2.0)
    assert fleet.attempts[AttemptKey("run7", 0)].processes[1].is_alive
    assert not fleet.attempts[AttemptKey("evil", 0)].processes[1].is_alive
    assert fleet.process_counts == {"run7": 1, "evil": 1}


def test_successor_with_the_servers_token_takes_over(fleet: Fleet) -> None:
    """It knows the secret of the run dir."""
    beat = replace(make_heartbeat("", UPDATE, agent="successor"), owner=f"secret of {OWN}")
    assert fleet.apply_heartbeat(beat, 2.0)
    [process] = fleet.processes.values()
    assert process.agent == "successor" and not [*fleet.list_processes(qualify_agent(OWN, "a"))]


def test_node_agent_that_was_forgotten_may_return(fleet: Fleet) -> None:
    fleet.agents.forget_silent(qualify_agent(OWN, "a"))
    later = replace(UPDATE, step=5)
    assert not fleet.apply_heartbeat(
        make_heartbeat(OWN, replace(later, identity=None), number=2), 5000.0
    )
    assert fleet.apply_heartbeat(make_heartbeat(OWN, later, number=3), 5001.0)
    [process] = fleet.processes.values()
    assert (process.step, process.reports.last_seen_at) == (5, 5001.0)
    fleet.apply_heartbeat(make_heartbeat(OWN, number=4), 5002.0)
    assert process.reports.last_seen_at == 5002.0


def test_dropped_processes_of_one_tenant_are_unknown_to_another(fleet: Fleet) -> None:
    claim = replace(UPDATE, identity=replace(IDENTITY, job="evil"))
    fleet.apply_heartbeat(make_heartbeat(OTHER, claim), 1.0)
    evil = fleet.attempts[AttemptKey("evil", 0)]
    fleet.forget_attempt(evil)
    fleet.drop_processes(evil, 1)
    fleet.apply_heartbeat(make_heartbeat(OTHER, claim, number=2), 2.0)
    assert AttemptKey("evil", 0) not in fleet.attempts, "its own is ignored from now on"
    ended = replace(UPDATE, identity=None, ended=ExitInfo(exit_status=0))
    fleet.apply_heartbeat(make_heartbeat(OWN, ended, number=2), 2.0)
    assert fleet.attempts[AttemptKey("run7", 0)].processes[1].exit == ended.ended


@pytest.mark.parametrize(("tenant", "is_joined"), [(OTHER, False), (OWN, True)])
def test_group_without_a_world_joins_no_other_tenants_processes(
    tenant: str, is_joined: bool
) -> None:
    fleet = Fleet()
    for number, (reporter, job) in enumerate([(OWN, "run7"), (tenant, f"{tenant}/x")]):
        stream = heartbeat.StreamUpdate(
            uid=1,
            entered=1,
            identity=heartbeat.StreamIdentity(
                kind=StreamKind.COLLECTIVE,
                name="transfer",
                desc="",
                ranks="0-1",
                foreign="a store",
                number=number,
            ),
        )
        update = replace(UPDATE, identity=replace(IDENTITY, job=job), streams=(stream,))
        fleet.apply_heartbeat(make_heartbeat(reporter, update, agent=f"a{number}"), 1.0)
    process = fleet.attempts[AttemptKey("run7", 0)].processes[1]
    labels = process.streams[1].group.outside_labels
    assert any(f"of job {tenant}/x" in label for label in labels) == is_joined


def test_former_attempts_of_one_family_displace_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "FORMER_ATTEMPTS_KEPT", 4)
    fleet = Fleet()
    for number, job in enumerate(["run7", *(f"evil/{n}" for n in range(8))], 1):
        update = replace(UPDATE, key=f"{number}-1", identity=replace(IDENTITY, job=job))
        fleet.apply_heartbeat(make_heartbeat("", update, number=number), float(number))
        fleet.forget_attempt(fleet.attempts[AttemptKey(job, 0)])
    assert [*fleet.former_attempts] == ["run7", "evil/5", "evil/6", "evil/7"]


def test_families_take_turns() -> None:
    jobs = ["a", "a/1", "a/2", "b", "b/1", "c"]
    assert take_turns(jobs) == ["a", "b", "c", "a/1", "b/1", "a/2"]
