"""The base class of the HTTP schema, and the components that several resources share.

Each resource has a schema of its own: `server.core.job_views` for jobs, `server.http.schema`
for incidents, and those of recordings and performance beside their code.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    model_config = ConfigDict(
        frozen=True, serialize_by_alias=True, validate_by_alias=True, validate_by_name=True
    )


class Frame(ApiModel):
    function: str
    file: str
    line: int
    text: str | None = None  # the source line, if it could be read


class GroupName(ApiModel):
    name: str
    desc: str
    ranks: list[int]
    backend: str = ""
    # Of a group that numbers its members by itself: those that are no ranks of the attempt.
    outside: list[str] = []
