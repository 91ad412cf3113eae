"""`hangwatch dump`: takes the stacks of some ranks now, and prints them merged where equal."""

from __future__ import annotations

import argparse
import time

from hangwatch.report.terminal import format_stack, merge_equal_stacks
from hangwatch.report.text import Document, get_parts, join_blocks, name_ranks

from ..arguments import add_query_options, parse_positive, parse_ranks
from ..client import build_path, open_client
from ..errors import ERROR, OK, NotFoundError
from ..terminal import print_message, print_result

_POLL_S = 0.2
_TIMEOUT_S, _NATIVE_TIMEOUT_S = 15, 60


def add_dump_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)
    parser.add_argument("ranks", type=parse_ranks, metavar="RANKS", help="such as 0,3-5")
    parser.add_argument(
        "--native",
        action="store_true",
        help="include C and C++ frames (slow: the first dump takes seconds)",
    )
    parser.add_argument(
        "--timeout",
        type=parse_positive,
        metavar="SECONDS",
        help="how long to wait for the stacks (default: 15, native 60)",
    )


def run_dump(args: argparse.Namespace) -> int:
    """Returns `OK` if all of the ranks returned their stacks, else `ERROR`. Raises CliError."""
    timeout_s = args.timeout or (_NATIVE_TIMEOUT_S if args.native else _TIMEOUT_S)
    with open_client(args) as client:
        try:
            document = client.post(
                "dumps", ranks=args.ranks, native=args.native, job=args.job or None
            )
        except NotFoundError:
            if args.job is not None:
                client.check_job(args.job)
            raise
        deadline = time.monotonic() + timeout_s
        while document.get("status") == "pending" and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            document = client.get(build_path("dumps", document["id"]))
    ranks = get_parts(document, "ranks")
    entries: list[Document] = []
    for rank in ranks:
        stacks = get_parts(rank, "stacks")
        is_explained = any(stack.get("error") for stack in stacks)
        if rank.get("error") and not is_explained:
            stacks.append({"error": rank["error"]})
        entries += [{**stack, "ranks": [rank["rank"]]} for stack in stacks]
    blocks = [format_stack(entry, full=True) for entry in merge_equal_stacks(entries)]
    print_result(args, document, join_blocks(blocks))
    late = [rank["rank"] for rank in ranks if rank.get("status") == "pending"]
    if late:
        print_message(
            f"{name_ranks(late)} returned no stacks within {timeout_s} s: does its host still"
            " report (`hangwatch status`)? Wait longer with --timeout"
        )
    has_failed = any(rank.get("status") == "failed" for rank in ranks)
    return ERROR if late or has_failed else OK
