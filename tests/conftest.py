"""What all tests share: the seed of the zoo's programs."""

from __future__ import annotations

import os

import pytest

from tests.harness.depth import SEED_VARIABLE, choose_seed


def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed once, in the process that starts the workers, which inherit it."""
    os.environ.setdefault(SEED_VARIABLE, str(choose_seed()))


def pytest_report_header(config: pytest.Config) -> str:
    return _describe_seed()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeats the seed behind the failures: with ``-q`` there is no header."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(_describe_seed())


def _describe_seed() -> str:
    seed = os.environ[SEED_VARIABLE]
    return f"zoo: {SEED_VARIABLE}={seed} makes the same calls before each fault again"
