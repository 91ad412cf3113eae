"""How many calls a program of the zoo makes before its fault: a number drawn for each program from one
seed. The programs make them with tests/zoo/support/earlier_calls.py.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, replace

from .expected import ExpectedVerdict

SEED_VARIABLE = "HANGWATCH_ZOO_SEED"
MIN_CALLS, MAX_CALLS = 300, 5000
_CALL_NUMBERS = re.compile(r"\b(calls?) (\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The number of calls that a job makes before its fault, and the seed from which it draws
    them.
    """

    calls: int
    seed: int

    @property
    def env(self) -> dict[str, str]:
        """The variables from which ``earlier_calls`` takes both."""
        return {"EARLIER_CALLS": str(self.calls), "EARLIER_CALLS_SEED": str(self.seed)}


NO_EARLIER_CALLS = Depth(calls=0, seed=0)


def choose_seed() -> int:
    """The seed that HANGWATCH_ZOO_SEED gives, or else a new one."""
    given = os.environ.get(SEED_VARIABLE)
    return int(given) if given else random.SystemRandom().randrange(1_000_000)


def draw_depth(name: str, seed: int) -> Depth:
    """The depth of the program `name`, as likely between 300 and 600 calls as between 2,500 and
    5,000.
    """
    draw = random.Random(f"{seed} {name}")
    calls = round(MIN_CALLS * (MAX_CALLS / MIN_CALLS) ** draw.random())
    return Depth(calls=calls, seed=draw.randrange(1 << 32))


def draw_recorder(name: str, seed: int) -> str:
    """The recorder with which CI runs the program `name`."""
    return random.Random(f"{seed} {name} recorder").choice(("python", "native"))


def shift_call_numbers(expected: ExpectedVerdict, calls: int) -> ExpectedVerdict:
    """The verdict that is expected if `calls` calls come before those of the program itself: the
    numbers of calls in its texts and rows are higher by as many.
    """

    def shift_text(match: re.Match[str]) -> str:
        first, last = int(match[2]) + calls, match[3]
        return f"{match[1]} {first}" + (f"-{int(last) + calls}" if last else "")

    return replace(
        expected,
        summary=tuple(_CALL_NUMBERS.sub(shift_text, part) for part in expected.summary),
        divergence=tuple(
            [None if number is None else number + calls for number in row]
            for row in expected.divergence
        ),
    )
