"""The verdict that a program must get, as its ``expected.json`` describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

_TESTS_DIR = Path(__file__).parent.parent
PROGRAMS_DIR = _TESTS_DIR / "zoo"
_FRAMEWORK_PROGRAMS_DIR = _TESTS_DIR / "frameworks" / "programs"
_FRAMEWORK_PREFIX = "frameworks/"
# The folders of programs by suite. A program's name is its folder, such as "killed", "nccl/killed" or "frameworks/ray_get".
_PATTERNS = {
    "gloo": "zoo/*/expected.json",
    "nccl": "zoo/nccl/*/expected.json",
    "frameworks": "frameworks/programs/*/expected.json",
}
PLANTED_MARK = "# PLANTED"
IMMEDIATE_VERDICT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedVerdict:
    """``waiting``, ``fields``, ``exit``, ``signal``, ``exit_status`` and ``exception`` are compared
    where they are given.

    ``where`` says where the incident must show the planted line, as the culprit's: in its "calls",
    its "stacks" or its "exception". ``summary`` and ``advice`` are parts of these texts.
    ``divergence`` are rows that its alignment must have, as pairs of call numbers, the others'
    first: ``[8, null]`` is call 8, which the culprit did not make. ``env`` are the job's variables.
    ``stand_ins_only`` marks a fault that a real GPU cannot be made to have. ``stall_after_s`` is the
    server's limit, where the program needs another one than the zoo's. ``unwatched`` are the ranks
    whose calls are not recorded. A healthy program with ``makes_calls`` false makes none that would be:
    its ranks must be seen without any.
    """

    ranks: int
    launcher: str = "torchrun"
    max_restarts: int = 0
    healthy: bool = False
    ci: bool = False  # of the representative part that the tests run
    interrupt: bool = False  # a Ctrl-C once the program has touched its mark
    kind: str = ""
    severity: str = "alert"
    culprits: tuple[int, ...] = ()
    waiting: tuple[int, ...] | None = None
    fields: tuple[str, ...] | None = None
    where: str | None = None
    latency: str = "at_once"
    exit: int | None = None
    signal: int | None = None
    exit_status: int | None = None
    exception: str | None = None
    summary: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    divergence: tuple[list[int | None], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    stand_ins_only: bool = False
    stall_after_s: float | None = None
    unwatched: tuple[int, ...] = ()
    makes_calls: bool = True

    @property
    def recorded_ranks(self) -> set[int]:
        """The ranks whose calls are recorded."""
        return set(range(self.ranks if self.makes_calls else 0)).difference(self.unwatched)

    def verdict_deadline_s(self, stall_after_s: float) -> float:
        """Seconds after the fault within which the verdict must be reported."""
        return IMMEDIATE_VERDICT_S + (stall_after_s if self.latency == "stall_after" else 0.0)


def list_programs(*, healthy: bool, ci: bool = False, backend: str = "gloo") -> list[str]:
    """All programs that are healthy or not; with ``ci`` only the representative part."""
    names = [_name_program(path.parent) for path in _TESTS_DIR.glob(_PATTERNS[backend])]
    programs = {name: load_expected(name) for name in names}
    return sorted(
        name
        for name, expected in programs.items()
        if expected.healthy == healthy and expected.ci >= ci
    )


def _name_program(folder: Path) -> str:
    if folder.parent == _FRAMEWORK_PROGRAMS_DIR:
        return _FRAMEWORK_PREFIX + folder.name
    return folder.relative_to(PROGRAMS_DIR).as_posix()


def _program_folder(name: str) -> Path:
    if name.startswith(_FRAMEWORK_PREFIX):
        return _FRAMEWORK_PROGRAMS_DIR / name.removeprefix(_FRAMEWORK_PREFIX)
    return PROGRAMS_DIR / name


def program_path(name: str) -> Path:
    return _program_folder(name) / "program.py"


def load_expected(name: str) -> ExpectedVerdict:
    """Raises KeyError for an unknown key and TypeError for a missing one."""
    document: dict[str, Any] = json.loads((_program_folder(name) / "expected.json").read_text())
    known_keys = {f.name for f in fields(ExpectedVerdict)}
    if unknown := document.keys() - known_keys:
        raise KeyError(
            f"{name}/expected.json: unknown {sorted(unknown)}; there are {sorted(known_keys)}"
        )
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in document.items()
    }
    return ExpectedVerdict(**values)


def find_planted_line(name: str) -> int | None:
    """The line of the program that ends with the mark, from 1."""
    lines = program_path(name).read_text().splitlines()
    return next((n for n, line in enumerate(lines, 1) if line.endswith(PLANTED_MARK)), None)


def compare_incident(name: str, expected: ExpectedVerdict, incident: dict[str, Any]) -> list[str]:
    """Lists the differences between an incident of the API and the expected one."""
    problems = []
    for key in ("kind", "severity", "culprits", "waiting", "fields"):
        wanted: Any = getattr(expected, key)
        if wanted is None:
            continue
        wanted = sorted(wanted) if isinstance(wanted, tuple) else wanted
        actual = sorted(incident[key]) if isinstance(incident[key], list) else incident[key]
        if actual != wanted:
            problems.append(f"{key} is {actual}, not {wanted}")
    for key in ("summary", "advice"):
        problems += [
            f"{key} does not say {part!r}: {incident[key]}"
            for part in getattr(expected, key)
            if part not in incident[key]
        ]
    rows = [row["seq"] for row in (incident.get("divergence") or {"rows": ()})["rows"]]
    problems += [
        f"its divergence has no row {row}: {rows}" for row in expected.divergence if row not in rows
    ]
    for rank in expected.culprits:
        problems += _compare_process(expected, rank, incident)
        if expected.where is not None:
            line = find_planted_line(name)
            shown_lines = _shown_lines(incident, expected.where, rank, program_path(name))
            if line not in shown_lines:
                problems.append(
                    f"rank {rank}'s {expected.where} show lines {sorted(shown_lines)}, not {line}"
                )
    return problems


def _compare_process(expected: ExpectedVerdict, rank: int, incident: dict[str, Any]) -> list[str]:
    process: dict[str, Any] = next((p for p in incident["processes"] if p["rank"] == rank), {})
    problems = []
    for key in ("signal", "exit_status"):
        wanted = getattr(expected, key)
        if wanted is not None and process.get(key) != wanted:
            problems.append(f"rank {rank}'s {key} is {process.get(key)}, not {wanted}")
    exception_type = (process.get("exception") or process.get("handling") or {}).get("type")
    if expected.exception is not None and exception_type != expected.exception:
        problems.append(f"rank {rank}'s exception is {exception_type}, not {expected.exception}")
    return problems


def _shown_lines(incident: dict[str, Any], where: str, rank: int, source: Path) -> set[int]:
    """The lines of a program that one part of an incident shows of a rank."""
    if where == "calls":
        sites = [entry.get("site") for entry in incident["calls"] if rank in entry["ranks"]]
    elif where == "stacks":
        sites = [
            frame
            for entry in incident["stacks"]
            if rank in entry["ranks"]
            for frame in entry.get("frames", ())
        ]
    else:
        sites = [
            (p.get("exception") or {}).get("site")
            for p in incident["processes"]
            if p["rank"] == rank
        ]
    return {site["line"] for site in sites if site and Path(site["file"]).name == source.name}
