"""``/openapi.json``: what FastAPI cannot know of it by itself."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from ..core import problems
from ..ingest.decoding import Body
from . import access

PROBLEM = "Problem"


def install(app: FastAPI, token: str | None) -> None:
    """Adds the problem documents, the token, and the heartbeat that `ingest` reads by itself."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            told = generate()
            schemas = told.setdefault("components", {}).setdefault("schemas", {})
            heartbeat = TypeAdapter(Body).json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(heartbeat.pop("$defs", {}))
            schemas[Body.__name__] = heartbeat
            schemas[PROBLEM] = problems.SCHEMA
            for path, methods in told["paths"].items():
                for operation in methods.values():
                    for unused in ("422", "4XX"):
                        operation["responses"].pop(unused, None)
                    operation["responses"] |= dict.fromkeys(("4XX", "5XX"), _problem())
                    if path in access.OPEN_PATHS:
                        operation["security"] = []
            if token is not None:
                told["components"]["securitySchemes"] = {
                    "token": {"type": "http", "scheme": "bearer"}
                }
                told["security"] = [{"token": []}]
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _problem() -> dict[str, Any]:
    content = {problems.MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{PROBLEM}"}}}
    return {"description": "What is wrong, and the remedy, as RFC 9457 has it", "content": content}
