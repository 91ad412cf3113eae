"""The `hangwatch` command: runs the command that was typed and returns its exit code. Every
expected error ends here, as one message on stderr.

The module of a command NAME has ``add_NAME_arguments``, which declares its arguments, and
``run_NAME``, which takes the parsed arguments, returns the exit code, and raises `CliError`. Only the
module of the command that was typed is imported, so `hangwatch --help` loads no HTTP client.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Collection, Sequence

from hangwatch import __version__

from .errors import ERROR, INTERRUPTED, CliError
from .terminal import print_message

# The module of each command in the package `commands`, and the command's line in `--help`.
_COMMANDS = {
    "demo": ("demo", "show on this machine what a verdict looks like, in under a minute"),
    "status": ("incidents", "every job on one line, with its open incidents"),
    "incidents": ("incidents", "the incidents, newest first"),
    "show": ("incidents", "one incident: the verdict, the calls, the stacks"),
    "report": ("incidents", "save an incident as one HTML file, which needs no server"),
    "dump": ("dump", "take and show the stacks of some ranks now"),
    "perf": ("performance", "calls, latency, bandwidth; which rank the others wait for"),
    "trace": ("trace", "show the calls of some ranks as they make them, then the counts"),
    "record": ("record", "where ranks spend their time, sampled with py-spy"),
    "analyze": ("analyze", "the diagnosis from files: Flight Recorder dumps, or a bundle"),
    "mcp": ("mcp", "serve coding agents over the Model Context Protocol, on stdin and stdout"),
    "token": ("token", "a token with which one job can report itself, and no other job"),
    "doctor": ("doctor", "what would keep hangwatch from working here, and the remedy"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Raises SystemExit for ``--help`` (0) and for
    usage errors (2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A job's text, or our own symbols, may not be encodable for this terminal.
            stream.reconfigure(errors="replace")
    words = sys.argv[1:] if argv is None else argv
    args = build_parser(words).parse_args(words)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except CliError as error:
        print_message(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader has left, as `head` does
        with contextlib.suppress(OSError):  # stdout is not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser(words: Collection[str] | None = None) -> argparse.ArgumentParser:
    """The parser of ``words``. Only the commands among them get their arguments; None stands for
    all commands. The parsed arguments have the command's function as ``run``.
    """
    parser = argparse.ArgumentParser(
        prog="hangwatch",
        description="Names the rank, the call and the line that hang a distributed PyTorch job.",
        epilog=(
            "Exit codes: 0 healthy or done, 1 error, 2 usage, 3 server unreachable, 4 a hang is"
            " open (status, analyze)."
        ),
    )
    parser.add_argument("--version", action="version", version=f"hangwatch {__version__}")
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, help_line) in _COMMANDS.items():
        command_parser = parsers.add_parser(name, help=help_line)
        if words is None or name in words:
            module = importlib.import_module(f".commands.{module_name}", __package__)
            getattr(module, f"add_{name}_arguments")(command_parser)
            command_parser.set_defaults(run=getattr(module, f"run_{name}"))
    return parser
