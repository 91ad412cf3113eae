"""Which server is meant, and with which token."""

from __future__ import annotations

import socket

import pytest

from hangwatch.agent.cli.client import parse_address
from hangwatch.agent.cli.errors import UsageError
from hangwatch.agent.transport.client import ServerTarget


def test_first_of_several_servers_that_answers_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as answering:
        second = f"http://:secret@127.0.0.1:{answering.getsockname()[1]}"
        env = {"HANGWATCH_URL": f"http://127.0.0.1:9, {second}"}
        assert parse_address(None, None, env).token == "secret"
    assert parse_address(None, None, env).base_url == "http://127.0.0.1:9", "none of them answers"


def test_the_token_comes_from_the_flag_then_the_url_then_the_environment() -> None:
    env = {"HANGWATCH_URL": "http://:from-url@master:8642/", "HANGWATCH_TOKEN": "from-env"}
    assert parse_address(None, "from-flag", env) == ServerTarget(
        base_url="http://master:8642", token="from-flag"
    )
    assert parse_address(None, None, env).token == "from-url"
    assert parse_address("http://other", None, env) == ServerTarget(
        base_url="http://other", token="from-env"
    )
    assert parse_address("http://a%2Fb@other", None, {}).token == "a/b"
    assert parse_address(None, None, {}) == ServerTarget(base_url="http://127.0.0.1:8642", token="")


def test_a_path_prefix_and_ipv6_are_kept() -> None:
    assert parse_address("https://proxy/hangwatch/", None, {}).base_url == "https://proxy/hangwatch"
    assert parse_address("http://[::1]:8642", None, {}).base_url == "http://[::1]:8642"


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
