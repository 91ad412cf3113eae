"""What is worked out once for all who look at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

SHORTEST = 0.4  # seconds for which a result holds at least
SHARE = (
    25.0  # and this many times what it took, so that no result takes more than a 25th of one core
)
KEPT = 256


@dataclass(frozen=True, slots=True)
class _Kept:
    value: Any
    due: float


@dataclass(slots=True, kw_only=True)
class Memo:
    """Results by key. A key must hold all that its result depends on besides the time."""

    clock: Callable[[], float] = time.monotonic
    _kept: dict[Hashable, _Kept] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result for `key`, made anew where the last one is too old. An exception of `make` is
        not kept.
        """
        began = self.clock()
        held = self._kept.get(key)
        if held is not None and began < held.due:
            return held.value  # type: ignore[no-any-return] # under one key there is one type
        value = make()
        ended = self.clock()
        self._kept.pop(key, None)
        self._kept[key] = _Kept(value, ended + max(SHORTEST, SHARE * (ended - began)))
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return value
