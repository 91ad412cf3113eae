"""The commands, their usage errors and their help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hangwatch.agent.cli import main
from hangwatch.agent.cli.main import build_parser


def test_bad_ranks_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["dump", "0..3"])
    assert stopped.value.code == 2
    assert "invalid rank '0..3': write ranks as 0,3-5" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [[], ["nonsense"], ["incidents", "--limit", "0"], ["incidents", "--kind", "hang"]]
)
def test_usage_errors_exit_with_2(command: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2


def test_every_documented_command_exists() -> None:
    text = build_parser().format_help()
    assert all(
        f"\n    {name}" in text
        for name in ("demo", "status", "incidents", "show", "dump", "doctor")
    )


def test_help_loads_no_http_client() -> None:
    program = (
        "import sys\n"
        "from hangwatch.agent.cli.main import build_parser\n"
        "build_parser(['--help']).format_help()\n"
        "print('httpx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n"
