"""Runs the command that was typed and returns its exit code. Every expected error ends here, as one
message on stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from .arguments import build_parser
from .errors import ERROR, INTERRUPTED, CliError
from .terminal import print_message


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Raises SystemExit for ``--help`` (0) and for
    usage errors (2).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A job's text, or our own symbols, may not be encodable for this terminal.
            stream.reconfigure(errors="replace")
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args, os.environ)
        sys.stdout.flush()
        return code
    except CliError as error:
        print_message(str(error))
        return error.exit_code
    except BrokenPipeError:  # as in `hangwatch incidents | head`
        with contextlib.suppress(OSError):  # stdout is not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
