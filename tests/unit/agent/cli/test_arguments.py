"""Lists of ranks."""

from __future__ import annotations

import argparse

import pytest

from hangwatch.agent.cli.arguments import parse_ranks


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
