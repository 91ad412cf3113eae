"""Each hang of the zoo's representative part gets the right kind, rank and line, in time, and nothing beside it.

Three jobs of four ranks start at once on two cores here, and several hang as soon as they have started: ``python -m tests.zoo`` holds
them to the seconds that they should take, one or two at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.expected import names
from tests.harness.verdicts import check

SLACK_S = 3.0


@pytest.mark.parametrize("name", names(healthy=False, ci=True))
def test_verdict(name: str, tmp_path: Path) -> None:
    outcome = check(name, tmp_path, slack_s=SLACK_S)
    assert outcome.ok, str(outcome)
