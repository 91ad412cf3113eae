"""The tools of the Model Context Protocol: their arguments, and what they request from the API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from hangwatch.mcp.answers import Answer
from hangwatch.mcp.tools import TOOLS, ToolError, parse_ranks
from hangwatch.report.documents import build_document
from hangwatch.report.text import Document
from tests.unit.incident_documents import make_incident

BY_NAME = {tool.name: tool for tool in TOOLS}


class FakeApi:
    """Answers with documents by path."""

    def __init__(self, **documents: Document) -> None:
        self.documents = documents
        self.requests: list[tuple[str, dict[str, object]]] = []

    async def fetch(self, path: str, query: Mapping[str, object]) -> Document:
        self.requests.append((path, {k: v for k, v in query.items() if v is not None}))
        return self.documents[path.partition("/")[0]]


def call_tool(name: str, api: FakeApi, **arguments: Any) -> Answer:
    BY_NAME[name].check_arguments(arguments)
    return asyncio.run(BY_NAME[name].run(api.fetch, arguments))  # type: ignore[arg-type]


def test_alert_is_explained_before_a_newer_warning() -> None:
    warning = {"id": "01W", "severity": "warning", "kind": "slow_rank", "summary": "slow"}
    alert = build_document(make_incident(id="01A"))
    api = FakeApi(incidents={"items": [warning, alert], **alert}, jobs={"items": []})
    answer = call_tool("explain_hang", api, job="run7")
    assert api.requests[0][1]["status"] == "open" and api.requests[0][1]["job"] == "run7"
    assert ("incidents/01A", {}) in api.requests
    assert answer["hang"]["incident_id"] == "01A"
    assert [other["incident_id"] for other in answer["other_open_incidents"]] == ["01W"]


def test_without_a_hang_the_jobs_state_is_the_answer() -> None:
    job = {"job": "run7", "state": "running", "world_size": 4, "summary": "4 ranks train"}
    answer = call_tool("explain_hang", FakeApi(incidents={"items": []}, jobs={"items": [job]}))
    assert "no incident is open" in answer["answer"]
    assert answer["jobs"][0]["quoted"]["summary"] == "4 ranks train"


def test_incident_id_cannot_lead_to_another_path() -> None:
    api = FakeApi(incidents=build_document(make_incident()))
    call_tool("get_incident", api, incident_id="../tokens?x=1")
    assert api.requests == [("incidents/..%2Ftokens%3Fx%3D1", {})]


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("get_incident", {}, "needs the argument 'incident_id'"),
        ("get_incident", {"incident_id": 7}, "must be a str"),
        ("list_jobs", {"rank": "1"}, "has no argument 'rank'; it has: none"),
    ],
)
def test_wrong_arguments(name: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        call_tool(name, FakeApi(), **arguments)


@pytest.mark.parametrize("text", ["", "a", "1-", "1,,2", "-3", "1;2"])
def test_text_that_is_no_list_of_ranks(text: str) -> None:
    with pytest.raises(ToolError):
        parse_ranks(text)


def test_every_tool_is_described_and_closed() -> None:
    for tool in TOOLS:
        assert tool.description.endswith(".")
        assert tool.input_schema["additionalProperties"] is False
        assert set(tool.required) <= tool.properties.keys()
