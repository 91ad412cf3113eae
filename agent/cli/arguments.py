"""What can be typed after `hangwatch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hangwatch import __version__
from hangwatch.model.kinds import VerdictKind

from . import live_arguments

MAX_LISTED_RANKS = 65_536


def build_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="hangwatch",
        description="Names the rank, the call and the line that hang a distributed PyTorch job.",
        epilog=(
            "Exit codes: 0 healthy or done, 1 error, 2 usage, 3 server unreachable, 4 a hang is"
            " open (status, analyze)."
        ),
    )
    made.add_argument("--version", action="version", version=f"hangwatch {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    form, server, job = _build_format_parent(), _build_server_parent(), _build_job_parent()

    demo = commands.add_parser(
        "demo",
        parents=[form],
        help="show on this machine what a verdict looks like, in under a minute",
    )
    demo.add_argument(
        "--keep", action="store_true", help="leave the server and the hung job running until Ctrl-C"
    )

    status = commands.add_parser(
        "status", parents=[server, job, form], help="each job in a line, and what hangs"
    )
    status.add_argument(
        "--watch", action="store_true", help="look again every second, until Ctrl-C"
    )

    incidents = commands.add_parser(
        "incidents", parents=[server, job, form], help="the incidents, newest first"
    )
    incidents.add_argument("--status", choices=("open", "resolved"), help="only these")
    incidents.add_argument(
        "--kind",
        choices=[kind.value for kind in VerdictKind],
        metavar="KIND",
        help="only this kind, such as missing_rank",
    )
    incidents.add_argument(
        "--limit",
        type=_parse_positive,
        default=20,
        metavar="N",
        help="at most so many (default: 20)",
    )

    show = commands.add_parser(
        "show", parents=[server, job, form], help="one incident: the verdict, the calls, the stacks"
    )
    show.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="its id, or the beginning of it (default: the newest incident)",
    )
    show.add_argument("--full", action="store_true", help="all frames, those of libraries too")

    dump = commands.add_parser(
        "dump", parents=[server, job, form], help="the stacks of some ranks, now"
    )
    dump.add_argument("ranks", type=parse_ranks, metavar="RANKS", help="such as 0,3-5")
    dump.add_argument(
        "--native", action="store_true", help="C and C++ frames too (slow: the first takes seconds)"
    )
    dump.add_argument(
        "--timeout",
        type=_parse_positive,
        metavar="SECONDS",
        help="how long to wait for them (default: 15, native 60)",
    )

    commands.add_parser(
        "perf",
        parents=[server, job, form],
        help="calls, latency, bandwidth; which rank the others wait for",
    )

    live_arguments.add_live_commands(commands, [server, job, form], parse_ranks)

    analyze = commands.add_parser(
        "analyze",
        parents=[form],
        help="the diagnosis from files: Flight Recorder dumps, or a bundle",
        description=(
            "The diagnosis from files, without a server and without the job: PyTorch Flight"
            " Recorder dumps (pickle or JSON), one from each rank, or a bundle of hangwatch's own."
            " Ranks may be missing, and files that cannot be read are told and done without."
        ),
        epilog=(
            "Exit codes: 0 no hang found, 1 nothing could be read or a file wants to run something,"
            " 2 usage, 4 a hang. torch keeps the calls for dumps where TORCH_FR_BUFFER_SIZE (once"
            " TORCH_NCCL_TRACE_BUFFER_SIZE) is above 0. `curl -O` of /api/v1/incidents/ID/bundle"
            " fetches a bundle."
        ),
    )
    analyze.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="dumps named with their rank at the end, bundles, folders",
    )
    analyze.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the calls of the one bundle there as Flight Recorder dumps",
    )

    commands.add_parser(
        "doctor",
        parents=[server, form],
        help="what would keep hangwatch from working here, and the remedy",
    )
    return made


def _build_format_parent() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--json", action="store_true", help="the API's documents instead of text")
    return made


def _build_server_parent() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument(
        "--url", help="the server (default: HANGWATCH_URL, else http://127.0.0.1:8642)"
    )
    made.add_argument(
        "--token", help="its token (default: the one in the URL, else HANGWATCH_TOKEN)"
    )
    return made


def _build_job_parent() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--job", help="only this job")
    return made


def parse_ranks(text: str) -> list[int]:
    """Ranks as people write them, ``0,3-5``, ascending. Raises argparse.ArgumentTypeError, which
    names the bad part.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not _is_number(first) or (dash and not _is_number(last)):
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is no rank: write ranks as 0,3-5")
        low, high = int(first), int(last if dash else first)
        if high < low:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} runs backwards: write {high}-{low}")
        if high - low + len(found) >= MAX_LISTED_RANKS:
            raise argparse.ArgumentTypeError(
                f"more than {MAX_LISTED_RANKS} ranks at once: ask for some of them"
            )
        found.update(range(low, high + 1))
    return sorted(found)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _parse_positive(text: str) -> int:
    if not _is_number(text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number above 0")
    return int(text)
