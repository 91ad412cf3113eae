"""`hangwatch analyze`: the diagnosis from files that somebody kept, without a server and without the job."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from hangwatch.flight_export import dumps_of
from hangwatch.offline import analyze
from hangwatch.render import incident
from hangwatch.text import Paint, seconds_since
from hangwatch.types import Site, Verdict

from .errors import HANG, OK, UsageError
from .evidence_files import Bundle, FileError, read
from .terminal import paint, say, say_json, tell


def run(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Prints what the files tell and returns `HANG` where that is a hang. Raises FileError or UsageError."""
    bundles, dumps = read(args.paths)
    if args.export is not None:
        _export(bundles, args.export)
    found = [bundle.incident for bundle in bundles]
    notes: tuple[str, ...] = ()
    if dumps:
        finding = analyze(dumps)
        found += [_document(verdict) for verdict in finding.verdicts]
        notes = finding.notes
    if args.json:
        say_json({"items": found, "next": None, "notes": list(notes)})
    else:
        say(_lines(found, paint(env)))
    for note in notes:
        tell(note)
    if not found:
        count = f"{len(dumps)} dump{'s' if len(dumps) > 1 else ''}"
        tell(f"no hang in {count}: what can be compared agrees, and no rank is known to keep another waiting")
    return HANG if any(told.get("severity") == "alert" for told in found) else OK


def _lines(found: Iterable[Mapping[str, Any]], colours: Paint) -> Iterator[str]:
    for i, document in enumerate(found):
        if i:
            yield ""
        yield from incident(document, _as_of(document), colours)


def _as_of(document: Mapping[str, Any]) -> datetime:
    """The last moment that it speaks of: a bundle does not age."""
    now = datetime.now(timezone.utc)
    told = [document.get("opened_at"), document.get("resolved_at"), *(stack.get("taken_at") for stack in document.get("stacks") or ())]
    return now - timedelta(seconds=min((age for at in told if (age := seconds_since(at, now)) is not None), default=0.0))


def _export(bundles: list[Bundle], folder: Path) -> None:
    if len(bundles) != 1:
        raise UsageError(f"--export writes the ranks of one bundle, and here are {len(bundles)}: name one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, dump in dumps_of(bundles[0].incident, bundles[0].ranks).items():
            (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"the bundle's documents are not those of the API: {type(error).__name__}: {error}") from error
    except OSError as error:
        raise FileError(f"{folder}: {error.strerror}") from error
    tell(f"read by PyTorch's analyzer: torchfrtrace {folder} --prefix rank_")


def _document(verdict: Verdict) -> dict[str, Any]:
    """As the API tells an incident, without what only a server that watched could know."""
    group = verdict.group
    return {
        "kind": verdict.kind.value,
        "severity": verdict.severity.value,
        "status": "open",
        "job": "dump",
        "summary": verdict.summary,
        "advice": verdict.advice,
        "culprits": list(verdict.culprits),
        "waiting": list(verdict.waiting),
        "group": group and {"name": group.name, "desc": group.desc, "ranks": list(group.ranks), "backend": group.backend},
        "seq": verdict.seq,
        "fields": list(verdict.fields),
        "site": _site(verdict.site),
        "calls": [
            {
                "ranks": list(told.ranks),
                "seq": told.call.seq,
                "op": told.call.signature.op,
                "shapes": [list(shape) for shape in told.call.signature.shapes],
                "dtype": told.call.signature.dtype,
                "peer": told.call.peer,
                "splits": told.call.signature.splits and [list(part) for part in told.call.signature.splits],
                "site": _site(told.call.site),
            }
            for told in verdict.calls
        ],
        "waits": [{"rank": wait.rank, "for": wait.on, "group": wait.group, "seq": wait.seq} for wait in verdict.waits],
    }


def _site(site: Site | None) -> dict[str, Any] | None:
    return None if site is None else {"file": site.file, "line": site.line, "function": site.function}
