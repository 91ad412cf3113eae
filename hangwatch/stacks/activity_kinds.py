"""The kinds of activity that a stack can show."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from hangwatch.model.threads import ThreadStack


class RequiredProgress(enum.Enum):
    """Which of the threads and processes that a thread may wait for must work, so that the wait is
    not a hang.
    """

    NONE = enum.auto()  # their work shows nothing: it may wait for something else
    ANY = enum.auto()  # they share its work, and those without any are idle
    NEWEST = enum.auto()  # it waits for the one that was started last
    ALL = enum.auto()  # it waits for one of them, and it is not known for which


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityKind:
    """What a thread waits for, or in what place it is."""

    phrase: str  # a predicate that follows the name of the rank
    advice: str = ""  # where to look
    waits_for_child: bool = False  # a child process may end the wait
    waits_for_thread: bool = False  # another thread of the process may end the wait
    # Neither another thread of the process nor a call of another rank can end the wait. A rank may
    # still end it in another way, such as by writing a file or setting a key.
    is_external: bool = False
    may_take_long: bool = False  # it may take long in a healthy job
    waits_for_rank: bool = False  # another rank may end the wait
    # The threads and processes that may end the wait have a frame in a file that matches this.
    file_pattern: str = ""
    required_progress: RequiredProgress = RequiredProgress.NONE

    def may_wait_for(self, other: ThreadStack) -> bool:
        """Whether ``other``, a thread of the same process or of a child, may end the wait."""
        is_child = other.pid is not None
        can_end_wait = self.waits_for_child if is_child else self.waits_for_thread
        if not can_end_wait:
            return False
        if not self.file_pattern:
            return True
        return any(re.search(self.file_pattern, frame.file) for frame in other.frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What one thread does, as far as its stack shows."""

    waits: ActivityKind | None = None  # what it waits for
    inside: ActivityKind | None = None  # where: in what larger operation

    def __bool__(self) -> bool:
        return self.waits is not None or self.inside is not None

    def __str__(self) -> str:
        if self.waits is None and self.inside is not None:
            phrase = self.inside.phrase
            predicate = phrase.removeprefix("while it ")
            return predicate if predicate != phrase else f"is {phrase}"
        kinds = (self.waits, self.inside)
        return " ".join(kind.phrase for kind in kinds if kind is not None)

    @property
    def advice(self) -> str:
        source = self._advice_source
        return source.advice if source is not None else ""

    @property
    def may_take_long(self) -> bool:
        """Whether the advice is on something that may take long in a healthy job."""
        source = self._advice_source
        return source is not None and source.may_take_long

    @property
    def _advice_source(self) -> ActivityKind | None:
        """The place, whose advice is more specific than that of the wait."""
        for kind in (self.inside, self.waits):
            if kind is not None and kind.advice:
                return kind
        return None
