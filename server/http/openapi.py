"""The parts of ``/openapi.json`` that FastAPI cannot derive from the routes.

The documents of incidents are described by `server.core.schema`, jobs, ranks and groups by
`server.core.job_views`, whose objects are encoded as they are.
"""

from __future__ import annotations

import functools
from typing import Any

from fastapi import FastAPI
from pydantic import RootModel, TypeAdapter

from hangwatch.protocol.heartbeat import Heartbeat

from ..core import problems
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


class HeartbeatBody(RootModel[Heartbeat]):
    """What a node agent reports about its host."""  # this text is part of /openapi.json


def install_openapi(app: FastAPI, token: str | None) -> None:
    """Adds the problem documents, the token, and the heartbeat, which no FastAPI route parses."""
    generate = app.openapi

    @functools.cache
    def build_document() -> dict[str, Any]:
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
