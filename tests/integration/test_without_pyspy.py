"""Hangs where py-spy may not attach, as in most containers: they last as they would without hangwatch,
and the verdict has the kind, the ranks and the line.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.depth import choose_seed, draw_depth
from tests.harness.job import PTRACE_REFUSED, THIS_RUNTIME
from tests.harness.verdicts import check_program

REFUSED = replace(THIS_RUNTIME, command_prefix=PTRACE_REFUSED)


@pytest.mark.parametrize(
    "name",
    ["native_sleep", "holds_gil", "checkpoint_holds_gil"],
)
def test_verdict(name: str, tmp_path: Path) -> None:
    outcome = check_program(name, tmp_path, runtime=REFUSED, depth=draw_depth(name, choose_seed()))
    assert outcome.is_ok, str(outcome)
    (incident,) = outcome.incidents
    assert {stack["source"] for stack in incident["stacks"]} == {"faulthandler"}


def test_native_call_is_not_interrupted_by_pyspy(tmp_path: Path) -> None:
    outcome = check_program(
        "native_epoll", tmp_path, depth=draw_depth("native_epoll", choose_seed())
    )
    assert outcome.is_ok, str(outcome)
    (incident,) = outcome.incidents
    assert {stack["source"] for stack in incident["stacks"]} == {"py-spy"}
