"""Files that were kept of a hang: Flight Recorder dumps, one from each rank, and bundles of hangwatch's own."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hangwatch.flight_recorder import Dump, DumpError
from hangwatch.flight_recorder import read as read_dump

from .. import plain_pickle
from .errors import CliError

_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")
_ZIP = b"PK\x03\x04"
_MOST = 1 << 28  # bytes of one document in a bundle


class FileError(CliError):
    """A file cannot be read, or is not what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What a server knew of one incident, and of its job's ranks: documents of the API."""

    incident: Mapping[str, Any]
    ranks: list[Mapping[str, Any]]


def read(paths: Iterable[Path]) -> tuple[list[Bundle], list[Dump]]:
    """All evidence in files and folders; in a folder, files whose names end with no number are passed over. Raises FileError."""
    bundles: list[Bundle] = []
    dumps: dict[int, tuple[Path, Dump]] = {}
    for path in _files(paths):
        try:
            data = path.read_bytes()
            if data.startswith(_ZIP):
                bundles.append(_bundle(data))
                continue
            if (number := _RANK.search(path.name)) is None:
                raise FileError("its name must end with its rank, as nccl_trace_rank_3 does")
            dump = read_dump(int(number[1]), _plain(data))
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}") from error
        except (FileError, DumpError, plain_pickle.NotPlainError) as error:
            raise FileError(f"{path}: {error}") from error
        if dump.rank in dumps:
            raise FileError(f"{dumps[dump.rank][0]} and {path} are both of rank {dump.rank}: analyze one run of a job at a time")
        dumps[dump.rank] = (path, dump)
    if not bundles and not dumps:
        raise FileError(f"{', '.join(map(str, paths))}: no dump whose name ends with a rank, and no bundle")
    return bundles, [dump for _, (_, dump) in sorted(dumps.items())]


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file() and (p.suffix == ".zip" or _RANK.search(p.name)))
        else:
            yield path


def _plain(data: bytes) -> object:
    if data.lstrip()[:1] not in (b"{", b"["):
        return plain_pickle.loads(data)
    try:
        return json.loads(data)
    except ValueError as error:
        raise FileError(f"it is cut off, or no JSON: {error}") from error


def _bundle(data: bytes) -> Bundle:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            told, ranks = _member(archive, "incident.json"), _member(archive, "ranks.json")
    except (zipfile.BadZipFile, KeyError, ValueError, RuntimeError, NotImplementedError) as error:
        raise FileError(f"it is no bundle of hangwatch's: {error}") from error
    if not isinstance(told, dict) or not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        raise FileError("it is no bundle of hangwatch's: its documents are not those of the API")
    return Bundle(incident=told, ranks=ranks)


def _member(archive: zipfile.ZipFile, name: str) -> object:
    if archive.getinfo(name).file_size > _MOST:
        raise FileError(f"{name} in it is larger than {_MOST >> 20} MiB")
    return json.loads(archive.read(name))
