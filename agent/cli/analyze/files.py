"""Files that were kept of a hang: Flight Recorder dumps, one from each rank, and bundles of
hangwatch's own.

Whoever sent them may not know what is in them, or may mean harm: nothing is unpacked to disk, and
no more is read than such a file has.
"""

from __future__ import annotations

import gc
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hangwatch.flight_recorder.calls import InternPool
from hangwatch.flight_recorder.dumps import FlightDump, FlightDumpError
from hangwatch.flight_recorder.dumps import parse_dump as read_dump
from hangwatch.flight_recorder.group_tables import MAX_DUMP_RANKS

from ..errors import CliError
from . import plain_pickle

_RANK_SUFFIX = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")
_ZIP_MAGIC = b"PK\x03\x04"
_MAX_FILE_BYTES = 1 << 28  # bytes of a bundle, and of one document in it


class FileError(CliError):
    """A file cannot be read, or is not what it should be."""


class _UnusableFileError(Exception):
    """A file that others may be analyzed without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What a server knew of one incident, and of its job's ranks: documents of the API."""

    path: Path
    incident: Mapping[str, Any]
    ranks: list[Mapping[str, Any]]


@dataclass(slots=True, kw_only=True)
class Evidence:
    """``written`` says, by rank, when a dump was, in seconds since the epoch; ``unusable`` of each
    file that could not be used why.
    """

    bundles: list[Bundle] = field(default_factory=list)
    dumps: list[FlightDump] = field(default_factory=list)
    written_at: dict[int, float] = field(default_factory=dict)
    unusable: list[str] = field(default_factory=list)


def read_evidence(
    paths: Iterable[Path], progress: Callable[[int, int], None] = lambda done, of: None
) -> Evidence:
    """All evidence in files and folders; in a folder, files whose names end with no number are
    passed over.

    Files that are cut off, or something else, are told and done without. Raises FileError where
    nothing is left, where two are of one rank, and for a pickle that wants to run something.
    """
    found = Evidence()
    dumps: dict[int, tuple[Path, FlightDump]] = {}
    known = InternPool()
    files = list(_list_files(paths))
    with _pause_gc():
        for at, path in enumerate(files):
            progress(at, len(files))
            try:
                told = _read_file(path, known)
            except plain_pickle.HostileError as error:
                raise FileError(f"{path}: {error}") from error
            except (_UnusableFileError, FlightDumpError, plain_pickle.NotPlainError) as error:
                found.unusable.append(f"{path}: {error}")
                continue
            if isinstance(told, Bundle):
                found.bundles.append(told)
                continue
            if told.rank in dumps:
                raise FileError(
                    f"{dumps[told.rank][0]} and {path} are both of rank {told.rank}: analyze one"
                    " run of a job at a time"
                )
            dumps[told.rank] = (path, told)
            found.written_at[told.rank] = path.stat().st_mtime
    progress(len(files), len(files))
    found.dumps = [dump for _, (_, dump) in sorted(dumps.items())]
    if not found.bundles and not dumps:
        nothing = (
            f"{', '.join(map(str, paths))}: no dump whose name ends with a rank, as"
            " nccl_trace_rank_3 does, and no bundle"
        )
        raise FileError("\n".join(found.unusable[:8]) or nothing)
    return found


def _list_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(
                p
                for p in path.rglob("*")
                if p.is_file() and (p.suffix == ".zip" or _RANK_SUFFIX.search(p.name))
            )
        else:
            yield path


@contextmanager
def _pause_gc() -> Iterator[None]:
    """Millions of objects that all stay would be looked through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read_file(path: Path, pool: InternPool) -> Bundle | FlightDump:
    """Raises FileError, _Unusable, DumpError or NotPlainError."""
    try:
        large = path.stat().st_size > _MAX_FILE_BYTES
        with path.open("rb") as file:
            data = b"" if large else file.read(_MAX_FILE_BYTES + 1)  # a pipe does not tell
    except FileNotFoundError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise _UnusableFileError(error.strerror) from error
    if large or len(data) > _MAX_FILE_BYTES:
        raise _UnusableFileError(
            f"it is larger than {_MAX_FILE_BYTES >> 20} MiB, as no dump and no bundle is"
        )
    if data.startswith(_ZIP_MAGIC):
        return _read_bundle(path, data)
    number = _RANK_SUFFIX.search(path.name)
    if number is None or len(number[1]) > 9 or int(number[1]) >= MAX_DUMP_RANKS:
        raise _UnusableFileError("its name must end with its rank, as nccl_trace_rank_3 does")
    return read_dump(int(number[1]), _load_plain(data), pool)


def _load_plain(data: bytes) -> object:
    if data[:64].lstrip()[:1] not in (b"{", b"["):
        return plain_pickle.safe_loads(data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _UnusableFileError(f"it is cut off, or no JSON: {error}") from error


def _read_bundle(path: Path, data: bytes) -> Bundle:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            told, ranks = (
                _read_member(archive, "incident.json"),
                _read_member(archive, "ranks.json"),
            )
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        ValueError,
        EOFError,
        OSError,
        RuntimeError,
        NotImplementedError,
    ) as error:
        raise _UnusableFileError(f"it is no bundle of hangwatch's: {error}") from error
    if (
        not isinstance(told, dict)
        or not isinstance(ranks, list)
        or not all(isinstance(rank, dict) for rank in ranks)
    ):
        raise _UnusableFileError(
            "it is no bundle of hangwatch's: its documents are not those of the API"
        )
    return Bundle(path=path, incident=told, ranks=ranks)


def _read_member(archive: zipfile.ZipFile, name: str) -> object:
    """A document. What the archive says of its size may be wrong: so much is unpacked and no more."""
    with archive.open(name) as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{name} in it is larger than {_MAX_FILE_BYTES >> 20} MiB")
    return json.loads(data)
