"""`hangwatch record`: samples where ranks spend their time, and prints it as call trees. The lines
are made from the API's JSON documents; see `hangwatch.report.terminal`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from hangwatch.protocol.commands import MAX_RECORDING_HZ, MAX_RECORDING_S, MAX_RECORDING_SAMPLES
from hangwatch.report.text import (
    TERMINAL_COLUMNS,
    Document,
    as_bold,
    as_dim,
    as_warning,
    clean_member,
    format_line,
    format_site,
    get_parts,
    join_blocks,
    name_ranks,
    truncate_end,
    truncate_start,
    wrap_text,
)

from ..arguments import add_query_options, parse_positive, parse_ranks
from ..client import Client, build_path, open_client
from ..errors import ERROR, OK, CliError, UsageError
from ..terminal import print_message, print_result, show_progress

MAX_RECORDED_RANKS = 64
_POLL_S = 0.3
_MIN_SHARE = 0.02  # a line or branch with a smaller share of its thread's samples is not shown
_MIN_LOCATION_WIDTH = 16  # columns; a longer path loses its start
_MAX_HOTTEST_SHOWN = 3
_MAX_INDENT_DEPTH = 12
_MAX_TREE_LINES = 40  # a thread's tree shows its heaviest branches first


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    add_query_options(parser)
    parser.add_argument(
        "--rank",
        type=parse_ranks,
        required=True,
        metavar="RANKS",
        help="the ranks to record, one after the other on each host",
    )
    parser.add_argument(
        "--seconds",
        type=functools.partial(
            parse_positive,
            maximum=MAX_RECORDING_S,
            expected=f"a whole number of seconds, 1 to {MAX_RECORDING_S}",
        ),
        default=10,
        metavar="N",
        help=f"duration, 1 to {MAX_RECORDING_S} (default: 10)",
    )
    parser.add_argument(
        "--rate",
        type=functools.partial(
            parse_positive,
            maximum=MAX_RECORDING_HZ,
            expected=f"a whole number of samples a second, 1 to {MAX_RECORDING_HZ}",
        ),
        default=100,
        metavar="HZ",
        help=f"samples a second, 1 to {MAX_RECORDING_HZ} (default: 100)",
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="include C and C++ frames (pauses the process for each sample)",
    )
    parser.add_argument(
        "--gil",
        action="store_true",
        help="only threads that hold the GIL, instead of everything that a thread does or waits for",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="the folder for the two files (default: the current one)",
    )


def run_record(args: argparse.Namespace) -> int:
    """Records, prints where the time was spent, and writes two files. Returns `OK` if every rank
    was recorded, else `ERROR`. Raises CliError.
    """
    if args.seconds * args.rate > MAX_RECORDING_SAMPLES:
        raise UsageError(
            f"{args.seconds} s at {args.rate} Hz are more than {MAX_RECORDING_SAMPLES} samples:"
            " reduce either of them"
        )
    if len(args.rank) > MAX_RECORDED_RANKS:
        raise UsageError(f"{len(args.rank)} ranks are too many: give at most {MAX_RECORDED_RANKS}")
    try:  # before anything is recorded
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"{args.out}: {error.strerror}: name another folder with --out") from error
    with open_client(args) as client:
        document = client.post(
            "recordings",
            ranks=args.rank,
            seconds=args.seconds,
            rate=args.rate,
            native=args.native,
            gil=args.gil,
            job=args.job or None,
        )
        path = build_path("recordings", document["id"])
        try:
            document = _await_recording(client, path, document)
        except KeyboardInterrupt:
            print_message("ending the recording; a second Ctrl-C discards its samples")
            document = _await_recording(client, path, client.post(f"{path}/stop"))
        print_result(args, document, format_recording(document))
        done = [rank for rank in document["ranks"] if rank.get("status") == "done"]
        if done:
            _write_files(client, path, args.out)
    return OK if len(done) == len(document["ranks"]) else ERROR


def _await_recording(client: Client, path: str, document: Document) -> Document:
    """Waits until every rank has completed or failed, and shows the progress."""
    began = time.monotonic()
    last_progress = ""
    with show_progress() as replace_line:
        while document.get("status") == "pending":
            by_status: defaultdict[str, list[int]] = defaultdict(list)
            ranks = get_parts(document, "ranks")
            for rank in ranks:
                by_status[rank.get("status", "")].append(rank["rank"])
            progress = f"waiting for {name_ranks(by_status['waiting'])}"
            if by_status["recording"]:
                recorded = name_ranks(by_status["recording"])
                progress = f"recording {recorded} for {document.get('seconds')} s"
            if len(ranks) > 1:
                done_count = len(by_status["done"]) + len(by_status["failed"])
                progress += f", {done_count} of {len(ranks)} done"
            replace_line(f"{progress}, {time.monotonic() - began:.0f} s")
            if progress != last_progress and not sys.stderr.isatty():
                print_message(progress)
            last_progress = progress
            time.sleep(_POLL_S)
            document = client.get(path)
    return document


def _write_files(client: Client, path: str, folder: Path) -> None:
    name = path.rpartition("/")[2]
    for kind, ending in (("flamegraph.svg", "svg"), ("speedscope.json", "speedscope.json")):
        file = folder / f"hangwatch-{name}.{ending}"
        try:
            file.write_bytes(client.download_file(f"{path}/{kind}"))
        except OSError as error:
            raise CliError(f"{file}: {error.strerror}: name another folder with --out") from error
        message = f"wrote {file}"
        if ending != "svg":
            message += " (open it at https://www.speedscope.app, or with a local copy of that page)"
        print_message(message)


def format_recording(document: Document) -> Iterator[str]:
    """A sentence on where each rank spends most of its time, and its call tree."""
    rate_hz = int(document.get("rate") or 1)
    gil_only = bool(document.get("gil"))
    ranks = get_parts(document, "ranks")
    return join_blocks(_format_rank(rank, rate_hz, gil_only) for rank in ranks)


def _format_rank(rank: Document, rate_hz: int, gil_only: bool) -> Iterator[str]:
    name = f"rank {rank.get('rank')}"
    threads = get_parts(rank, "threads")
    if rank.get("error"):
        yield as_bold(name)
        yield from map(as_warning, wrap_text(rank["error"], indent="  ! "))
        return
    if rank.get("note"):
        yield from map(as_warning, wrap_text(f"{name}: {rank['note']}"))
    for index, thread in enumerate(threads):
        if index:
            yield ""
        title = f"{as_bold(name)} · {clean_member(thread, 'thread')}"
        sample_count = int(thread.get("samples") or 0)
        if gil_only:
            yield f"{title} · {sample_count:,} samples that hold the GIL"
        else:
            seconds = rank.get("seconds", 0)
            yield f"{title} · {seconds:.1f} s at {rate_hz} Hz · {sample_count:,} samples"
        hottest = []  # such as "62 % in spin (busy.py:4)"
        for line in get_parts(thread, "hottest", _MAX_HOTTEST_SHOWN):
            share = line.get("samples", 0) / max(1, sample_count)
            if share >= _MIN_SHARE:
                function = clean_member(line, "function")
                hottest.append(f"{100 * share:.0f} % in {function} ({format_line(line)})")
        yield from wrap_text(", ".join(hottest))
        yield from _format_tree(get_parts(thread, "tree"), sample_count)
    if not threads:
        yield f"{as_bold(name)}: no sample{' held the GIL' if gil_only else ' was taken'}"
    if rank.get("idle_threads"):
        count = int(rank["idle_threads"])
        plural = "s" if count > 1 else ""
        yield as_dim(f"and {count} thread{plural} that only waited, in one line of a library")


def _format_tree(roots: Sequence[Document], sample_count: int) -> Iterator[str]:
    """The heaviest branches of a call tree, outermost call first."""
    yield as_dim("  total   own")
    to_show = [(node, 0) for node in reversed(roots)]
    shown_count = hidden_count = 0
    while to_show:
        node, depth = to_show.pop()
        if node.get("samples", 0) < _MIN_SHARE * sample_count:
            continue
        if shown_count >= _MAX_TREE_LINES:
            hidden_count += 1
            continue
        shown_count += 1
        yield _format_node(node, depth, max(1, sample_count))
        to_show += [(child, depth + 1) for child in reversed(get_parts(node, "children"))]
    if hidden_count:
        yield as_dim(f"{'…':>7} {hidden_count} more: the files contain all of them")


def _format_node(node: Document, depth: int, sample_count: int) -> str:
    is_library = bool(node.get("library"))
    share = 100 * node.get("samples", 0) / sample_count
    own = node.get("own", 0)
    own_share = f"{100 * own / sample_count:.0f} %" if own >= 0.005 * sample_count else ""
    numbers = f"{share:5.0f} % {own_share:>5}"
    indent = "  " * min(depth, _MAX_INDENT_DEPTH)
    marker = "  " if is_library else "> "
    name = f"{indent}{marker}{clean_member(node, 'function')}"
    if is_library:
        innermost = node.get("innermost") or node
        if innermost.get("function") != node.get("function"):
            name += f" … {clean_member(innermost, 'function')}"
        location = format_site(innermost, with_function=False)
    else:
        # ``train.py:55`` or, for several lines, ``train.py:55 (61 %), :52``.
        location = clean_member(node, "file", "").rsplit("/", 1)[-1]
        lines = get_parts(node, "lines")
        if lines:
            location += f":{lines[0].get('line')}"
        total = max(1, int(node.get("samples", 1)))
        others = [line for line in lines[1:3] if line.get("samples", 0) >= 0.1 * total]
        if others:
            location += f" ({100 * lines[0].get('samples', 0) / total:.0f} %)"
        for line in others:
            location += f", :{line.get('line')}"
    width = TERMINAL_COLUMNS - len(numbers) - 2
    name = truncate_end(name, width - min(len(location), _MIN_LOCATION_WIDTH) - 2)
    text = f"{numbers}  {name}  {truncate_start(location, width - len(name) - 2)}"
    return as_dim(text) if is_library else as_bold(text)
