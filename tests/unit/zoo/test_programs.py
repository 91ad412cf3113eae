"""Every program of the zoo declares a verdict that can be checked."""

from __future__ import annotations

import pytest

from hangwatch.model.kinds import VerdictKind
from tests.harness.expected import (
    find_planted_line,
    list_programs,
    load_expected,
    program_path,
)

BACKENDS = ("gloo", "nccl")
PROGRAMS = [
    name
    for backend in BACKENDS
    for healthy in (False, True)
    for name in list_programs(healthy=healthy, backend=backend)
]
HANGS = [name for backend in BACKENDS for name in list_programs(healthy=False, backend=backend)]


def test_names_contain_the_backend() -> None:
    assert all(name.startswith("nccl/") for name in list_programs(healthy=True, backend="nccl"))
    assert not any("/" in name for name in list_programs(healthy=True))


@pytest.mark.parametrize("name", HANGS)
def test_hang_is_marked(name: str) -> None:
    expected = load_expected(name)
    assert expected.where is None or find_planted_line(name) is not None
    assert "PLANTED_AT" in program_path(name).read_text()


@pytest.mark.parametrize("name", list_programs(healthy=False, backend="nccl"))
def test_nccl_hang_has_a_known_kind(name: str) -> None:
    expected = load_expected(name)
    kind = VerdictKind(expected.kind)
    assert bool(expected.culprits) == (kind is not VerdictKind.NO_PROGRESS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_makes_earlier_calls_or_says_why_not(name: str) -> None:
    source = program_path(name).read_text()
    makes_calls = "earlier_calls.make" in source or "earlier_calls.count" in source
    assert makes_calls != ("\nNo call comes before the fault" in source)
