"""Loads pickles of plain data only: dicts, lists, tuples, strings, numbers. A pickle that could
import or call something is rejected.

All opcodes are checked before any is executed. Only the opcodes of the stdlib's ``pickletools``
that build plain data are allowed, with arguments that fit into the file. Then Python's own
unpickler, which is fast, loads the pickle. A child process with limits instead would refuse a
pickle only after it had used them up, and could not report what the pickle would do. A node agent
would start one beside the job for each rank that ends.

Tuples that share tuples are rejected as well. A tuple in a dictionary's key is hashed while it is
loaded, which visits what it holds as often as it is reached: a few hundred bytes can take hours.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Sequence
from typing import Any

MAX_PICKLE_BYTES = 1 << 27  # a dump of 100,000 calls with their stacks takes about 40 MB
MAX_VALUES = 1 << 24  # such a dump has 7 million
MAX_WEIGHT = 10_000  # the values that hashing a tuple may visit
MAX_FOLLOWED_OPCODES = 1 << 22  # a pickle with tuples may have no more
_CONTAINERS = (dict, list, tuple)

_LINE_OPCODES = rb"I-?\d{1,20}\n|L-?\d{1,20}L?\n|F[-+.\deinfaINFA]{1,40}\n|V[^\n]*\n|S[^\n]*\n|g\d{1,9}\n|p\d{1,7}\n"
_FIXED_OPCODES = rb"[N\x88\x89\]})(aesuld\x94]|[Khq\x80].|M..|[Jj]....|[G\x95].{8}"
_LONG_OPCODE = rb"\x8a(?:" + b"|".join(b"[%c]" % n + b"." * n for n in range(10)) + rb")"
# Opcodes of strings, by the size of the length that precedes the string.
_LENGTH_PREFIX_BYTES = {b"X": 4, b"\x8c": 1, b"\x8d": 8, b"U": 1, b"T": 4, b"C": 1, b"B": 4}
_TUPLE_OPCODES = (b"t", b"\x85", b"\x86", b"\x87")  # torch writes none
_IMPORT_OPCODES = (b"c", b"i")  # followed by a module and a name, each on its own line
_EXTERNAL_OPCODES = {
    b"P": "persistent id", b"Q": "persistent id",
    b"\x82": "extension registry", b"\x83": "extension registry", b"\x84": "extension registry",
}  # fmt: skip
_CALL_OPCODES = (b"R", b"o", b"b", b"\x81", b"\x92")
_MARK = -1  # the weight of a mark


class NotPlainError(Exception):
    """The bytes are not a pickle of plain data. No part of them was executed."""


class HostileError(NotPlainError):
    """The pickle would import or call something."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Rejects all imports. This is a second line of defence after `_check_opcodes`."""
        raise HostileError(_format_refusal(f"import {module}.{name}"))


def safe_loads(data: bytes) -> object:
    """Loads a pickle of plain data. Raises HostileError if it would import or call something, and
    NotPlainError if it is not a pickle of plain data.
    """
    has_tuples = _check_opcodes(data)
    try:
        if has_tuples:
            _check_tuples(data)
        value = _PlainUnpickler(io.BytesIO(data)).load()
        if _count_values([value], {}) > MAX_VALUES:
            raise NotPlainError(
                f"it has more than {MAX_VALUES >> 20} million values, as no dump has"
            )
        return value
    except NotPlainError:
        raise
    # Invalid bytes make the unpickler raise many kinds of errors, MemoryError among them.
    except Exception as error:
        raise NotPlainError(
            f"it cannot be read as a pickle: {type(error).__name__}: {error}"
        ) from error


def _check_opcodes(data: bytes) -> bool:
    """Whether the pickle has tuples. Raises NotPlainError at the first opcode that does more than
    build plain data, or that is incomplete.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise NotPlainError(f"it is larger than {MAX_PICKLE_BYTES >> 20} MiB, as no dump is")
    # The unpickler allocates the memo up to the largest index. A valid index is smaller than the
    # file, which has at least one byte for each entry.
    free_bytes, free_bits = divmod(max(16, len(data).bit_length()), 8)
    partly_free = b"[\0-%c]" % ((1 << free_bits) - 1)
    memo_index_opcode = b"r" + b"." * free_bytes + partly_free + b"\0" * (3 - free_bytes)
    opcodes = b"|".join([_FIXED_OPCODES, memo_index_opcode, _LONG_OPCODE, _LINE_OPCODES])
    # A run of adjacent opcodes. Their number is limited, because a longer match needs more memory
    # to backtrack.
    run = re.compile(b"(?:" + opcodes + b"){0,256}", re.DOTALL)
    has_tuples = False
    at = 0
    last_strings = (b"", b"")
    while True:
        start, at = at, _find_run_end(run, data, at)
        operation = data[at : at + 1]
        if operation == b".":
            return has_tuples
        if (size := _LENGTH_PREFIX_BYTES.get(operation)) is not None:
            text_start = at + 1 + size
            at = text_start + int.from_bytes(data[at + 1 : text_start], "little")
            if text_start > len(data) or at > len(data):
                raise NotPlainError(
                    "it cannot be read as a pickle: it is cut off in a string, or the length of a"
                    " string is wrong"
                )
            last_strings = (last_strings[1], data[text_start : min(at, text_start + 100)])
        elif operation in _TUPLE_OPCODES:
            has_tuples = True
            at += 1
        elif at == start:
            raise _build_refusal(run, data, at, last_strings)


def _find_run_end(run: re.Pattern[bytes], data: bytes, at: int) -> int:
    match = run.match(data, at)
    assert match is not None  # the pattern also matches the empty string
    return match.end()


def _build_refusal(
    run: re.Pattern[bytes], data: bytes, at: int, last_strings: tuple[bytes, bytes]
) -> NotPlainError:
    """The error for the opcode at ``at``, which is not allowed or incomplete."""
    operation = data[at : at + 1]
    if not operation:
        return NotPlainError("it cannot be read as a pickle: it is cut off")
    if not data.startswith(b"\x80") and not data.endswith(b"."):
        return NotPlainError("it is neither a pickle nor JSON")
    if operation in (*_IMPORT_OPCODES, b"\x93"):
        names: Sequence[bytes] = last_strings
        if operation in _IMPORT_OPCODES:
            names = data[at + 1 : at + 203].split(b"\n")[:2]
        imported = b".".join(names).decode("utf-8", "replace")
        return HostileError(_format_refusal(f"import {imported}"))
    if operation in _CALL_OPCODES:
        return HostileError(_format_refusal("call or build an object"))
    if operation in _EXTERNAL_OPCODES:
        return HostileError(
            f"it refers to an external object ({_EXTERNAL_OPCODES[operation]}), as no dump does: it"
            " was not executed"
        )
    # An opcode that is cut off within its argument is complete with more bytes or a line's end.
    remaining = data[at : at + 300]
    if any(_find_run_end(run, remaining + added, 0) for added in (bytes(9), b"\n")):
        return NotPlainError("it cannot be read as a pickle: it is cut off")
    return NotPlainError(f"it cannot be read as a pickle of plain data: byte {at} is {operation!r}")


def _format_refusal(action: str) -> str:
    return f"it would {action}, as no dump does: it was not executed. Do not trust its source"


def _check_tuples(data: bytes) -> None:
    """Follows the opcodes with the weight of each value, without building any. The opcodes must be
    those of plain data. Raises ValueError for a tuple of more than `MAX_WEIGHT` values and for more
    opcodes than can be followed in seconds, and IndexError, KeyError or ValueError for an invalid
    pickle.
    """
    stack = []
    memo: dict[Any, int] = {}
    for position, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if position >= MAX_FOLLOWED_OPCODES:
            raise ValueError("tuples among so many values as no dump with tuples has")
        if opcode.name == "MARK":
            stack.append(_MARK)
        elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif opcode.name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        else:
            # The opcode takes a number of values or, of some opcodes, the topmost mark with all
            # values above it.
            taken = []
            count = len(opcode.stack_before)
            if pickletools.markobject in opcode.stack_before:
                while (weight := stack.pop()) != _MARK:
                    taken.append(weight)
                count = opcode.stack_before.index(pickletools.markobject)
            taken += [stack.pop() for _ in range(count)]
            if _MARK in taken:
                raise ValueError("a mark where a value should be")
            weight = 1 + sum(taken) if opcode.name.startswith("TUPLE") else 1
            if weight > MAX_WEIGHT:
                raise ValueError(f"a tuple of more than {MAX_WEIGHT:,} values, as no dump has")
            stack += [weight] * len(opcode.stack_after)


def _count_values(container: Any, counts: dict[int, int]) -> int:
    """The number of values that nested containers hold, each as often as it is reached: shared
    containers of a few bytes can hold more than any program could visit. The time is proportional
    to the number of different containers and their items, whose ``counts`` by id are kept.

    Raises ValueError for a container that contains itself, and RecursionError for deep nesting.
    """
    count = counts.get(id(container))
    if count is None:
        counts[id(container)] = 0
        items = container
        if isinstance(container, dict):
            items = [*container, *container.values()]
        inner = [item for item in items if isinstance(item, _CONTAINERS)]
        count = 1 + len(items) - len(inner)
        for item in inner:
            count += _count_values(item, counts)
        counts[id(container)] = count
    elif count == 0:  # it is being counted: its count would be infinite
        raise ValueError("a container contains itself")
    return count
