"""Validates numbers and names from untrusted data. Pure."""

from __future__ import annotations

from collections.abc import Collection

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


def count_values(value: object) -> int:
    """How many values nested containers hold, each as often as it is reached: shared containers of
    a few bytes can hold more than any program could visit. Takes time proportional to the number of
    different containers and their items.
    """
    counts: dict[int, int] = {}
    pending = [value]
    while pending:
        container = pending[-1]
        if id(container) in counts:
            pending.pop()
            continue
        items = [item for item in _list_items(container) if isinstance(item, _CONTAINERS)]
        unknown = [item for item in items if id(item) not in counts]
        if unknown:
            # Of a container that contains itself, the count would be infinite.
            if counts.get(-id(container)) is not None:
                raise ValueError("a container contains itself")
            counts[-id(container)] = 0
            pending += unknown
            continue
        leaves = len(_list_items(container)) - len(items)
        counts[id(container)] = 1 + leaves + sum(counts[id(item)] for item in items)
        pending.pop()
    return counts[id(value)]


_CONTAINERS = (dict, list, tuple, set, frozenset)


def _list_items(container: object) -> Collection[object]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return container if isinstance(container, _CONTAINERS) else ()
