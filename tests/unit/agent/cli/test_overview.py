"""What can be typed, which server is meant, and the overviews: no network but this machine."""

from __future__ import annotations

import argparse
import io
import socket
import subprocess
import sys
from datetime import datetime, timezone
from typing import Any

import pytest

from hangwatch.agent.cli import main
from hangwatch.agent.cli.arguments import parse_ranks
from hangwatch.agent.cli.client import ServerAddress, parse_address
from hangwatch.agent.cli.commands import status
from hangwatch.agent.cli.demo.command import names_planted_line
from hangwatch.agent.cli.errors import UsageError
from hangwatch.agent.cli.main import build_parser
from hangwatch.agent.cli.terminal import detect_paint
from hangwatch.report.text import PLAIN_PAINT, TERMINAL_COLUMNS

NOW = datetime(2026, 11, 21, 9, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [0]),
        ("0,3-5", [0, 3, 4, 5]),
        ("5-5", [5]),
        (" 2 , 1 - 3 ", [1, 2, 3]),
        ("7,7,0", [0, 7]),
    ],
)
def test_rank_ranges_are_parsed(text: str, ranks: list[int]) -> None:
    assert parse_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "0x1", "1-2-3", "²", "1;2"])
def test_invalid_rank_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write ranks as 0,3-5"):
        parse_ranks(text)


def test_backward_and_endless_ranges_are_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write it as 3-5"):
        parse_ranks("5-3")
    with pytest.raises(argparse.ArgumentTypeError, match="more than 65536 ranks"):
        parse_ranks("0-999999999")


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


def test_first_of_several_servers_that_answers_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as answering:
        second = f"http://:secret@127.0.0.1:{answering.getsockname()[1]}"
        env = {"HANGWATCH_URL": f"http://127.0.0.1:9, {second}"}
        assert parse_address(None, None, env).token == "secret"
    assert parse_address(None, None, env).url == "http://127.0.0.1:9", "none of them answers"


def test_the_token_comes_from_the_flag_then_the_url_then_the_environment() -> None:
    env = {"HANGWATCH_URL": "http://:from-url@master:8642/", "HANGWATCH_TOKEN": "from-env"}
    assert parse_address(None, "from-flag", env) == ServerAddress(
        url="http://master:8642", token="from-flag"
    )
    assert parse_address(None, None, env).token == "from-url"
    assert parse_address("http://other", None, env) == ServerAddress(
        url="http://other", token="from-env"
    )
    assert parse_address("http://a%2Fb@other", None, {}).token == "a/b"
    assert parse_address(None, None, {}) == ServerAddress(url="http://127.0.0.1:8642", token=None)


def test_a_path_prefix_and_ipv6_are_kept() -> None:
    assert parse_address("https://proxy/hangwatch/", None, {}).url == "https://proxy/hangwatch"
    assert parse_address("http://[::1]:8642", None, {}).url == "http://[::1]:8642"


BAD_URLS = [
    "master:8642",
    "ftp://master",
    "http://",
    "http://:8642",
    "http://master:port",
    "http://[::1",
    "localhost",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_invalid_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match="http://master:8642"):
        parse_address(url, None, {})


def test_no_message_shows_the_token() -> None:
    with pytest.raises(UsageError) as refused:
        parse_address("ftp://:secret@master", None, {})
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(parse_address("http://:secret@master", None, {}))


def make_incident(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "job": "run7",
        "attempt": 0,
        "kind": "missing_rank",
        "severity": "alert",
        "status": "open",
        "onset_at": "2026-11-21T09:00:48Z",
        "opened_at": "2026-11-21T09:00:50Z",
        "summary": "rank 2 has not entered all_reduce",
    } | changes


JOB_DOCUMENT = {
    "job": "run7",
    "attempt": 0,
    "state": "stalled",
    "world_size": 4,
    "states": {"waiting": 3, "running": 1},
    "open_incidents": 1,
    "last_seen_s": 0.4,
}


def test_status_is_a_line_for_each_job_with_its_incidents() -> None:
    text = list(
        status.format_status(
            [JOB_DOCUMENT, JOB_DOCUMENT | {"job": "run8", "state": "running", "step": 12}],
            [make_incident("01JA")],
            NOW,
            PLAIN_PAINT,
        )
    )
    assert text == [
        "run7  stalled  4 ranks: 3 waiting, 1 running · seen 0.4 s ago",
        "  ALERT  missing_rank  for 12 s  01JA",
        "    rank 2 has not entered all_reduce",
        "run8  running  4 ranks: 3 waiting, 1 running · step 12 · seen 0.4 s ago",
    ]


def test_status_keeps_incidents_of_earlier_attempts() -> None:
    text = list(
        status.format_status(
            [JOB_DOCUMENT | {"attempt": 1}], [make_incident("01JA", attempt=0)], NOW, PLAIN_PAINT
        )
    )
    assert text[0].startswith("run7 (attempt 1)")
    assert text[1] == "Still open, of earlier jobs or attempts:"
    assert "01JA" in text[2]


def test_incidents_table_has_typable_ids() -> None:
    ids = ["01JABCDEFGHJKLMNPQRSTVWXYZ", "01JABCDEFGHJKLMNPQRSTVWXY0", "01JZBCDEFGHJKLMNPQRSTVWXYZ"]
    text = list(
        status.format_incidents(
            [make_incident(name, job="j" * 99) for name in ids], NOW, PLAIN_PAINT
        )
    )
    assert text[0].split() == ["ID", "STATUS", "AGE", "KIND", "JOB"]
    assert [line.split()[0] for line in text[1::2]] == ids
    assert "10 s" in text[1]
    assert max(map(len, text)) <= TERMINAL_COLUMNS


def test_shortest_unique_id_prefix() -> None:
    assert status.find_unique_prefix_width(["01JABCDEFGHJKA", "01JABCDEFGHJKB"]) == 14
    assert status.find_unique_prefix_width(["01JABCDEFGHJKA", "02JABCDEFGHJKB"]) == 10
    assert status.find_unique_prefix_width(["ab"]) == 2
    assert status.find_unique_prefix_width([]) == 10


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_supporting_terminals() -> None:
    assert detect_paint({}, FakeTerminal()).colour
    assert not detect_paint({}, io.StringIO()).colour
    assert not detect_paint({"NO_COLOR": "1"}, FakeTerminal()).colour
    assert not detect_paint({"TERM": "dumb"}, FakeTerminal()).colour


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


def test_help_loads_no_http_client() -> None:
    program = (
        "import sys\n"
        "from hangwatch.agent.cli.main import build_parser\n"
        "build_parser(['--help']).format_help()\n"
        "print('httpx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n"
