"""Serves the tools with the official `mcp` package, an extra: `hangwatch[mcp]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mcp_types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server

from hangwatch import __version__

from .answers import build_answer, encode_answer
from .tools import INSTRUCTIONS, ApiError, Fetch, Tool, ToolError


def build_service(tools: Sequence[Tool], fetch: Fetch) -> Server[Any]:
    """A server of the tools, for any transport."""
    by_name = {tool.name: tool for tool in tools}
    listed = [
        mcp_types.Tool(
            name=tool.name,
            description=tool.description,
            input_schema=tool.input_schema,
            annotations=mcp_types.ToolAnnotations(
                read_only_hint=True, destructive_hint=False, open_world_hint=False
            ),
        )
        for tool in tools
    ]

    async def list_tools(
        _: ServerRequestContext[Any], __: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        return mcp_types.ListToolsResult(tools=listed)

    async def call_tool(
        _: ServerRequestContext[Any], params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        arguments = params.arguments or {}
        is_error = True
        try:
            tool = by_name.get(params.name)
            if tool is None:
                raise ToolError(
                    f"there is no tool {params.name!r}; there are: {', '.join(by_name)}"
                )
            tool.check_arguments(arguments)
            text = encode_answer(await tool.run(fetch, arguments))
            is_error = False
        except ApiError as error:
            refusal = build_answer({"detail": str(error)}, answer="the request failed")
            text = encode_answer(refusal)
        except ToolError as error:
            text = str(error)
        return mcp_types.CallToolResult(
            content=[mcp_types.TextContent(type="text", text=text)], is_error=is_error
        )

    return Server(
        "hangwatch",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
