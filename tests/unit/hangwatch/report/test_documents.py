"""The JSON documents of verdicts and incidents."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

from hangwatch.model.calls import Call, Signature, Site
from hangwatch.model.groups import Group
from hangwatch.model.hardware import HostObservation, MissingEvidence, Observation, Weight
from hangwatch.model.incidents import (
    Incident,
    MergedStack,
    ProcessSnapshot,
    RankAbort,
    Recovery,
    Resolution,
)
from hangwatch.model.kernels import Kernel, RankKernels
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExceptionInfo, Frame
from hangwatch.model.verdicts import (
    AlignedPair,
    CallClass,
    DevicePosition,
    Divergence,
    Side,
    Verdict,
    Wait,
)
from hangwatch.report.documents import build_document, build_incident_event, parse_document
from hangwatch.server.core.schema import describe_document

MOMENT = datetime(2026, 1, 1, 12, 30, 5, 250000, tzinfo=timezone.utc)
SITE = Site(file="/home/me/train.py", line=41, function="step")
GROUP = Group(name="0", desc="default_pg", ranks=(0, 1, 2), backend="gloo")


def make_call(op: str, *, seq: int = 7, raised: bool = False, is_aligned: bool = False) -> Call:
    """The calls of a divergence are shown without their split sizes and peers."""
    signature = Signature(
        op=op,
        shapes=((64,), (2, 3)),
        dtype="float32",
        reduce_op="sum",
        root=1,
        splits=None if is_aligned else ((1, 2), (3, 4)),
        detail="ranks 0-2",
    )
    return Call(
        seq=seq, signature=signature, site=SITE, peer=None if is_aligned else 2, raised=raised
    )


VERDICT = Verdict(
    kind=VerdictKind.MISMATCH,
    severity=Severity.ALERT,
    culprits=(1,),
    waiting=(0, 2),
    group=GROUP,
    seq=7,
    differing_fields=("op",),
    calls=(
        CallClass(ranks=(0, 2), call=make_call("all_reduce")),
        CallClass(ranks=(1,), call=make_call("broadcast")),
    ),
    waits=(Wait(rank=0, on_rank=1, group="0", seq=7),),
    summary="rank 1 called broadcast",
    advice="Look at train.py.",
    site=SITE,
    divergence=Divergence(
        group=GROUP,
        sides=(Side(ranks=(0, 2)), Side(ranks=(1,))),
        rows=(
            AlignedPair(calls=(make_call("all_reduce", is_aligned=True), None), omitted=3),
            AlignedPair(
                calls=(
                    make_call("barrier", is_aligned=True),
                    make_call("barrier", seq=6, raised=True, is_aligned=True),
                )
            ),
        ),
        since_seq=7,
        note="rank 1 left out one call",
    ),
)

INCIDENT = Incident(
    id="01J00000000000000000000000",
    job="run7",
    attempt=2,
    status="resolved",
    onset_at=MOMENT,
    opened_at=MOMENT + timedelta(seconds=1),
    resolved_at=MOMENT.replace(microsecond=0) + timedelta(seconds=60),
    resolution=Resolution.ABORTED,
    **VERDICT.list_fields(),
    processes=(
        ProcessSnapshot(
            rank=1,
            host="node1",
            pid=4712,
            state="S",
            signal=9,
            exception=ExceptionInfo(type="ValueError", message="no", site=SITE),
        ),
    ),
    device=(
        DevicePosition(rank=1, group="0", enqueued=7, started=5, completed=5, age_s=0.4),
        DevicePosition(rank=2, group="0", enqueued=7, completed=6),
    ),
    hardware=(
        HostObservation(
            host="node1",
            observation=Observation(
                source="infiniband",
                about="mlx5_0/1",
                what="link_downed",
                before=2,
                now=3,
                weight=Weight.FAULT,
                age_s=1.2,
            ),
        ),
    ),
    hardware_missing=(
        MissingEvidence(
            hosts=("node1", "node2"), source="kernel log", reason="refused", remedy="permit it"
        ),
    ),
    stacks=(
        MergedStack(
            ranks=(1,),
            thread="MainThread",
            source="py-spy",
            taken_at=MOMENT,
            frames=(Frame(function="step", file="train.py", line=41, text="x.backward()"),),
        ),
        MergedStack(ranks=(0, 2), source="py-spy", taken_at=MOMENT, error="no permission"),
    ),
    kernels=(
        RankKernels(
            rank=1,
            source="cuda-gdb",
            taken_at=MOMENT,
            kernels=(Kernel(name="spin", device=3, grid=(2, 1, 1), block=(128, 1, 1)),),
        ),
        RankKernels(rank=2, source="cuda-gdb", taken_at=MOMENT, error="no permission"),
    ),
    recovery=Recovery(
        state="done",
        scope="culprits",
        ranks=(1,),
        number=1,
        limit=3,
        planned_at=MOMENT,
        due_at=MOMENT,
        announced_at=MOMENT,
        done_at=MOMENT,
        aborts=(
            RankAbort(
                rank=1,
                host="node1",
                pid=4712,
                ordered_at=MOMENT,
                result="ended",
                ended_at=MOMENT,
                signal=9,
            ),
        ),
    ),
)


def test_analyze_and_server_give_the_same_fields() -> None:
    """`hangwatch analyze` prints the verdict's document, the server the incident's."""
    verdict_document = build_document(VERDICT)
    incident_document = build_document(INCIDENT)
    assert verdict_document.items() <= incident_document.items()
    assert incident_document.keys() - verdict_document.keys() == {
        "id",
        "job",
        "attempt",
        "status",
        "onset_at",
        "opened_at",
        "resolved_at",
        "resolution",
        "processes",
        "device",
        "hardware",
        "hardware_missing",
        "stacks",
        "kernels",
        "recovery",
    }


def test_documents_have_exactly_the_fields_of_the_http_schema() -> None:
    document = build_document(INCIDENT)
    described = describe_document(Incident).model_validate(document).model_dump(mode="json")
    assert described == document
    assert list(described) == list(document)
    assert json.loads(json.dumps(document)) == document


def test_parsing_a_document_gives_the_incident() -> None:
    document = json.loads(json.dumps(build_document(INCIDENT)))
    assert parse_document(Incident, document) == INCIDENT


def test_documents_of_older_releases_have_default_values() -> None:
    """Old documents have no site, divergence, resolution or recovery, and fewer fields of calls."""
    call = {"ranks": [0], "seq": 7, "op": "all_reduce"}
    stack = {"ranks": [0], "source": "py-spy", "taken_at": "2026-01-01T00:00:00Z"}
    old = {
        "id": "I",
        "job": "run7",
        "attempt": 0,
        "kind": "missing_rank",
        "severity": "alert",
        "status": "open",
        "onset_at": "2026-01-01T00:00:00Z",
        "opened_at": "2026-01-01T00:00:00.250000Z",
        "summary": "",
        "advice": "",
        "culprits": [1],
        "waiting": [0],
        "group": {"name": "0", "desc": "", "ranks": [0, 1]},
        "calls": [call],
        "stacks": [stack],
        "processes": [{"rank": 1}],
        "later": "an unknown field of a newer release",
    }
    document = build_document(parse_document(Incident, old))
    expected = describe_document(Incident).model_validate(old).model_dump(mode="json")
    assert document == expected


def test_events_leave_out_large_fields() -> None:
    document = build_document(INCIDENT)
    event = build_incident_event(INCIDENT)
    assert document.keys() - event.keys() == {
        "calls",
        "waits",
        "stacks",
        "kernels",
        "device",
        "hardware",
        "hardware_missing",
    }
    assert event.items() <= document.items()
