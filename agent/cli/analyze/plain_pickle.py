"""Pickles of plain data only: dicts, lists, tuples, strings, numbers. Anything that could import or
call something is refused.

The instructions are read before any is followed: those of the stdlib's ``pickletools`` that build
plain data are known here, and whoever uses another, or claims more than the file holds, is refused.
Only then does Python's own unpickler, which is fast, see them.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

MAX_PICKLE_BYTES = 1 << 27  # bytes; the dump of 100,000 calls with their stacks takes about 40 MB

_LINE_OPCODES = rb"I-?\d{1,20}\n|L-?\d{1,20}L?\n|F[-+.\deinfaINFA]{1,40}\n|V[^\n]*\n|S[^\n]*\n|g\d{1,9}\n|p\d{1,7}\n"
_FIXED_OPCODES = rb"[N\x88\x89\]})(aesutld\x85\x86\x87\x94]|[Khq\x80].|M..|[Jj]....|[G\x95].{8}"
_LONG_OPCODE = rb"\x8a(?:" + b"|".join(b"[%c]" % n + b"." * n for n in range(10)) + rb")"
# An index of the memo makes room for all before it: none is larger than the file, which has a byte
# or more for each.
_MEMO_INDEX_OPCODES = {
    16: rb"r..\x00\x00",
    20: rb"r..[\x00-\x0f]\x00",
    24: rb"r...\x00",
    28: rb"r...[\x00-\x0f]",
}
# At most so many at once: the longer a match, the more memory it takes to be able to go back.
_OPCODE_RUNS = {
    bits: re.compile(
        b"(?:" + b"|".join([_FIXED_OPCODES, index, _LONG_OPCODE, _LINE_OPCODES]) + b"){0,256}",
        re.DOTALL,
    )
    for bits, index in _MEMO_INDEX_OPCODES.items()
}
_LENGTH_PREFIX_BYTES = {
    b"X": 4,
    b"\x8c": 1,
    b"\x8d": 8,
    b"U": 1,
    b"T": 4,
    b"C": 1,
    b"B": 4,
}  # strings, and the bytes of their length
_IMPORT_OPCODES = (b"c", b"i")  # what to import follows, in two lines
_EXTERNAL_OPCODES = {
    b"P": "persistent id", b"Q": "persistent id",
    b"\x82": "extension registry", b"\x83": "extension registry", b"\x84": "extension registry",
}  # fmt: skip
_CALL_OPCODES = (b"R", b"o", b"b", b"\x81", b"\x92")


class NotPlainError(Exception):
    """The bytes are no pickle of plain data. Nothing of them was run."""


class HostileError(NotPlainError):
    """The bytes want to import or call something."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Every way of a pickle to code leads through here: a second lock behind the first."""
        raise HostileError(_format_refusal(f"import {module}.{name}"))

    def persistent_load(self, pid: Any) -> Any:
        raise HostileError("it refers to an object outside of it, as no dump does")


def safe_loads(data: bytes) -> object:
    """Raises HostileError for what would run something, NotPlainError for other things than plain
    data, or no pickle.
    """
    _check_opcodes(data)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except NotPlainError:
        raise
    except (
        Exception
    ) as error:  # the ways in which bytes can fail to be a pickle are many; MemoryError is one
        raise NotPlainError(
            f"it cannot be read as a pickle: {type(error).__name__}: {error}"
        ) from error


def _check_opcodes(data: bytes) -> None:
    """Raises NotPlainError at the first instruction that does more than build plain data, or that
    the data does not hold.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise NotPlainError(f"it is larger than {MAX_PICKLE_BYTES >> 20} MiB, as no dump is")
    run = next(pattern for bits, pattern in _OPCODE_RUNS.items() if len(data) < 1 << bits)
    at, strings = 0, (b"", b"")
    while True:
        found = run.match(data, at)
        assert found is not None  # it matches nothing, too
        moved, at = found.end() > at, found.end()
        operation = data[at : at + 1]
        if operation == b".":
            return
        if (size := _LENGTH_PREFIX_BYTES.get(operation)) is not None:
            start = at + 1 + size
            at = start + int.from_bytes(data[at + 1 : start], "little")
            if start > len(data) or at > len(data):
                raise NotPlainError(
                    "it cannot be read as a pickle: it is cut off in a string, or claims a longer"
                    " one than it holds"
                )
            strings = (strings[1], data[start : min(at, start + 100)])
        elif not moved:
            raise _build_refusal(data, at, strings)


def _build_refusal(data: bytes, at: int, strings: tuple[bytes, bytes]) -> NotPlainError:
    operation = data[at : at + 1]
    if not operation:
        return NotPlainError("it cannot be read as a pickle: it is cut off")
    if not data.startswith(b"\x80") and not data.endswith(b"."):
        return NotPlainError("it is no pickle and no JSON")
    if operation in _IMPORT_OPCODES:
        names = data[at + 1 : at + 203].split(b"\n")[:2]
        return HostileError(_format_refusal(f"import {_join_names(*names)}"))
    if operation == b"\x93":
        return HostileError(_format_refusal(f"import {_join_names(*strings)}"))
    if operation in _CALL_OPCODES:
        return HostileError(_format_refusal("call or build an object"))
    if operation in _EXTERNAL_OPCODES:
        return HostileError(
            f"it refers to an object outside of it ({_EXTERNAL_OPCODES[operation]}), as no dump"
            " does: it was not run"
        )
    return NotPlainError(f"it cannot be read as a pickle of plain data: byte {at} is {operation!r}")


def _join_names(*names: bytes) -> str:
    return ".".join(name.decode("utf-8", "replace") for name in names)


def _format_refusal(action: str) -> str:
    return (
        f"it wants to {action}, as no dump does: it was not run. Do not trust where it comes from"
    )
