"""`hangwatch mcp` serves coding agents over the Model Context Protocol, on stdin and stdout."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path

from hangwatch.mcp.answers import Answer, describe_analysis
from hangwatch.mcp.tools import TOOLS, ApiError, Arguments, Fetch, make_tool
from hangwatch.report.text import Document

from ..arguments import add_server_options
from ..client import Client, open_client
from ..errors import OK, CliError
from ..terminal import print_message
from .analyze import diagnose_files


def add_mcp_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves the server's view to a coding agent, read-only, over the Model Context Protocol on"
        " stdin and stdout: the agent's program starts this command. It needs the extra"
        " hangwatch[mcp]. The server itself answers at /mcp, with the token."
    )
    parser.epilog = "Example: claude mcp add hangwatch -- hangwatch mcp --url http://master:8642"
    add_server_options(parser)


def run_mcp(args: argparse.Namespace) -> int:
    """Serves until stdin ends. Raises CliError."""
    try:
        from mcp.server.stdio import stdio_server

        from hangwatch.mcp.service import build_service
    except ImportError as error:
        raise CliError(
            f"the Model Context Protocol needs the `mcp` package ({error}):"
            " pip install 'hangwatch[mcp]'"
        ) from None

    async def serve(client: Client) -> None:
        async def fetch(path: str, query: Mapping[str, object]) -> Document:
            try:
                return await asyncio.to_thread(client.get, path, **query)
            except CliError as error:
                raise ApiError(str(error)) from None

        service = build_service((*TOOLS, analyze_dumps), fetch)
        async with stdio_server() as (read_stream, write_stream):
            await service.run(read_stream, write_stream, service.create_initialization_options())

    with open_client(args) as client:
        print_message(f"serving {client.server} on stdin and stdout; Ctrl-C ends it")
        asyncio.run(serve(client))
    return OK


_PATHS = {
    "type": "array",
    "items": {"type": "string"},
    "description": "dumps whose names end with their rank, bundles, or folders of these",
}


@make_tool(
    "The diagnosis from files on this machine, without a server: Flight Recorder dumps of the ranks,"
    " or a bundle that hangwatch wrote.",
    "paths",
    paths=_PATHS,
)
async def analyze_dumps(_: Fetch, arguments: Arguments) -> Answer:
    paths = [Path(str(path)) for path in arguments["paths"]]
    try:
        evidence, finding, documents = await asyncio.to_thread(diagnose_files, paths)
    except CliError as error:
        raise ApiError(str(error)) from None
    return describe_analysis(documents, [*evidence.unusable, *finding.notes])
