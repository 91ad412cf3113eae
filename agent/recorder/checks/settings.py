"""What the environment of the job asks for. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHECKS = ("replicas", "nonfinite", "values")
EVERY = 16  # calls, of which one is sampled
RECORDER = "what HANGWATCH_CHECKS asks for is examined in Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """``problems`` are what is not understood, each with its remedy; the rest holds all the same."""

    replicas: bool = False
    nonfinite: bool = False
    values: bool = False
    every: int = EVERY
    problems: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        return self.replicas or self.nonfinite or self.values

    @property
    def names(self) -> str:
        return ", ".join(name for name in CHECKS if getattr(self, name))


def asked(env: Mapping[str, str]) -> Asked:
    """HANGWATCH_CHECKS and HANGWATCH_CHECK_EVERY."""
    names = [name.strip().lower() for name in env.get("HANGWATCH_CHECKS", "").split(",")]
    problems = [
        f"HANGWATCH_CHECKS knows no {name!r}: it takes {', '.join(CHECKS)}"
        for name in names
        if name and name not in CHECKS
    ]
    told = env.get("HANGWATCH_CHECK_EVERY", "").strip()
    every = int(told) if told.isascii() and told.isdigit() else 0
    if told and not every:
        problems.append(f"HANGWATCH_CHECK_EVERY={told} is no number of calls: {EVERY} is taken")
    return Asked(
        **{name: name in names for name in CHECKS}, every=every or EVERY, problems=tuple(problems)
    )
