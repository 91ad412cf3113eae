"""Adds subcommands with the options that several of them share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

# Runs a subcommand: takes its parsed arguments and the environment, returns the exit code, and
# raises `errors.CliError`.
Run = Callable[[argparse.Namespace, Mapping[str, str]], int]


class Subcommands:
    """The subcommands of one parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        self._format_options = _build_format_options()
        self._server_options = _build_server_options()
        self._job_options = _build_job_options()

    def add(
        self,
        name: str,
        run: Run,
        *,
        has_server: bool = False,
        has_job: bool = False,
        help: str,  # argparse's name for it
        **details: Any,
    ) -> argparse.ArgumentParser:
        """Adds a subcommand with ``--json``; with ``--url`` and ``--token`` if it has a server, and
        ``--job`` if it can be limited to one. ``details`` are further arguments of `add_parser`.
        """
        parents = []
        if has_server:
            parents.append(self._server_options)
        if has_job:
            parents.append(self._job_options)
        parents.append(self._format_options)
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name, parents=parents, help=help, **details
        )
        parser.set_defaults(run=run)
        return parser


def _build_format_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--json", action="store_true", help="the API's documents instead of text")
    return options


def _build_server_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--url", help="the server (default: HANGWATCH_URL, else http://127.0.0.1:8642)"
    )
    options.add_argument(
        "--token", help="its token (default: the one in the URL, else HANGWATCH_TOKEN)"
    )
    return options


def _build_job_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--job", help="only this job")
    return options
