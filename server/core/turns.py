"""A queue in which families of jobs take turns, so that whatever one of them queues delays the items
of another by no more than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class TurnQueue(Generic[T]):
    """The items of one family are taken in the order in which they were put, urgent ones first."""

    # The urgent items and the others of each family. The first family is the next one.
    _waiting: dict[str, tuple[deque[T], deque[T]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(self.count, list(self._waiting)))  # a copy: other threads put items

    def count(self, family: str) -> int:
        return sum(map(len, self._waiting.get(family, ())))

    def put(self, family: str, item: T, *, urgent: bool = False) -> None:
        waiting = self._waiting.setdefault(family, (deque(), deque()))
        waiting[not urgent].append(item)

    def take(self, resting: Container[str] = ()) -> T | None:
        """Takes the next item of a family that is not ``resting``; None if there is none."""
        family = next((family for family in self._waiting if family not in resting), None)
        if family is None:
            return None
        urgent, usual = waiting = self._waiting.pop(family)
        item = (urgent or usual).popleft()
        if urgent or usual:
            self._waiting[family] = waiting  # behind the others
        return item
