"""`hangwatch record`: where ranks spend their time, in place of tracing every line."""

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
    """Records, prints where the time went, and writes the two files. `ERROR` unless every rank was
    recorded. Raises CliError.
    """
    if args.seconds * args.rate > MAX_RECORDING_SAMPLES:
        raise UsageError(
            f"{args.seconds} s at {args.rate} Hz are more than {MAX_RECORDING_SAMPLES} samples:"
            " give less of either"
        )
    if len(args.rank) > MAX_RECORDED_RANKS:
        raise UsageError(
            f"{len(args.rank)} ranks at once are too many: name at most {MAX_RECORDED_RANKS}"
        )
    _check_folder(args)
    wanted = {
        "ranks": args.rank,
        "seconds": args.seconds,
        "rate": args.rate,
        "native": args.native,
        "gil": args.gil,
    }
    with open_client(args, env) as client:
        document = client.post("recordings", wanted | ({"job": args.job} if args.job else {}))
        try:
            document = _await_recording(client, document)
        except KeyboardInterrupt:
            print_message("ending the recording; again Ctrl-C does not wait for what it has by now")
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
    """Until every rank has an end; says meanwhile how far it is."""
    began, said = time.monotonic(), ""
    live = sys.stderr.isatty()
    while document.get("status") == "pending":
        now = _describe_progress(document)
        if live:
            print(
                f"\r\033[K{now}, {time.monotonic() - began:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )
        elif now != said:
            print_message(now)
        said = now
        time.sleep(_POLL_S)
        document = client.get(_build_path(document))
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return document


def _build_path(document: Mapping[str, Any]) -> str:
    return f"recordings/{quote(str(document['id']), safe='')}"


def _describe_progress(document: Mapping[str, Any]) -> str:
    ranks = document.get("ranks") or []
    of = {
        status: [r["rank"] for r in ranks if r.get("status") == status]
        for status in ("waiting", "recording", "done", "failed")
    }
    over = len(of["done"]) + len(of["failed"])
    if of["recording"]:
        what = f"recording {name_ranks(of['recording'])} for {document.get('seconds')} s"
    else:
        what = f"waiting for {name_ranks(of['waiting'])}"
    return what + (f", {over} of {len(ranks)} done" if len(ranks) > 1 else "")


def _check_folder(args: argparse.Namespace) -> None:
    """Before anything is recorded. Raises CliError where nothing can be written."""
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
        print_message(
            f"wrote {path}"
            + (
                " (open it at https://www.speedscope.app, or with a copy of it)"
                if ending != "svg"
                else ""
            )
        )
