"""The bounds of numbers and texts in messages. The annotation of a field states them, and the server refuses a
message with a value outside of them (`server.ingest.heartbeat_checks`).

They are as wide as what a recorder writes into a ring. The node agent leaves out a process whose values are
refused (`agent.node.discovery.watched`).
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any, NamedTuple, TypeVar

T = TypeVar("T")


class Bounds(NamedTuple):
    """The least and the greatest value of a number, or length of a text in characters."""

    least: float
    greatest: float
    pattern: str = ""  # what the whole text must match


MAX_INTEGER = (1 << 63) - 1  # no database has larger numbers
MAX_SECONDS = 2e10  # 2**64 ns, and few enough for dates
MAX_RANKS = 1 << 18
MAX_TEXT_LENGTH = 64 << 10
MAX_DURATION_US = 1e12
# Neither control characters, nor what starts a new line or changes the direction of text.
_PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]+\Z"

Count = Annotated[int, Bounds(0, MAX_INTEGER)]
Total = Annotated[int, Bounds(0, 1 << 60)]  # a part of a sum
Rank = Annotated[int, Bounds(0, MAX_RANKS - 1)]
RankCount = Annotated[int, Bounds(0, MAX_RANKS)]
RestartCount = Annotated[int, Bounds(0, (1 << 31) - 1)]
Hash64 = Annotated[int, Bounds(0, (1 << 64) - 1)]
SizeClass = Annotated[int, Bounds(0, 64)]
Bucket = Annotated[int, Bounds(0, 319)]  # that of `MAX_DURATION_US` in a `DurationHistogram`
BucketCount = Annotated[int, Bounds(1, 1 << 40)]
Microseconds = Annotated[int, Bounds(-1, MAX_DURATION_US)]  # -1: not known
MaybeTotal = Annotated[int, Bounds(-1, 1 << 60)]  # -1: not known
PositiveSeconds = Annotated[float, Bounds(0, MAX_SECONDS)]
Finite = Annotated[float, Bounds(-sys.float_info.max, sys.float_info.max)]
Name = Annotated[str, Bounds(1, 256, _PRINTABLE)]  # names a job, a host, an agent or a process

# The bounds of all other fields, by type.
TYPE_BOUNDS = {
    int: Bounds(-MAX_INTEGER, MAX_INTEGER),
    float: Bounds(-MAX_SECONDS, MAX_SECONDS),
    str: Bounds(0, MAX_TEXT_LENGTH),
}

MAX_ITEMS_KEPT = 128


def limit_texts(value: T, max_chars: int) -> T:
    """A value, such as a message, that has no text of more characters in it, and no list of more than
    `MAX_ITEMS_KEPT` items.
    """
    limited: Any = value
    if type(value) is str:  # and no name of an enumeration
        limited = limited[:max_chars]
    elif isinstance(value, tuple):
        limited = tuple([limit_texts(item, max_chars) for item in value[:MAX_ITEMS_KEPT]])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [member.name for member in dataclasses.fields(value)]
        texts = {name: limit_texts(getattr(value, name), max_chars) for name in names}
        limited = dataclasses.replace(value, **texts)
    return limited  # type: ignore[no-any-return] # the value has the same type
