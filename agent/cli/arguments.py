"""The parser of the `hangwatch` command.

Each subcommand is declared by one function in `server_arguments`, `live_arguments` or
`local_arguments`: its arguments, its help, and ``run``, which imports the module that implements
it. So `hangwatch --help` loads no HTTP client.
"""

from __future__ import annotations

import argparse

from hangwatch import __version__

from . import live_arguments, local_arguments, server_arguments
from .subcommands import Subcommands


def build_parser() -> argparse.ArgumentParser:
    """The parsed arguments have ``run``, see `subcommands.Run`."""
    parser = argparse.ArgumentParser(
        prog="hangwatch",
        description="Names the rank, the call and the line that hang a distributed PyTorch job.",
        epilog=(
            "Exit codes: 0 healthy or done, 1 error, 2 usage, 3 server unreachable, 4 a hang is"
            " open (status, analyze)."
        ),
    )
    parser.add_argument("--version", action="version", version=f"hangwatch {__version__}")
    subcommands = Subcommands(parser)
    local_arguments.add_demo(subcommands)
    server_arguments.add_status(subcommands)
    server_arguments.add_incidents(subcommands)
    server_arguments.add_show(subcommands)
    server_arguments.add_report(subcommands)
    server_arguments.add_dump(subcommands)
    server_arguments.add_perf(subcommands)
    live_arguments.add_trace(subcommands)
    live_arguments.add_record(subcommands)
    local_arguments.add_analyze(subcommands)
    server_arguments.add_mcp(subcommands)
    local_arguments.add_token(subcommands)
    local_arguments.add_doctor(subcommands)
    return parser
