"""`hangwatch record`: samples where ranks spend their time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from hangwatch.protocol.live import MAX_RECORDING_SAMPLES
from hangwatch.report.profiles import format_recording
from hangwatch.report.text import name_ranks

from ..client import Client, open_client
from ..errors import ERROR, OK, CliError, UsageError
from ..terminal import detect_paint, print_json, print_lines, print_message

MAX_RECORDED_RANKS = 64
_POLL_S = 0.3


def run_record(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Records, prints where the time was spent, and writes two files. Returns `ERROR` unless every
    rank was recorded. Raises CliError.
    """
    if args.seconds * args.rate > MAX_RECORDING_SAMPLES:
        raise UsageError(
            f"{args.seconds} s at {args.rate} Hz are more than {MAX_RECORDING_SAMPLES} samples:"
            " reduce either of them"
        )
    if len(args.rank) > MAX_RECORDED_RANKS:
        raise UsageError(f"{len(args.rank)} ranks are too many: give at most {MAX_RECORDED_RANKS}")
    _check_folder(args)
    body: dict[str, object] = {
        "ranks": args.rank,
        "seconds": args.seconds,
        "rate": args.rate,
        "native": args.native,
        "gil": args.gil,
    }
    if args.job:
        body["job"] = args.job
    with open_client(args, env) as client:
        document = client.post("recordings", body)
        try:
            document = _await_recording(client, document)
        except KeyboardInterrupt:
            print_message("ending the recording; a second Ctrl-C discards its samples")
            document = _await_recording(client, client.post(f"{_build_path(document)}/stop", {}))
        if args.json:
            print_json(document)
        else:
            print_lines(format_recording(document, detect_paint(env)))
        done = [rank for rank in document["ranks"] if rank.get("status") == "done"]
        if done:
            _write_files(client, document, args)
    return OK if len(done) == len(document["ranks"]) else ERROR


def _await_recording(client: Client, document: dict[str, Any]) -> dict[str, Any]:
    """Waits until every rank has completed or failed, and shows the progress."""
    began = time.monotonic()
    last_progress = ""
    is_terminal = sys.stderr.isatty()
    while document.get("status") == "pending":
        progress = _describe_progress(document)
        if is_terminal:
            line = f"\r\033[K{progress}, {time.monotonic() - began:.0f} s"
            print(line, end="", file=sys.stderr, flush=True)
        elif progress != last_progress:
            print_message(progress)
        last_progress = progress
        time.sleep(_POLL_S)
        document = client.get(_build_path(document))
    if is_terminal:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return document


def _build_path(document: Mapping[str, Any]) -> str:
    return f"recordings/{quote(str(document['id']), safe='')}"


def _describe_progress(document: Mapping[str, Any]) -> str:
    """Which ranks are recorded or queued now, and how many are done."""
    ranks = document.get("ranks") or []
    recording = [rank["rank"] for rank in ranks if rank.get("status") == "recording"]
    waiting = [rank["rank"] for rank in ranks if rank.get("status") == "waiting"]
    if recording:
        text = f"recording {name_ranks(recording)} for {document.get('seconds')} s"
    else:
        text = f"waiting for {name_ranks(waiting)}"
    if len(ranks) > 1:
        done_count = sum(rank.get("status") in ("done", "failed") for rank in ranks)
        text += f", {done_count} of {len(ranks)} done"
    return text


def _check_folder(args: argparse.Namespace) -> None:
    """Creates the output folder before anything is recorded. Raises CliError if that fails."""
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"{args.out}: {error.strerror}: name another folder with --out") from error


def _write_files(client: Client, document: Mapping[str, Any], args: argparse.Namespace) -> None:
    for kind, ending in (("flamegraph.svg", "svg"), ("speedscope.json", "speedscope.json")):
        path = args.out / f"hangwatch-{document['id']}.{ending}"
        try:
            path.write_bytes(client.download_file(f"{_build_path(document)}/{kind}"))
        except OSError as error:
            raise CliError(f"{path}: {error.strerror}: name another folder with --out") from error
        message = f"wrote {path}"
        if ending != "svg":
            message += " (open it at https://www.speedscope.app, or with a local copy of that page)"
        print_message(message)
