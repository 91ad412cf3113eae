"""`hangwatch analyze`: the diagnosis from files that somebody kept, without a server and without
the job.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from hangwatch.flight_recorder.analysis import analyze_dumps
from hangwatch.flight_recorder.export import export_dumps
from hangwatch.report.documents import build_verdict_document
from hangwatch.report.terminal import format_incident
from hangwatch.report.text import Paint, seconds_since

from ..errors import HANG, OK, UsageError
from ..terminal import detect_paint, print_json, print_lines, print_message, show_progress
from .files import Bundle, FileError, read_evidence

_MAX_UNUSABLE_SHOWN = 8  # files that could not be used
_DOCUMENT_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


def run_analyze(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints what the files tell and returns `HANG` where that is a hang. Raises FileError or
    UsageError.
    """
    with show_progress("reading files") as progress:
        evidence = read_evidence(args.paths, progress)
        finding = analyze_dumps(evidence.dumps, evidence.written_at) if evidence.dumps else None
    if args.export is not None:
        _export_bundle(evidence.bundles, args.export)
    found = [bundle.incident for bundle in evidence.bundles] + [
        {"job": "dump", "status": "open", **build_verdict_document(verdict)}
        for verdict in (finding.verdicts if finding else ())
    ]
    lines = list(_format_incidents(evidence.bundles, found, detect_paint(env)))
    notes = [*evidence.unusable, *(finding.notes if finding else ())]
    if args.json:
        print_json({"items": found, "next": None, "notes": notes})
    else:
        print_lines(lines)
    left_out = max(0, len(evidence.unusable) - _MAX_UNUSABLE_SHOWN)
    for note in [*notes[: len(evidence.unusable) - left_out], *notes[len(evidence.unusable) :]]:
        print_message(note)
    if left_out:
        print_message(f"{left_out} more files could not be used: --json names them all")
    if not found:
        count = f"{len(evidence.dumps)} dump{'s' if len(evidence.dumps) > 1 else ''}"
        named = "culprit" if finding and finding.inconclusive else "hang"
        print_message(
            f"no {named} in {count}: what can be compared agrees, and no rank is known to keep"
            " another waiting"
        )
    return HANG if any(told.get("severity") == "alert" for told in found) else OK


def _format_incidents(
    bundles: list[Bundle], documents: list[Mapping[str, Any]], colours: Paint
) -> Iterator[str]:
    """Raises FileError for a bundle whose incident cannot be shown."""
    for i, told in enumerate(documents):
        if i:
            yield ""
        try:
            yield from list(format_incident(told, _find_latest_time(told), colours))
        except _DOCUMENT_ERRORS as error:
            path = bundles[i].path if i < len(bundles) else "a verdict"
            raise FileError(
                f"{path}: its incident is not one of the API's: {type(error).__name__}"
            ) from error


def _find_latest_time(document: Mapping[str, Any]) -> datetime:
    """The last moment that it speaks of: a bundle does not age."""
    now = datetime.now(timezone.utc)
    told = [
        document.get("opened_at"),
        document.get("resolved_at"),
        *(stack.get("taken_at") for stack in document.get("stacks") or ()),
    ]
    return now - timedelta(
        seconds=min(
            (age for at in told if (age := seconds_since(at, now)) is not None), default=0.0
        )
    )


def _export_bundle(bundles: list[Bundle], folder: Path) -> None:
    if len(bundles) != 1:
        raise UsageError(
            f"--export writes the ranks of one bundle, and here are {len(bundles)}: name one"
        )
    try:
        dumps, left_out = export_dumps(bundles[0].incident, bundles[0].ranks)
    except _DOCUMENT_ERRORS as error:
        raise FileError(
            f"{bundles[0].path}: its documents are not those of the API: {type(error).__name__}"
        ) from error
    if not dumps:
        print_message(
            "nothing to export: no rank had made a call, or the job is so large that its bundle"
            " does not tell the members of groups"
        )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, dump in dumps.items():
            (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    except OSError as error:
        raise FileError(f"{folder}: {error.strerror}") from error
    if left_out:
        print_message(
            f"left out, since PyTorch's analyzer knows no such call: {', '.join(left_out)}"
        )
    print_message(f"read by PyTorch's analyzer: torchfrtrace {folder} --prefix rank_")
