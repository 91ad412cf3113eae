"""When the demo has named the planted line."""

from __future__ import annotations

from typing import Any

import pytest

from hangwatch.agent.cli.commands.demo import names_planted_line


@pytest.mark.parametrize(
    ("incident", "is_right"),
    [
        (
            {
                "culprits": [2],
                "stacks": [{"ranks": [2], "frames": [{"file": "/tmp/x/train.py", "line": 43}]}],
            },
            True,
        ),
        ({"culprits": [2], "site": {"file": "train.py", "line": 43}}, True),
        (
            {
                "culprits": [2],
                "stacks": [{"ranks": [0], "frames": [{"file": "train.py", "line": 43}]}],
            },
            False,
        ),
        ({"culprits": [1, 2], "site": {"file": "train.py", "line": 43}}, False),
        ({"culprits": [2], "site": {"file": "train.py", "line": 44}}, False),
        ({"culprits": [2]}, False),
    ],
)
def test_demo_checks_its_verdict(incident: dict[str, Any], is_right: bool) -> None:
    assert names_planted_line(incident, "train.py", 43) is is_right
