"""`hangwatch analyze`: diagnoses a hang from files, without a server and without the job.

The files are Flight Recorder dumps, one for each rank, and hangwatch's own bundles. They may be
malicious: nothing is unpacked to disk, and all sizes are limited.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from hangwatch.flight_recorder import pickles
from hangwatch.flight_recorder.analysis import OfflineDiagnosis, analyze_dumps
from hangwatch.flight_recorder.calls import PARSE_ERRORS, FlightDump, FlightDumpError, parse_dump
from hangwatch.flight_recorder.entries import MAX_DUMP_RANKS
from hangwatch.flight_recorder.export import export_dumps
from hangwatch.report.documents import build_document
from hangwatch.report.terminal import format_incident
from hangwatch.report.text import Document, get_parts, join_blocks, seconds_since

from ..arguments import add_format_option
from ..errors import CliError, UsageError, choose_exit_code
from ..terminal import print_message, print_result, show_progress

_MAX_UNUSABLE_SHOWN = 8  # unusable files, with their reasons
_MIN_PROGRESS_FILES = 32  # fewer files are read without showing the progress
_PROGRESS_STEP = 8  # files
_RANK_SUFFIX = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")
_ZIP_MAGIC = b"PK\x03\x04"
_MAX_FILE_BYTES = 1 << 28  # the limit of a bundle, and of one document in it


def add_analyze_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Diagnoses from files, without a server and without the job: PyTorch Flight Recorder"
        " dumps (pickle or JSON), one for each rank, or a bundle that hangwatch wrote. Ranks may"
        " be missing. Files that cannot be read are reported and skipped."
    )
    parser.epilog = (
        "Exit codes: 0 no hang found, 1 no file could be read or a file tries to run code,"
        " 2 usage, 4 a hang. torch keeps the calls for dumps if TORCH_FR_BUFFER_SIZE (formerly"
        " TORCH_NCCL_TRACE_BUFFER_SIZE) is above 0. `curl -O` of /api/v1/incidents/ID/bundle"
        " downloads a bundle."
    )
    add_format_option(parser)
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="dumps whose names end with their rank, bundles, or folders of these",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the calls of a single bundle to DIR as Flight Recorder dumps",
    )


def run_analyze(args: argparse.Namespace) -> int:
    """Prints the verdicts, and returns `HANG` if one is an alert. Raises FileError or UsageError."""
    with show_progress() as progress:
        evidence, finding, incidents = diagnose_files(args.paths, progress)
    if args.export is not None:
        _export_bundle(evidence.bundles, args.export)
    now = datetime.now(timezone.utc)
    blocks = []
    for index, document in enumerate(incidents):
        try:
            # Ages are relative to the latest time in the document, since a bundle does not change.
            times = [document.get("opened_at"), document.get("resolved_at")]
            times += [stack.get("taken_at") for stack in get_parts(document, "stacks")]
            ages = [age for time in times if (age := seconds_since(time, now)) is not None]
            latest = now - timedelta(seconds=min(ages, default=0.0))
            blocks.append(list(format_incident(document, latest)))
        except PARSE_ERRORS as error:
            is_bundle = index < len(evidence.bundles)
            path = evidence.bundles[index].path if is_bundle else "a verdict"
            raise FileError(
                f"{path}: its incident is not one of the API's: {type(error).__name__}"
            ) from error
    notes = [*evidence.unusable, *finding.notes]
    print_result(args, {"items": incidents, "next": None, "notes": notes}, join_blocks(blocks))
    for note in (*evidence.unusable[:_MAX_UNUSABLE_SHOWN], *finding.notes):
        print_message(note)
    omitted_count = len(evidence.unusable) - _MAX_UNUSABLE_SHOWN
    if omitted_count > 0:
        print_message(f"{omitted_count} more files could not be used: --json lists all of them")
    if not incidents:
        dumps = "1 dump" if len(evidence.dumps) == 1 else f"{len(evidence.dumps)} dumps"
        missing = "culprit" if finding.inconclusive else "hang"
        print_message(
            f"no {missing} in {dumps}: all calls that can be compared agree, and no rank is known"
            " to keep another one waiting"
        )
    return choose_exit_code(incidents)


def diagnose_files(
    paths: Sequence[Path], progress: Callable[[str], None] = lambda text: None
) -> tuple[Evidence, OfflineDiagnosis, list[Document]]:
    """The evidence in files, the diagnosis from the dumps among them, and the documents of all
    incidents, those of bundles first. Raises FileError.
    """
    evidence = read_evidence(paths, progress)
    written_at = {rank: path.stat().st_mtime for rank, path in evidence.dump_paths.items()}
    finding = analyze_dumps(evidence.dumps, written_at)
    documents = [bundle.incident for bundle in evidence.bundles]
    for verdict in finding.verdicts:
        documents.append({"job": "dump", "status": "open", **build_document(verdict)})
    return evidence, finding, documents


def _export_bundle(bundles: list[Bundle], folder: Path) -> None:
    if len(bundles) != 1:
        raise UsageError(
            f"--export writes the ranks of one bundle, not of {len(bundles)}: give one bundle"
        )
    try:
        dumps, left_out = export_dumps(bundles[0].incident, bundles[0].ranks)
    except PARSE_ERRORS as error:
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


class FileError(CliError):
    """A file cannot be read, or its content is invalid."""


class _UnusableFileError(Exception):
    """A file cannot be used, but the other files can be analyzed without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An incident and the ranks of its job, as documents of the API."""

    path: Path
    incident: Document
    ranks: list[Document]


@dataclass(slots=True, kw_only=True)
class Evidence:
    """The content of all usable files. ``unusable`` has a message for each other one."""

    bundles: list[Bundle] = field(default_factory=list)
    dumps: list[FlightDump] = field(default_factory=list)
    dump_paths: dict[int, Path] = field(default_factory=dict)  # the keys are ranks
    unusable: list[str] = field(default_factory=list)


def read_evidence(
    paths: Iterable[Path], progress: Callable[[str], None] = lambda text: None
) -> Evidence:
    """Reads all evidence in files and folders. In a folder, only bundles and files whose names end
    with a number are read.

    Truncated and other unusable files are skipped and listed in `Evidence.unusable`. Raises
    FileError if no file is usable, if two dumps have the same rank, and for a pickle that would
    execute code.
    """
    evidence = Evidence()
    files = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        for file in sorted(path.rglob("*")):
            if file.is_file() and (file.suffix == ".zip" or _RANK_SUFFIX.search(file.name)):
                files.append(file)
    with contextlib.ExitStack() as cleanup:
        if gc.isenabled():  # It would repeatedly scan millions of objects in use.
            gc.disable()
            cleanup.callback(gc.enable)
        for at, path in enumerate(files):
            if len(files) >= _MIN_PROGRESS_FILES and at % _PROGRESS_STEP == 0:
                progress(f"hangwatch: reading files: {at} of {len(files)}")
            try:
                content = _read_file(path)
            except pickles.HostileError as error:
                raise FileError(f"{path}: {error}") from error
            except (_UnusableFileError, FlightDumpError, pickles.NotPlainError) as error:
                evidence.unusable.append(f"{path}: {error}")
                continue
            if isinstance(content, Bundle):
                evidence.bundles.append(content)
                continue
            if (other_path := evidence.dump_paths.get(content.rank)) is not None:
                raise FileError(
                    f"{other_path} and {path} are both of rank {content.rank}: analyze one run of a"
                    " job at a time"
                )
            evidence.dumps.append(content)
            evidence.dump_paths[content.rank] = path
    evidence.dumps.sort(key=lambda dump: dump.rank)
    if not evidence.bundles and not evidence.dumps:
        nothing = (
            f"{', '.join(map(str, paths))}: no dump whose name ends with a rank, as"
            " nccl_trace_rank_3 does, and no bundle"
        )
        raise FileError("\n".join(evidence.unusable[:_MAX_UNUSABLE_SHOWN]) or nothing)
    return evidence


def _read_file(path: Path) -> Bundle | FlightDump:
    """Raises FileError, _UnusableFileError, FlightDumpError or NotPlainError."""
    try:
        is_too_large = path.stat().st_size > _MAX_FILE_BYTES
        with path.open("rb") as file:
            # A pipe has no size, so the read is limited, too.
            data = b"" if is_too_large else file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise _UnusableFileError(error.strerror) from error
    if is_too_large or len(data) > _MAX_FILE_BYTES:
        raise _UnusableFileError(
            f"it is larger than {_MAX_FILE_BYTES >> 20} MiB, the limit of dumps and bundles"
        )
    if data.startswith(_ZIP_MAGIC):
        return _read_bundle(path, data)
    number = _RANK_SUFFIX.search(path.name)
    if number is None or len(number[1]) > 9 or int(number[1]) >= MAX_DUMP_RANKS:
        raise _UnusableFileError("its name must end with its rank, as nccl_trace_rank_3 does")
    if data[:64].lstrip()[:1] in (b"{", b"["):
        try:
            content = _load_json(data)
        except (ValueError, RecursionError) as error:
            raise _UnusableFileError(f"it is cut off, or not JSON: {error}") from error
    else:
        content = pickles.safe_loads(data)
    return parse_dump(int(number[1]), content)


def _load_json(data: bytes) -> Any:
    """Raises ValueError if it is not JSON, or has so many values that they would not fit into
    memory, and RecursionError if it is nested too deeply.
    """
    # There are at least as many separators as values in lists and dictionaries.
    separators = sum(map(data.count, (b",", b"[", b"{")))
    if separators > pickles.MAX_VALUES:
        raise ValueError(f"it has more than {pickles.MAX_VALUES >> 20} million values")
    return json.loads(data)


def _read_bundle(path: Path, data: bytes) -> Bundle:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            incident = _read_member(archive, "incident.json")
            ranks = _read_member(archive, "ranks.json")
        is_list = isinstance(ranks, list) and all(isinstance(rank, dict) for rank in ranks)
        if not isinstance(incident, dict) or not is_list:
            raise ValueError("its documents are not those of the API")
        return Bundle(path=path, incident=incident, ranks=ranks)
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        ValueError,
        EOFError,
        OSError,
        RuntimeError,  # the file is encrypted, packed by an unknown method, or nested too deeply
    ) as error:
        raise _UnusableFileError(f"it is not a hangwatch bundle: {error}") from error


def _read_member(archive: zipfile.ZipFile, name: str) -> Any:
    """Reads one JSON document. The size that the archive states may be wrong, so the amount that is
    unpacked is limited. Raises ValueError if the document is too large or not JSON.
    """
    with archive.open(name) as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{name} in it is larger than {_MAX_FILE_BYTES >> 20} MiB")
    return _load_json(data)
