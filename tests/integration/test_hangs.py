"""Each hang of the zoo's representative part gets the right kind, rank and line, in time, and
nothing beside it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.expected import names
from tests.harness.verdicts import check


@pytest.mark.parametrize("name", names(healthy=False, ci=True))
def test_verdict(name: str, tmp_path: Path) -> None:
    outcome = check(name, tmp_path)
    assert outcome.ok, str(outcome)
