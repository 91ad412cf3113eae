"""Results that are computed once for all readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

MIN_LIFETIME_S = 0.4
# The lifetime is at least this many times the time that the computation took: so no result takes
# more than a 25th of one core.
LIFETIME_COST_FACTOR = 25.0
MAX_CACHED_RESULTS = 256


@dataclass(frozen=True, slots=True)
class _CachedResult:
    value: Any
    expires_at: float


@dataclass(slots=True, kw_only=True)
class ResultCache:
    """Results by key. A key must contain everything that its result depends on except the time."""

    clock: Callable[[], float] = time.monotonic
    _results: dict[Hashable, _CachedResult] = field(default_factory=dict)

    def get_or_compute(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result for ``key``, computed again if the last one is too old. An exception of
        ``compute`` is not kept.
        """
        started_at = self.clock()
        cached = self._results.get(key)
        if cached is not None and started_at < cached.expires_at:
            return cached.value  # type: ignore[no-any-return] # under one key there is one type
        value = compute()
        finished_at = self.clock()
        self._results.pop(key, None)
        lifetime_s = max(MIN_LIFETIME_S, LIFETIME_COST_FACTOR * (finished_at - started_at))
        self._results[key] = _CachedResult(value, finished_at + lifetime_s)
        while len(self._results) > MAX_CACHED_RESULTS:
            del self._results[next(iter(self._results))]
        return value
