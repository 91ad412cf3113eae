"""A healthy job opens no alert, however uneven it is, and only its ranks are shown as ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.expected import names
from tests.harness.verdicts import check


@pytest.mark.parametrize("name", names(healthy=True, ci=True))
def test_no_alert(name: str, tmp_path: Path) -> None:
    outcome = check(name, tmp_path)
    assert outcome.ok, str(outcome)
