"""Fixtures of several modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.postgres import find_postgres_bin, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL of its own."""
    programs = find_postgres_bin()
    if programs is None:
        pytest.skip("needs PostgreSQL (on Debian and Ubuntu: apt-get install postgresql)")
    with running_postgres(programs) as url:
        yield url
