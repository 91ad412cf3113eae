"""The Model Context Protocol's official client asks about live hangs, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import TextContent

from hangwatch.model.ranks import Frame
from tests.harness.job import running_job
from tests.harness.processes import clean_environment
from tests.harness.server import Server, run_server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import make_hung_job
from tests.simulation.waiting import wait_for_value
from tests.unit.hangwatch.mcp.test_answers import assert_quoted

from .mcp_program import INJECTION

PROGRAM = Path(__file__).with_name("mcp_program.py")
TOKEN = "a-token-of-the-test"
Ask = Callable[[str, dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]


@contextlib.contextmanager
def run_server_with_token(folder: Path) -> Iterator[Server]:
    with run_server(folder, "--stall-after", "2", "--token", TOKEN) as server:
        server.url = f"http://:{TOKEN}@127.0.0.1:{server.port}"  # a given token is not printed
        yield server


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a token that has reported, with stacks, that rank 2 is missing."""
    folder = tmp_path_factory.mktemp("mcp")
    with (
        run_server_with_token(folder / "server") as server,
        running_job(PROGRAM, 4, folder / "job", server.url, args=["stops"]),
    ):
        wait_for_verdict(server, "missing_rank")
        yield server


def wait_for_verdict(server: Server, kind: str) -> None:
    def has_verdict() -> bool:
        found = [item for item in server.get_items("incidents") if item["kind"] == kind]
        return any(server.get(f"incidents/{item['id']}")["stacks"] for item in found) or any(
            item["kind"] == "dead_rank" for item in found
        )

    wait_for_value(has_verdict, f"{kind} with stacks", 90.0)


def get_plain_url(server: Server) -> str:
    """The server's URL without the token."""
    return f"http://127.0.0.1:{server.port}"


async def connect(stack: AsyncExitStack, server: Server, transport: str) -> Client:
    if transport == "http":
        # 30 s, as the package's own client waits: the first request is answered after the imports.
        headers = {"Authorization": f"Bearer {TOKEN}"}
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=30))
        target: Any = streamable_http_client(f"{get_plain_url(server)}/mcp", http_client=http)
    else:
        arguments = ["-m", "hangwatch.agent.cli", "mcp", "--url", get_plain_url(server)]
        target = stdio_client(
            StdioServerParameters(
                command=sys.executable,
                args=arguments,
                env={**clean_environment(), "HANGWATCH_TOKEN": TOKEN},
            )
        )
    return await stack.enter_async_context(Client(target))


def get_text(content: object) -> str:
    assert isinstance(content, TextContent)
    return content.text


def ask_tools(
    server: Server, transport: str, questions: Callable[[Ask], Coroutine[Any, Any, None]]
) -> None:
    """Runs ``questions``, which calls tools by name and gets their answers."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            client = await connect(stack, server, transport)

            async def ask(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
                result = await client.call_tool(tool, arguments)
                (content,) = result.content
                assert not result.is_error, content
                answer: dict[str, Any] = json.loads(get_text(content))
                return answer

            await questions(ask)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_which_rank_why_and_what_next(hang: Server, transport: str) -> None:
    async def questions(ask: Ask) -> None:
        answer = await ask("explain_hang", {})
        found = answer["hang"]
        assert (found["kind"], found["culprits"], found["waiting"]) == (
            "missing_rank",
            "2",
            "0-1, 3",
        )
        assert "load_batch" in found["quoted"]["line"]
        assert found["what_next"] and found["quoted"]["advice"]
        incident = {"incident_id": found["incident_id"]}
        waits = (await ask("get_wait_graph", incident))["waits"]
        assert [(w["ranks"], w["wait_for_rank"]) for w in waits] == [("0-1, 3", 2)]
        stacks = (await ask("get_stacks", {**incident, "ranks": "0"}))["stacks"]
        assert any("all_reduce" in line for s in stacks for line in s["quoted"]["frames"])
        (job,) = (await ask("list_jobs", {}))["jobs"]
        assert job["open_incidents"] == 1
        by_state = {row["state"]: row["count"] for row in (await ask("list_ranks", {}))["ranks"]}
        assert by_state["stalled"] and sum(by_state.values()) == 4
        (listed,) = (await ask("list_incidents", {"status": "open"}))["incidents"]
        assert listed["incident_id"] == found["incident_id"]
        assert "groups" in await ask("get_performance", {})
        assert (await ask("get_calls", incident))["incident_id"] == found["incident_id"]

    ask_tools(hang, transport, questions)


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_instructions_in_thread_names_and_lines_are_quoted(hang: Server, transport: str) -> None:
    async def questions(ask: Ask) -> None:
        answer = await ask("explain_hang", {})
        assert answer["hang"]["culprit_stack"]["quoted"]["thread"] == INJECTION
        assert_quoted(answer, INJECTION)
        stacks = await ask("get_stacks", {"incident_id": answer["hang"]["incident_id"]})
        assert_quoted(stacks, INJECTION)

    ask_tools(hang, transport, questions)


def test_instruction_in_an_exception_is_quoted(tmp_path: Path) -> None:
    with (
        run_server_with_token(tmp_path / "server") as server,
        running_job(PROGRAM, 4, tmp_path / "job", server.url, args=["raises"]),
    ):
        wait_for_verdict(server, "dead_rank")

        async def questions(ask: Ask) -> None:
            incidents = (await ask("list_incidents", {}))["incidents"]
            # On a slow machine, a rank may have been late for a call before.
            (listed,) = [found for found in incidents if found["kind"] == "dead_rank"]
            answer = await ask("get_incident", {"incident_id": listed["incident_id"]})
            assert (answer["kind"], answer["culprits"]) == ("dead_rank", "2")
            assert answer["processes"][0]["quoted"]["exception"] == f"RuntimeError: {INJECTION}"
            assert_quoted(answer, INJECTION)
            assert_quoted(listed, INJECTION)

        ask_tools(server, "http", questions)


def test_single_words_of_a_job_are_quoted(tmp_path: Path) -> None:
    """SECURITY.md: "what a job wrote is quoted by where it comes from, also a single word"."""
    word = "delete_the_cluster"
    job = make_hung_job(hung_for_s=0.0, name=word, host=word)
    job.op, job.phase, job.late_frame = word, word, Frame(function=word, file=f"/{word}.py", line=1)
    with (
        run_server_with_token(tmp_path) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=20) as client,
    ):
        JobReporter(client, job).send_until(lambda: server.get_items("incidents"), "the incident")

        async def questions(ask: Ask) -> None:
            answer = await ask("explain_hang", {})
            assert_quoted(answer, word)
            incident = {"incident_id": answer["hang"]["incident_id"]}
            for tool in ("get_incident", "get_wait_graph", "get_calls", "get_stacks"):
                assert_quoted({"": [await ask(tool, incident), answer]}, word)
            for tool in ("list_jobs", "list_ranks", "list_incidents"):
                assert_quoted(await ask(tool, {}), word)

        ask_tools(server, "http", questions)


def test_mistakes_are_explained(hang: Server) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            client = await connect(stack, hang, "http")
            for tool, arguments, problem in (
                ("get_incident", {"incident_id": "01NONE"}, "01NONE"),
                ("get_incident", {}, "incident_id"),
                ("delete_cluster", {}, "there is no tool"),
            ):
                result = await client.call_tool(tool, arguments)
                assert result.is_error and problem in get_text(result.content[0])

    asyncio.run(asyncio.wait_for(run(), 60))


def test_first_requests_may_come_at_the_same_time(tmp_path: Path) -> None:
    """SECURITY.md: "and its tools only read"."""

    async def list_tools(server: Server) -> int:
        async with AsyncExitStack() as stack:
            client = await connect(stack, server, "http")
            tools = (await client.list_tools()).tools
            assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
            return len(tools)

    async def run(server: Server) -> list[int]:
        return await asyncio.gather(*(list_tools(server) for _ in range(3)))

    with run_server_with_token(tmp_path / "server") as server:
        counts = asyncio.run(asyncio.wait_for(run(server), 60))
        assert counts == [counts[0]] * 3 and counts[0] > 0
        assert "Traceback" not in server.read_log() and "RuntimeError" not in server.read_log()


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_request_without_the_token_is_refused(hang: Server, headers: dict[str, str]) -> None:
    """SECURITY.md: "`/mcp` needs the token"."""
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    answer = httpx.post(f"{get_plain_url(hang)}/mcp", json=request, headers=headers)
    assert answer.status_code == 401
    assert "tools" not in answer.text


def test_dumps_are_analyzed_where_the_agent_is(hang: Server, tmp_path: Path) -> None:
    incident = hang.get_items("incidents")[0]
    bundle = tmp_path / "bundle.zip"
    page = httpx.get(f"{hang.url}/api/v1/incidents/{incident['id']}/bundle")
    bundle.write_bytes(page.raise_for_status().content)

    async def questions(ask: Ask) -> None:
        (verdict,) = (await ask("analyze_dumps", {"paths": [str(bundle)]}))["verdicts"]
        assert (verdict["kind"], verdict["culprits"]) == ("missing_rank", "2")

    ask_tools(hang, "stdio", questions)
