"""The parts of ``/openapi.json`` that FastAPI cannot derive from the routes, and the schema of dumps.

The schema validates requests, and only describes responses. The documents of incidents are described
by `server.core.schema`, jobs, ranks and groups by `server.core.job_views`, whose objects are encoded
as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from hangwatch.model.incidents import MergedStack
from hangwatch.report.documents import JsonObject

from ..core import problems
from ..core.schema import ApiModel, DocumentOf
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
    stacks: list[Annotated[JsonObject, DocumentOf(MergedStack)]] = Field(default=[])


class Dump(ApiModel):
    id: str
    job: str
    attempt: int
    native: bool
    status: Literal["pending", "done"]
    created_at: AwareDatetime
    ranks: list[DumpedRank]
