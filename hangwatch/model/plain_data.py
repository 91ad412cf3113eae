"""Validates numbers and names from untrusted data. Pure."""

from __future__ import annotations

_MAX_TEXT_CHARS = 4096


def parse_int(value: object) -> int:
    """An integer, also from text or an integral float. Raises TypeError or ValueError for other
    values and for more than 64 bits.
    """
    if (isinstance(value, str) and len(value) <= 20) or (
        isinstance(value, float) and value.is_integer()
    ):
        value = int(value)
    if not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} where a number should be")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a number of more than 64 bits")
    return value


def parse_text(value: object) -> str:
    """A string, truncated to 4,096 characters. Raises TypeError for other types."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where text should be")
    return value[:_MAX_TEXT_CHARS]
