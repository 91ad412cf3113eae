"""Adds to ``/openapi.json`` what FastAPI cannot derive from the routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from ..core import problems
from ..ingest.decoding import HeartbeatBody
from . import access

PROBLEM_SCHEMA_NAME = "Problem"


def install_openapi(app: FastAPI, token: str | None) -> None:
    """Adds the problem documents, the token, and the heartbeat, which no FastAPI route parses."""
    generate = app.openapi

    def build_document() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            heartbeat = TypeAdapter(HeartbeatBody).json_schema(
                ref_template="#/components/schemas/{model}"
            )
            schemas.update(heartbeat.pop("$defs", {}))
            schemas[HeartbeatBody.__name__] = heartbeat
            schemas[PROBLEM_SCHEMA_NAME] = problems.PROBLEM_SCHEMA
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    for unused in ("422", "4XX"):
                        operation["responses"].pop(unused, None)
                    operation["responses"] |= dict.fromkeys(
                        ("4XX", "5XX"), _describe_problem_response()
                    )
                    if path in access.PUBLIC_PATHS:
                        operation["security"] = []
            if token is not None:
                document["components"]["securitySchemes"] = {
                    "token": {"type": "http", "scheme": "bearer"}
                }
                document["security"] = [{"token": []}]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = build_document  # type: ignore[method-assign]


def _describe_problem_response() -> dict[str, Any]:
    content = {
        problems.MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{PROBLEM_SCHEMA_NAME}"}}
    }
    return {
        "description": "What is wrong, and the remedy, as an RFC 9457 problem document",
        "content": content,
    }
