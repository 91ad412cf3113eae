"""What all tests share: the seed of the zoo's programs, and the marker of the slow tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.depth import SEED_VARIABLE, choose_seed


def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed once, in the process that starts the workers, which inherit it."""
    os.environ.setdefault(SEED_VARIABLE, str(choose_seed()))


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Marks the tests that start servers, jobs or browsers: all but the unit tests."""
    unit_tests = Path(__file__).with_name("unit")
    for item in items:
        if unit_tests not in item.path.parents:
            item.add_marker(pytest.mark.slow)


def pytest_report_header(config: pytest.Config) -> str:
    return _describe_seed()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeats the seed behind the failures: with ``-q`` there is no header."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(_describe_seed())


def _describe_seed() -> str:
    seed = os.environ[SEED_VARIABLE]
    return f"zoo: {SEED_VARIABLE}={seed} makes the same calls before each fault again"
