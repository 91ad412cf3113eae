"""What all tests share: the zoo's seed, the marker of the slow tests, and a PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.harness.depth import SEED_VARIABLE, choose_seed
from tests.harness.postgres import find_postgres_bin, running_postgres


def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed once, in the process that starts the workers, which inherit it."""
    os.environ.setdefault(SEED_VARIABLE, str(choose_seed()))


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Marks all but the unit tests, and those that read the built documentation. The other unit
    tests that start a program which takes seconds are marked themselves.
    """
    unit_tests = Path(__file__).with_name("unit")
    for item in items:
        if unit_tests not in item.path.parents or "site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def pytest_report_header(config: pytest.Config) -> str:
    return _describe_seed()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeats the seed behind the failures: with ``-q`` there is no header."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(_describe_seed())


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL of its own."""
    programs = find_postgres_bin()
    if programs is None:
        pytest.skip("needs PostgreSQL (on Debian and Ubuntu: apt-get install postgresql)")
    with running_postgres(programs) as url:
        yield url


def _describe_seed() -> str:
    seed = os.environ[SEED_VARIABLE]
    return f"zoo: {SEED_VARIABLE}={seed} makes the same calls before each fault again"
