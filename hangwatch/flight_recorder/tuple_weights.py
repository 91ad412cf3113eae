"""Rejects pickles of tuples that share tuples. A tuple in a dictionary's key is hashed while it is
loaded, which visits what it holds as often as it is reached: a few hundred bytes can take for ever.
"""

from __future__ import annotations

import pickletools

MAX_WEIGHT = 10_000  # values that hashing a tuple may visit

_PUTS = frozenset(("BINPUT", "LONG_BINPUT", "PUT"))
_GETS = frozenset(("BINGET", "LONG_BINGET", "GET"))
_TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = -1


def check_tuples(data: bytes) -> None:
    """Follows the opcodes with the weight of each value, without building any. The opcodes must be
    those of plain data. Raises ValueError for a tuple of more than `MAX_WEIGHT` values, and IndexError,
    KeyError or ValueError for an invalid pickle.
    """
    stack: list[int] = []
    memo: dict[int, int] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        index = argument if isinstance(argument, int) else -1
        if name == "MARK":
            stack.append(_MARK)
        elif name in _GETS:
            stack.append(memo[index])
        elif name in _PUTS:
            memo[index] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "TUPLE" or name in _TUPLE_SIZES:
            stack.append(_weigh(_pop_items(stack, _TUPLE_SIZES.get(name))))
        elif name in ("LIST", "DICT"):
            _pop_items(stack, None)
            stack.append(1)
        elif name in ("APPENDS", "SETITEMS"):
            _pop_items(stack, None)
        elif name == "APPEND":
            _pop_items(stack, 1)
        elif name == "SETITEM":
            _pop_items(stack, 2)
        elif opcode.stack_after:  # it pushes a number, a text or an empty container
            stack.append(1)


def _pop_items(stack: list[int], count: int | None) -> list[int]:
    """The topmost values; None: those above the mark, which is popped as well."""
    if count is not None:
        items = [stack.pop() for _ in range(count)]
        if _MARK in items:
            raise ValueError("a mark where a value should be")
        return items
    items = []
    while (weight := stack.pop()) != _MARK:
        items.append(weight)
    return items


def _weigh(items: list[int]) -> int:
    weight = 1 + sum(items)
    if weight > MAX_WEIGHT:
        raise ValueError(f"a tuple of more than {MAX_WEIGHT:,} values, as no dump has")
    return weight
