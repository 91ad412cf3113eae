"""Where the `mcp` package, an extra, is missing, the remedy is printed, and everything else works."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from hangwatch.agent.cli.main import main
from hangwatch.server.http.mcp_endpoint import McpEndpoint


@pytest.fixture(autouse=True)
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mcp", "mcp_types")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "hangwatch.mcp.service", raising=False)
    for name in ("mcp", "mcp_types"):
        monkeypatch.setitem(sys.modules, name, None)  # an import fails


def test_command_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp"]) == 1
    assert "pip install 'hangwatch[mcp]'" in capsys.readouterr().err


def test_server_says_what_to_install() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def never_called(*_: Any) -> None:
        raise AssertionError

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/mcp",
        "headers": [],
        "app": never_called,
    }
    endpoint = McpEndpoint()
    asyncio.run(endpoint(scope, receive, send))
    assert sent[0]["status"] == 501
    assert "pip install 'hangwatch[mcp]'" in json.loads(sent[1]["body"])["detail"]
