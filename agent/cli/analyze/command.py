"""`hangwatch analyze`: diagnoses a hang from files, without a server and without the job."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from hangwatch.flight_recorder.analysis import OfflineDiagnosis, analyze_dumps
from hangwatch.flight_recorder.export import export_dumps
from hangwatch.report.documents import build_verdict_document
from hangwatch.report.terminal import format_incident
from hangwatch.report.text import Paint, seconds_since

from ..errors import HANG, OK, UsageError
from ..terminal import detect_paint, print_json, print_lines, print_message, show_progress
from .files import Bundle, Evidence, FileError, read_evidence

_MAX_UNUSABLE_SHOWN = 8  # unusable files, with their reasons
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
    """Prints the verdicts, and returns `HANG` if one is an alert. Raises FileError or UsageError."""
    with show_progress("reading files") as progress:
        evidence = read_evidence(args.paths, progress)
        finding = _diagnose_dumps(evidence)
    if args.export is not None:
        _export_bundle(evidence.bundles, args.export)
    incidents = _build_documents(evidence, finding)
    notes = list(evidence.unusable)
    shown_notes = notes[:_MAX_UNUSABLE_SHOWN]
    if finding is not None:
        notes += finding.notes
        shown_notes += finding.notes
    lines = list(_format_incidents(evidence.bundles, incidents, detect_paint(env)))
    if args.json:
        print_json({"items": incidents, "next": None, "notes": notes})
    else:
        print_lines(lines)
    for note in shown_notes:
        print_message(note)
    if len(shown_notes) < len(notes):
        omitted_count = len(notes) - len(shown_notes)
        print_message(f"{omitted_count} more files could not be used: --json lists all of them")
    if not incidents:
        dumps = "1 dump" if len(evidence.dumps) == 1 else f"{len(evidence.dumps)} dumps"
        missing = "culprit" if finding and finding.inconclusive else "hang"
        print_message(
            f"no {missing} in {dumps}: all calls that can be compared agree, and no rank is known"
            " to keep another one waiting"
        )
    has_alert = any(incident.get("severity") == "alert" for incident in incidents)
    return HANG if has_alert else OK


def diagnose_files(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """The verdicts from files, as documents, and notes on what was left out. Raises FileError."""
    evidence = read_evidence(paths)
    finding = _diagnose_dumps(evidence)
    notes = [*evidence.unusable, *(finding.notes if finding is not None else ())]
    return _build_documents(evidence, finding), notes


def _diagnose_dumps(evidence: Evidence) -> OfflineDiagnosis | None:
    return analyze_dumps(evidence.dumps, evidence.written_at) if evidence.dumps else None


def _build_documents(evidence: Evidence, finding: OfflineDiagnosis | None) -> list[dict[str, Any]]:
    documents = [dict(bundle.incident) for bundle in evidence.bundles]
    for verdict in finding.verdicts if finding is not None else ():
        documents.append({"job": "dump", "status": "open", **build_verdict_document(verdict)})
    return documents


def _format_incidents(
    bundles: list[Bundle], documents: Sequence[Mapping[str, Any]], colours: Paint
) -> Iterator[str]:
    """Raises FileError for a bundle whose incident cannot be shown."""
    for i, document in enumerate(documents):
        if i:
            yield ""
        try:
            yield from list(format_incident(document, _find_latest_time(document), colours))
        except _DOCUMENT_ERRORS as error:
            path = bundles[i].path if i < len(bundles) else "a verdict"
            raise FileError(
                f"{path}: its incident is not one of the API's: {type(error).__name__}"
            ) from error


def _find_latest_time(document: Mapping[str, Any]) -> datetime:
    """The latest time in the document, relative to which ages are shown: a bundle does not age."""
    now = datetime.now(timezone.utc)
    times = [document.get("opened_at"), document.get("resolved_at")]
    times += [stack.get("taken_at") for stack in document.get("stacks") or ()]
    ages = [seconds_since(time, now) for time in times]
    known_ages = [age for age in ages if age is not None]
    return now - timedelta(seconds=min(known_ages, default=0.0))


def _export_bundle(bundles: list[Bundle], folder: Path) -> None:
    if len(bundles) != 1:
        raise UsageError(
            f"--export writes the ranks of one bundle, not of {len(bundles)}: give one bundle"
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
            " omits the members of groups"
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
            f"left out, since PyTorch's analyzer does not support them: {', '.join(left_out)}"
        )
    print_message(f"read by PyTorch's analyzer: torchfrtrace {folder} --prefix rank_")
