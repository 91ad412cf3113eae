"""The HTTP schema of incidents and dumps, and the parts of ``/openapi.json`` that FastAPI cannot
derive from the routes.

The schema validates requests, and only describes responses. Responses are encoded from the
documents of `hangwatch.report.documents`, and a test checks that these match the schema. Parts that
the documents have as they are in `hangwatch.model` are described from there. Jobs, ranks and groups
are described by `server.core.job_views`, whose objects are encoded as they are.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from hangwatch.model.calls import Site
from hangwatch.model.hardware import MissingEvidence, Weight
from hangwatch.model.incidents import IncidentStatus, Recovery, Resolution
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExceptionInfo
from hangwatch.model.verdicts import DevicePosition

from ..core import problems
from ..core.problems import ApiModel, Frame, GroupName
from ..ingest.heartbeat_checks import HeartbeatBody
from . import access

_PROBLEM_RESPONSE = {
    "description": "What is wrong, and the remedy, as an RFC 9457 problem document",
    "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
# All routes have these responses. FastAPI describes no 422 of its own where there is a "4XX".
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": _PROBLEM_RESPONSE,
    "5XX": _PROBLEM_RESPONSE,
}


def install_openapi(app: FastAPI, token: str | None) -> None:
    """Adds the problem documents, the token, and the heartbeat, which no FastAPI route parses."""
    generate = app.openapi

    def build_document() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = generate()
        heartbeat = TypeAdapter(HeartbeatBody).json_schema(
            ref_template="#/components/schemas/{model}"
        )
        document["components"]["schemas"] |= {
            **heartbeat.pop("$defs"),
            HeartbeatBody.__name__: heartbeat,
            "Problem": problems.PROBLEM_SCHEMA,
        }
        for path in access.PUBLIC_PATHS & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
        if token is not None:
            document["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer"}
            }
            document["security"] = [{"token": []}]
        return document

    app.openapi = build_document  # type: ignore[method-assign]


class Stack(ApiModel):
    """One stack, innermost frame first, or the ``error`` why there is none."""

    ranks: list[int]
    thread: str | None = None
    source: str
    taken_at: AwareDatetime
    frames: list[Frame] = Field(default=[])
    native: bool = False
    error: str | None = None


class UnfinishedCall(ApiModel):
    """The first collective of a group that had not completed when the watchdog wrote the file."""

    group: str
    desc: str
    seq: int
    op: str
    shapes: list[list[int]] = Field(default=[])
    state: str
    waited_s: float
    timeout_s: float | None = None
    timed_out: bool


class FlightFile(ApiModel):
    """A rank's Flight Recorder file, on its host."""

    path: str
    calls: list[UnfinishedCall] = Field(default=[])
    error: str | None = None  # why it could not be read


class Process(ApiModel):
    rank: int
    host: str | None = None
    pid: int | None = None
    state: str = "?"
    exit_status: int | None = None
    signal: int | None = None
    exception: ExceptionInfo | None = None
    flight_file: FlightFile | None = None  # the file that the rank's watchdog wrote


class HostObservation(ApiModel):
    """A value that one of the hosts concerned reports: a counter that grew, or a state."""

    host: str
    source: str  # the kind of evidence: "infiniband"
    about: str  # the part of the host: "mlx5_0/1", "GPU 3"
    what: str  # "link_downed"
    before: int | float | str | None = None
    now: int | float | str | None = None
    weight: Weight  # whether it can stop a job by itself
    age_s: float  # the age of the value or event when it became evidence


class CallClass(ApiModel):
    """The ranks that made the same call."""

    ranks: list[int]
    seq: int
    op: str
    shapes: list[list[int]] = Field(default=[])
    dtype: str | None = None
    reduce_op: str | None = None
    root: int | None = None  # the rank within the group, as torch reports it
    peer: int | None = None
    splits: list[list[int]] | None = None
    detail: str | None = None
    site: Site | None = None


class AlignedCall(ApiModel):
    op: str
    shapes: list[list[int]] = Field(default=[])
    dtype: str | None = None
    reduce_op: str | None = None
    root: int | None = None  # the rank within the group, as torch reports it
    detail: str | None = None
    raised: bool = False  # whether it ended with an exception
    site: Site | None = None


class AlignedRow(ApiModel):
    """One call of each side, or null if that side made no corresponding call."""

    seq: list[int | None]
    calls: list[AlignedCall | None]
    omitted: int = 0  # rows before this one, in which both sides agree


class Side(ApiModel):
    ranks: list[int]


class Divergence(ApiModel):
    """The last calls of two sides of a group, aligned: a call that one side added, omitted or made
    in another order has a row of its own.
    """

    group: GroupName
    since_seq: int | None = None  # the first call that only one side made, if that is certain
    note: str = ""
    sides: list[Side]
    rows: list[AlignedRow]


class Wait(ApiModel):
    """``rank`` waits for rank ``for``."""

    rank: int
    for_: int = Field(alias="for")
    group: str
    seq: int


class Incident(ApiModel):
    """One root cause, regardless of how many ranks wait."""

    id: str
    job: str
    attempt: int
    kind: VerdictKind
    severity: Severity
    status: IncidentStatus
    onset_at: AwareDatetime
    opened_at: AwareDatetime
    resolved_at: AwareDatetime | None = None
    resolution: Resolution | None = None  # why it was resolved
    summary: str
    advice: str
    culprits: list[int]
    waiting: list[int]
    group: GroupName | None = None
    seq: int | None = None
    fields: list[str] = Field(default=[])
    site: Site | None = None
    calls: list[CallClass] = Field(default=[])
    divergence: Divergence | None = None
    waits: list[Wait] = Field(default=[])
    processes: list[Process] = Field(default=[])
    device: list[DevicePosition] = Field(default=[])
    hardware: list[HostObservation] = Field(default=[])
    hardware_missing: list[MissingEvidence] = Field(default=[])
    stacks: list[Stack] = Field(default=[])
    recovery: Recovery | None = None  # null unless --on-hang abort applies to the incident


class DumpRequest(ApiModel):
    """``job`` may be omitted if only one is known."""

    model_config = ConfigDict(strict=True)

    job: str | None = None
    ranks: list[int] = Field(min_length=1, max_length=65536)
    native: bool = False


class DumpedRank(ApiModel):
    rank: int
    status: Literal["pending", "done", "failed"]
    error: str | None = None
    stacks: list[Stack] = Field(default=[])


class Dump(ApiModel):
    id: str
    job: str
    attempt: int
    native: bool
    status: Literal["pending", "done"]
    created_at: AwareDatetime
    ranks: list[DumpedRank]
